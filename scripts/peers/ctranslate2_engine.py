"""CTranslate2: one batch per call."""

import json
from collections.abc import Sequence
from pathlib import Path

import ctranslate2
from workload import Clock, Prompt, measure, parse_options


class CTranslate2:
    def __init__(self, folder: str, threads: int) -> None:
        self._generator = ctranslate2.Generator(
            folder, device="cpu", compute_type="int8", intra_threads=threads, inter_threads=1
        )
        # It takes tokens as strings only.
        self._tokens = json.loads((Path(folder) / "vocabulary.json").read_text())

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Clock:
        batch = [[self._tokens[token_id] for token_id in prompt] for prompt in prompts]
        clock = Clock(len(prompts))

        def note(result: ctranslate2.GenerationStepResult) -> bool:
            clock.token(result.batch_id)
            return False

        self._generator.generate_batch(
            batch,
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
            callback=note,
        )
        return clock


def main() -> None:
    options = parse_options()
    engine = CTranslate2(options.model, options.threads)
    measure(options, f"ctranslate2 {ctranslate2.__version__}", engine.generate)


if __name__ == "__main__":
    main()
