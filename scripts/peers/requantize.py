"""`requantize.py IN.gguf OUT.gguf`: to Q4_0, the format that llama.cpp runs fastest on a CPU."""

import os
import sys

from llama_cpp import llama_cpp as api


def main() -> None:
    source, out = sys.argv[1:]
    params = api.llama_model_quantize_default_params()
    params.ftype = api.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    partial = f"{out}.partial"
    if api.llama_model_quantize(source.encode(), partial.encode(), params):
        sys.exit(f"error: llama.cpp cannot requantize {source}")
    os.replace(partial, out)


if __name__ == "__main__":
    main()
