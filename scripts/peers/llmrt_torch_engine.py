"""llmrt in process on torch: what serves where there is no compiler."""

from pathlib import Path

import torch
from llmrt_engine import measure_llmrt_in_process
from workload import measure, parse_options

import llmrt
from llmrt.engine.torch_device import TorchDevice
from llmrt.models.loading import open_model


def main() -> None:
    options = parse_options()
    device = TorchDevice(open_model(Path(options.model)), threads=options.threads)
    version = f"llmrt {llmrt.__version__} {device.numerics_id} torch {torch.__version__}"
    measure(
        options,
        version,
        lambda prompts, new_tokens: measure_llmrt_in_process(device, prompts, new_tokens),
    )


if __name__ == "__main__":
    main()
