"""Codes are part of the protocol: each has one class, in the tree and in the documents."""

import re
from pathlib import Path

import pytest

from llmrt.wire import errors
from llmrt.wire.errors import ERROR_BY_CODE, LlmrtError, LocalError, RemoteError, error_from_code

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, LlmrtError)
]
LEAVES = [cls for cls in CLASSES if cls not in (LlmrtError, LocalError, RemoteError)]


def test_every_class_has_a_code_of_its_own() -> None:
    assert sorted(ERROR_BY_CODE) == sorted(cls.code for cls in CLASSES)
    assert len(ERROR_BY_CODE) == len(CLASSES)


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.code)
def test_an_error_survives_the_way(cls: type[LlmrtError]) -> None:
    error = error_from_code(cls("why").error_code, "why")
    assert type(error) is cls
    assert (error.message, str(error)) == ("why", "why")


def test_an_unknown_code_is_kept() -> None:
    error = error_from_code("of_a_later_version", "why")
    assert type(error) is RemoteError
    assert error.error_code == "of_a_later_version"


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.code)
def test_every_code_is_drawn_and_documented(cls: type[LlmrtError]) -> None:
    assert re.search(rf"{cls.__name__} +{cls.code}\b", errors.__doc__ or "")
    page = Path(__file__).parents[2] / "docs" / "wire.md"
    assert f"| `{cls.code}` | `{cls.__name__}` |" in page.read_text()
