"""Print, as JSON, what a token reads of a .gguf: bytes of weights, and of KV per token of context.

Runs in llmrt's environment. Weights count as the file stores them, KV in 16 bits.
"""

import json
import sys
from pathlib import Path

from llmrt.cli.bench.roofline import read_model_bytes


def main() -> None:
    model = read_model_bytes(Path(sys.argv[1]), "bf16")
    print(json.dumps({"weights": model.weight_bytes, "kv": model.kv_bytes(1)}))


if __name__ == "__main__":
    main()
