"""Settings of a component: from flags, else the environment, else a TOML file, else defaults.

The field `bind` of the broker is the flag `--bind`, the variable `LLMRT_BROKER_BIND` and the key
`bind` in section `[broker]` of the file. A name that nobody knows is an error in a flag, in the
file and in a variable of the component; any other variable `LLMRT_...` may be meant for something
else, and is worth a warning.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias, TypeVar, get_args, get_type_hints

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.settings import UpSettings
from llmrt.wire.errors import ConfigError
from llmrt.workers.settings import WorkerSettings

T = TypeVar("T", BrokerSettings, WorkerSettings, UpSettings)
Section: TypeAlias = type[BrokerSettings] | type[WorkerSettings] | type[UpSettings]

SECTIONS: dict[str, Section] = {
    "broker": BrokerSettings,
    "worker": WorkerSettings,
    "up": UpSettings,
}
DEFAULT_FILE = Path("llmrt.toml")
_PREFIX = "LLMRT_"
_NO_SETTINGS = ("LLMRT_LOG", "LLMRT_CACHE")
# What a process is told by the one that started it, and tests by who runs them.
_NOT_FOR_USERS = ("LLMRT_PARENT_PID", "LLMRT_READY_FD", "LLMRT_TEST_")
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_NONE = "none"


def load(
    kind: type[T],
    flags: Mapping[str, object],
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> T:
    """The settings of one component; a flag that is None counts as not given.

    Raises `ConfigError` naming the setting, where its value came from and what is allowed.
    """
    section = section_of(kind)
    types = get_type_hints(kind)
    from_file = _read_file(file, is_given=file is not None)[section]
    from_env = _read_env(section, environ)
    values: dict[str, Any] = {}
    for field in fields(kind):
        name = field.name
        if flags.get(name) is not None:
            values[name] = flags[name]
        elif name in from_env:
            values[name] = _parse(from_env[name], types[name], env_name(section, name))
        elif name in from_file:
            values[name] = _check(from_file[name], types[name], f"{name} in section [{section}]")
        elif field.default is MISSING:
            raise ConfigError(
                f"{section} needs {name}: give {flag_name(name)}, set {env_name(section, name)}, "
                f"or write {name} into section [{section}] of {DEFAULT_FILE}"
            )
    return kind(**values)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each variable `LLMRT_...` that nothing here reads."""
    known = [*_NO_SETTINGS]
    for section, kind in SECTIONS.items():
        known += [env_name(section, field.name) for field in fields(kind)]
    lines = []
    for name in sorted(environ):
        if name.startswith(_PREFIX) and not name.startswith(_NOT_FOR_USERS) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            lines.append(f"unknown environment variable {name}: did you mean {nearest}?")
    return lines


def section_of(kind: Section) -> str:
    return next(section for section, known in SECTIONS.items() if known is kind)


def flag_name(field: str) -> str:
    """`has_prefix_cache` is asked for by `--prefix-cache`."""
    return "--" + field.removeprefix("has_").replace("_", "-")


def env_name(section: str, field: str) -> str:
    return f"LLMRT_{section}_{field}".upper()


def _read_file(file: Path | None, *, is_given: bool) -> dict[str, dict[str, object]]:
    """All sections, with their names and keys checked."""
    import tomllib

    path = file or DEFAULT_FILE
    empty: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    if not is_given and not path.exists():
        return empty
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    for section, content in document.items():
        if section not in SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]{_nearest(section, SECTIONS)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {section} is a value: write a section [{section}]")
        known = [field.name for field in fields(SECTIONS[section])]
        for key in content:
            if key not in known:
                raise ConfigError(
                    f"{path}: unknown key {key} in section [{section}]{_nearest(key, known)}"
                )
    return empty | document


def _read_env(section: str, environ: Mapping[str, str]) -> dict[str, str]:
    known = {env_name(section, field.name): field.name for field in fields(SECTIONS[section])}
    prefix = env_name(section, "")
    found = {}
    for variable, text in environ.items():
        if variable.startswith(prefix):
            if variable not in known:
                raise ConfigError(
                    f"unknown environment variable {variable}{_nearest(variable, known)}"
                )
            found[known[variable]] = text
    return found


def _parse(text: str, annotation: Any, origin: str) -> object:
    """The value of a text from the environment; `none` stands for None where that is allowed."""
    kind, is_optional = _kind_of(annotation)
    if is_optional and text.lower() == _NONE:
        return None
    try:
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise _wrong(text, kind, is_optional, origin) from None


def _check(value: object, annotation: Any, origin: str) -> object:
    """The value of a TOML key, which has a type of its own."""
    kind, is_optional = _kind_of(annotation)
    if is_optional and value == _NONE:
        return None
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _wrong(value, kind, is_optional, origin)
    return value


def _kind_of(annotation: Any) -> tuple[type[Any], bool]:
    """`int | None` is (int, True)."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    assert len(kinds) == 1, annotation
    return kinds[0], NoneType in get_args(annotation)


def _wrong(value: object, kind: type[Any], is_optional: bool, origin: str) -> ConfigError:
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    wanted = words.get(kind, "a text") + (' or "none"' if is_optional else "")
    return ConfigError(f"{origin} is {value!r}: {wanted} is needed")


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {matches[0]}?" if matches else f": use one of {', '.join(known)}"
