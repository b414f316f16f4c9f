"""Builds the compiled CPU step; everything else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/llmrt/kernels/cpu")
LIBRARY = "llmrt.kernels.cpu.libllmrt_cpu"
# No -march: each family of instructions names its own, and is chosen when the step runs.
FLAGS = ["-O2", "-g0", "-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]


class BuildStep(build_ext):
    """Builds a plain shared object, which ctypes loads: it knows nothing of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """The extension is optional: setuptools warns of an error and goes on."""
        try:
            super().build_extension(ext)
        except Exception:
            self.warn(
                "without a C compiler the CPU step is not built: CPU workers need torch and are "
                "slower. Install one (apt install gcc) and llmrt again"
            )
            raise


class TagWheel(bdist_wheel):
    """The library runs under any Python 3 of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            LIBRARY,
            sources=sorted(map(str, SOURCES.glob("*.c"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildStep, "bdist_wheel": TagWheel},
)
