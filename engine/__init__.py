"""One device, no network: scheduler, sampler, runner, detokenizer."""
