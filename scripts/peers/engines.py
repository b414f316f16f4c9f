"""The engines: the environment, file and form of a model of each. Paths are below the root."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llmrt-peers"
HERE = Path(__file__).parent
SYNTHETIC = "llama-1.1b"


@dataclass(frozen=True)
class Engine:
    """`environment` None is llmrt's own; `form` is a file or folder in a model's folder."""

    name: str
    environment: str | None
    script: str
    form: str

    @property
    def is_ours(self) -> bool:
        return self.environment is None

    def python(self, root: Path) -> Path:
        if self.environment is not None:
            return root / self.environment / "bin" / "python"
        return own_python()


SHIPPED = "llama.cpp"
"""llama.cpp on the file as it is: what the ratios are taken to, besides the best."""

ENGINES = (
    Engine(SHIPPED, "llama-cpp", "llama_cpp_engine.py", "model.gguf"),
    Engine("llama.cpp-q4_0", "llama-cpp", "llama_cpp_engine.py", "q4_0.gguf"),
    Engine("openvino", "openvino", "openvino_engine.py", "openvino"),
    Engine("onnxruntime", "onnxruntime", "onnxruntime_engine.py", "onnx"),
    Engine("ctranslate2", "ctranslate2", "ctranslate2_engine.py", "ctranslate2"),
    Engine("llmrt", None, "llmrt_engine.py", "model.gguf"),
    Engine("llmrt-torch", None, "llmrt_torch_engine.py", "model.gguf"),
    Engine("llmrt-served", None, "llmrt_served_engine.py", "model.gguf"),
)
BY_NAME = {engine.name: engine for engine in ENGINES}


def own_python() -> Path:
    """That of llmrt's environment."""
    own = HERE.parents[1] / ".venv" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def model_folder(root: Path, model: str) -> Path:
    return root / "models" / model
