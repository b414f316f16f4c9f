"""ONNX Runtime GenAI: one generator per call."""

import json
from collections.abc import Sequence

import numpy as np
import onnxruntime_genai
from workload import Clock, Prompt, measure, parse_options


class OnnxRuntime:
    def __init__(self, folder: str, threads: int) -> None:
        config = onnxruntime_genai.Config(folder)
        # Left alone it uses half of the cores that it sees.
        session = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": session}}))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Clock:
        length = len(prompts[0]) + new_tokens
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(
            max_length=length, min_length=length, batch_size=len(prompts), do_sample=False
        )
        generator = onnxruntime_genai.Generator(self._model, params)
        token_ids = np.array(prompts, np.int32)
        clock = Clock(len(prompts))
        generator.append_tokens(token_ids)
        for _ in range(new_tokens):
            generator.generate_next_token()
            clock.step()
        return clock


def main() -> None:
    options = parse_options()
    engine = OnnxRuntime(options.model, options.threads)
    measure(options, f"onnxruntime-genai {onnxruntime_genai.__version__}", engine.generate)


if __name__ == "__main__":
    main()
