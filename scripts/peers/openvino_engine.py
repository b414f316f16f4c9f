"""OpenVINO GenAI: the continuous batching pipeline, stepped by hand."""

from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai
from workload import MAX_KV_TOKENS, Clock, Prompt, measure, parse_options

# Of the paged attention on CPU.
_BLOCK_TOKENS = 32
# Its own default of 256 splits prompts finely and halves the prefill rate.
_STEP_TOKENS = 2048


class OpenVino:
    def __init__(self, folder: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = MAX_KV_TOKENS // _BLOCK_TOKENS
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = _STEP_TOKENS
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._num_requests = 0

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Clock:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        clock = Clock(len(prompts))
        handles = []
        for tensor in tensors:
            handles.append(self._pipeline.add_request(self._num_requests, tensor, config))
            self._num_requests += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for stream, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        for _ in output.generated_ids:
                            clock.token(stream)
        return clock


def main() -> None:
    options = parse_options()
    engine = OpenVino(options.model, options.threads)
    measure(options, f"openvino-genai {openvino_genai.__version__}", engine.generate)


if __name__ == "__main__":
    main()
