"""`llmrt doctor`: whether a worker can run here, how fast, and what would help."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmrt.cli.config import load
from llmrt.cli.options import ConfigOption, JsonOption
from llmrt.wire.errors import ConfigError
from llmrt.workers.settings import WorkerSettings

if TYPE_CHECKING:
    from llmrt.kernels.cpu.library import Family

# As /proc/cpuinfo names what family_*.c is compiled for.
_FLAGS = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
}
_WORKER_PACKAGES = ("numpy", "tokenizers", "safetensors", "minijinja")


@dataclass(frozen=True, slots=True)
class Check:
    """`status`: ok; warning, a worker runs but loses something; error, it cannot run."""

    name: str
    value: str
    status: str = "ok"
    remedy: str = ""


def doctor(config: ConfigOption = None, json_output: JsonOption = False) -> None:
    """Check what a worker with the settings in force here needs; exit with 1 if it cannot run.

    Example: llmrt doctor
    """
    checks = list(examine(config))
    is_ok = all(check.status != "error" for check in checks)
    if json_output:
        print(json.dumps({"is_ok": is_ok, "checks": [asdict(check) for check in checks]}))
    else:
        print(table(checks))
    raise typer.Exit(0 if is_ok else 1)


def examine(config: Path | None = None) -> Iterator[Check]:
    """All checks, in the order in which they matter. Settings are those of the environment and of
    `config`, or llmrt.toml; ones that cannot be read are a fault, and the defaults are examined.
    """
    settings = WorkerSettings(model=Path())
    yield _python()
    try:
        settings = load(WorkerSettings, {"model": settings.model}, config)
    except ConfigError as error:
        yield Check("settings", "not usable", "error", error.message)
    yield Check("cpu", _cpu())
    has_packages = True
    for check in _packages():
        has_packages &= check.status == "ok"
        yield check
    if has_packages:  # else what follows cannot be imported
        yield from _step(settings)
        yield _cores()
        yield from _memory()


def table(checks: list[Check]) -> str:
    """For people: one line per check, the remedy below it."""
    marks = {"ok": "ok", "warning": "WARN", "error": "FAIL"}
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{marks[check.status]:<5} {check.name:<{width}}  {check.value}")
        if check.remedy:
            lines.append(f"{'':<5} {'':<{width}}  -> {check.remedy}")
    return "\n".join(lines)


def _python() -> Check:
    import platform
    import sys

    from llmrt import __version__

    where = f"{platform.python_version()} at {sys.executable}, llmrt {__version__}"
    if sys.platform != "linux":
        return Check("python", where, "error", f"llmrt runs on Linux, this is {sys.platform}")
    return Check("python", where)


def _cpu() -> str:
    import platform

    return f"{_cpu_fact('model name') or 'unknown'} ({platform.machine()})"


def _cpu_fact(name: str) -> str:
    """What the kernel says of the first CPU, or nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _packages() -> Iterator[Check]:
    from importlib.util import find_spec

    missing = [name for name in _WORKER_PACKAGES if find_spec(name) is None]
    if missing:
        remedy = "a worker needs them: pip install 'llmrt[worker]'"
        yield Check("packages", f"without {', '.join(missing)}", "error", remedy)
    else:
        yield Check("packages", ", ".join(_WORKER_PACKAGES))


def _step(settings: WorkerSettings) -> Iterator[Check]:
    """What the settings make a worker compute with, the compiled step or torch, and what both of
    them are here."""
    from importlib.util import find_spec
    from shutil import which

    from llmrt.kernels.cpu.library import PATH, LibraryMissing, best_family, families

    has_torch = find_spec("torch") is not None
    try:
        best = best_family()
    except LibraryMissing as error:
        device = _device(settings, has_step=False, has_torch=has_torch)
        yield device
        yield Check("compiled step", "not usable", device.status, str(error))
    else:
        yield _device(settings, has_step=True, has_torch=has_torch)
        yield Check("compiled step", str(PATH))
        for family in families():
            yield Check(f"family {family.name}", _use(family, best, settings))
    compiler = which("cc") or which("gcc") or which("clang")
    yield Check("compiler", compiler or "none: only needed to build the compiled step")
    yield Check("torch", _torch(has_torch))


def _device(settings: WorkerSettings, *, has_step: bool, has_torch: bool) -> Check:
    """What a worker with these settings would compute with, and what it goes without."""
    from llmrt.engine.cpu_device import choose_family
    from llmrt.engine.cpu_program import check_kv_dtype
    from llmrt.workers.loading import DEVICES, TORCH_LACKS, check_torch

    asked = settings.device
    if asked not in DEVICES:
        return Check("device", asked, "error", f"one of {', '.join(DEVICES)} is needed")
    try:
        if asked != "torch" and has_step:
            check_kv_dtype(settings.kv_cache_dtype)
            family = choose_family(settings.cpu_family)
            return Check("device", f"cpu: the compiled step, family {family.name}")
        if asked == "cpu":
            remedy = "build the compiled step, or set device to auto or torch"
            return Check("device", "cpu cannot be used", "error", remedy)
        if not has_torch:
            value = "torch is not installed" if has_step else "there is none"
            return Check("device", value, "error", "pip install 'llmrt[torch]'")
        check_torch(settings)
    except ConfigError as error:
        return Check("device", f"{asked} does not go with other settings", "error", error.message)
    remedy = "set device to auto or cpu" if has_step else "build the compiled step"
    return Check("device", f"torch, without {TORCH_LACKS}", "warning", remedy)


def _use(family: "Family", best: "Family", settings: WorkerSettings) -> str:
    """Of a family: whether workers use it, and why or why not."""
    if not family.is_supported:
        return _missing(family.name)
    if settings.device == "torch":
        return "possible, but device is torch"
    if settings.cpu_family is not None:
        return "used: cpu_family says so" if family.name == settings.cpu_family else "possible"
    return "used: the first that this CPU has" if family == best else "possible"


def _missing(family: str) -> str:
    """What the CPU lacks for a family, as far as the kernel names it."""
    flags = set(_cpu_fact("flags").split())
    missing = [flag for flag in _FLAGS.get(family, ()) if flag not in flags]
    return f"not on this CPU, which lacks {', '.join(missing)}" if missing else "not on this CPU"


def _torch(is_there: bool) -> str:
    from importlib import metadata

    if not is_there:
        return "none: only needed for --device torch"
    return metadata.version("torch")


def _cores() -> Check:
    import os

    from llmrt.engine.cpu_cores import num_cores

    hardware = len(os.sched_getaffinity(0))
    return Check("threads", f"{num_cores()} by default, of {hardware} CPUs that may be used")


def _memory() -> Iterator[Check]:
    """Memory that is left, and whether an arena can be made, which is shared memory."""
    import resource

    from llmrt.kvtransfer.arena import Arena
    from llmrt.kvtransfer.host_memory import available_bytes
    from llmrt.wire.errors import ConfigError

    yield Check("memory", f"{available_bytes() / 2**30:.1f} GiB available")
    names = {"RLIMIT_AS": "address space", "RLIMIT_FSIZE": "file size"}
    limits = {names[name]: resource.getrlimit(getattr(resource, name))[0] for name in names}
    shown = ", ".join(
        f"{name} at most {limit / 2**20:.0f} MiB"
        for name, limit in limits.items()
        if limit != resource.RLIM_INFINITY
    )
    try:
        Arena.create(1, resource.getpagesize(), name="llmrt-doctor").close()
    except ConfigError as error:
        yield Check("shared memory", shown or "not usable", "error", error.message)
    else:
        yield Check("shared memory", shown or "no limits but memory")
