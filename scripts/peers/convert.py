"""Make the other engines' forms of a GGUF model, from its dequantized weights. No network is used.

    convert.py MODEL.gguf OUT [openvino] [onnx] [ctranslate2]

OUT gets `hf` (bf16 safetensors) and a folder for each form that it lacks.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

# A look-up of a local folder on the hub hangs for minutes without a network.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

_BIN = Path(sys.executable).parent

# 4 bits where the engine has them, in the form that it runs fastest on a CPU.
COMMANDS = {
    "openvino": [
        *(f"{_BIN}/optimum-cli", "export", "openvino", "--task", "text-generation-with-past"),
        *("--weight-format", "int4", "--group-size", "64", "--model", "{source}", "{out}"),
    ],
    "onnx": [
        *(sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"),
        *("-i", "{source}", "-o", "{out}", "-c", "{out}/cache"),
        *("--extra_options", "int4_block_size=32", "int4_accuracy_level=4"),
    ],
    "ctranslate2": [
        *(f"{_BIN}/ct2-transformers-converter", "--quantization", "int8"),
        *("--model", "{source}", "--output_dir", "{out}"),
    ],
}


def main() -> None:
    gguf, out, *forms = sys.argv[1:]
    source = Path(out) / "hf"
    if not source.exists():
        _made(source, lambda folder: dequantize(Path(gguf), folder))
    for form in forms:
        if not (target := Path(out) / form).exists():
            print(f"making {target}", file=sys.stderr, flush=True)
            _made(target, lambda folder, form=form: convert(form, source, folder))


def dequantize(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**at, dtype=torch.float32)
    config = model.config.to_dict()
    # A model that knows that it was quantized is not saved: make one that does not.
    config.pop("quantization_config", None)
    plain = type(model)(type(model.config)(**config))
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(**at).save_pretrained(out)


def convert(form: str, source: Path, out: Path) -> None:
    subprocess.run([part.format(source=source, out=out) for part in COMMANDS[form]], check=True)


def _made(target: Path, make) -> None:
    """Only a whole `target` gets that name."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make(partial)
    partial.rename(target)


if __name__ == "__main__":
    main()
