"""llama.cpp through the C API, as llama-cpp-python binds it: llama-bench's loop plus an argmax."""

import ctypes
import sys
from collections.abc import Sequence

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as api
from workload import Clock, Prompt, measure, parse_options

# A context's tokens per sequence are rounded up to this by the library.
_PAD = 256
# ggml.h's GGML_LOG_LEVEL_ERROR, which the binding lacks.
_LOG_LEVEL_ERROR = 4


class LlamaCpp:
    """A model; each call has a context of its own, of the size that it needs."""

    def __init__(self, path: str, threads: int) -> None:
        api.llama_backend_init()
        self._threads = threads
        self._model = api.llama_model_load_from_file(
            path.encode(), api.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"error: llama.cpp cannot load {path}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Clock:
        num_streams, length = len(prompts), len(prompts[0])
        context = self._context(num_streams, length, new_tokens)
        batch = api.llama_batch_init(num_streams * length, 0, 1)
        try:
            _fill(batch, prompts, 0)
            clock = Clock(num_streams)
            for position in range(length, length + new_tokens):
                tokens = self._decode(context, batch)
                clock.step()
                _fill(batch, [[token] for token in tokens], position)
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)
        return clock

    def _context(self, num_streams: int, length: int, new_tokens: int) -> "api.llama_context_p":
        params = api.llama_context_default_params()
        params.n_ctx = num_streams * -(-(length + new_tokens) // _PAD) * _PAD
        params.n_batch = max(params.n_batch, num_streams * length)
        params.n_seq_max = num_streams
        params.n_threads = params.n_threads_batch = self._threads
        context = api.llama_init_from_model(self._model, params)
        if not context:
            sys.exit(f"error: llama.cpp cannot make a context of {params.n_ctx} tokens")
        return context

    def _decode(self, context: "api.llama_context_p", batch: "api.llama_batch") -> list[int]:
        """The most likely token of every position with logits."""
        if status := api.llama_decode(context, batch):
            sys.exit(f"error: llama_decode returned {status}")
        rows = sum(batch.logits[i] for i in range(batch.n_tokens))
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), (rows, self._vocab_size))
        return [int(row.argmax()) for row in logits]


def _fill(batch: "api.llama_batch", rows: Sequence[Sequence[int]], start: int) -> None:
    """Sequence i gets the tokens of row i at positions `start` on, with logits for its last."""
    i = 0
    for sequence, tokens in enumerate(rows):
        for offset, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = start + offset
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = offset == len(tokens) - 1
            i += 1
    batch.n_tokens = i


@api.llama_log_callback
def _errors_only(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    if level == _LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    options = parse_options()
    api.llama_log_set(_errors_only, ctypes.c_void_p())
    engine = LlamaCpp(options.model, options.threads)
    measure(options, f"llama-cpp-python {llama_cpp.__version__}", engine.generate)


if __name__ == "__main__":
    main()
