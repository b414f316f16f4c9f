"""`llmrt version`: what runs here."""

import json
import platform

from llmrt import __version__
from llmrt.cli.options import JsonOption

_PACKAGES = ("pyzmq", "msgpack", "msgspec", "uvloop", "numpy", "tokenizers", "torch")


def version(json_output: JsonOption = False) -> None:
    """Print the versions of llmrt, its protocol and what it builds on."""
    from llmrt.wire.envelope import MAJOR, MINOR

    versions: dict[str, str | None] = {
        "llmrt": __version__,
        "protocol": f"{MAJOR}.{MINOR}",
        "python": platform.python_version(),
    }
    versions |= {package: _version(package) for package in _PACKAGES}
    if json_output:
        print(json.dumps(versions))
        return
    for name, number in versions.items():
        print(f"{name:<11} {number or 'not installed'}")


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
