"""Where each family of vocabularies cuts text into words."""

import pytest

from llmrt.models.pretokenizers import pre_tokenizer
from llmrt.models.tokenizer_parts import byte_level_bytes
from llmrt.wire.errors import ModelError


def words(name: str, text: str) -> list[str]:
    pieces = pre_tokenizer(name).steps().pre_tokenize_str(text)
    return [byte_level_bytes(piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'll be 1234  x", ["I", "'ll", " be", " 1234", " ", " x"]),
        ("gpt-2", "I'LL", ["I", "'", "LL"]),
        ("smollm", "be 1234\u00b2", ["be", " ", "1", "2", "3", "4", "\u00b2"]),
        ("llama-bpe", "I'LL be 12345\n\n x", ["I", "'LL", " be", " ", "123", "45", "\n\n", " x"]),
        ("llama-bpe", "(a)!\r\n", ["(a", ")!\r\n"]),
        ("qwen2", "v12 ab", ["v", "1", "2", " ab"]),
        ("qwen2", "\u0939\u093f\u0928", ["\u0939", "\u093f\u0928"]),
        ("qwen35", "\u0939\u093f\u0928", ["\u0939\u093f\u0928"]),
        (
            "gpt-4o",
            "camelCase HTTPServer's 1234",
            ["camel", "Case", " HTTPServer's", " ", "123", "4"],
        ),
        ("tekken", "camelCase's 12", ["camel", "Case", "'s", " ", "1", "2"]),
        ("deepseek-v3", "a1234\u4f60\u597dx(y", ["a", "123", "4", "\u4f60\u597d", "x", "(y"]),
        ("deepseek-coder", "a 12\n\u4f60", ["a", " ", "1", "2", "\n", "\u4f60"]),
        ("falcon", "a1234 =b", ["a", "123", "4", " ", "=", "b"]),
    ],
)
def test_words_of_a_family(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


@pytest.mark.parametrize("name", ["qwen2", "qwen35", "command-r", "gpt-neox"])
def test_families_that_compose_characters(name: str) -> None:
    normalizer = pre_tokenizer(name).normalizer()
    assert normalizer is not None
    assert normalizer.normalize_str("e\u0301") == "\u00e9"
    assert pre_tokenizer("llama-bpe").normalizer() is None


@pytest.mark.parametrize("name", ["default", "", "qwen9000"])
def test_an_unknown_name_is_refused_and_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"is '{name}'.*smollm"):
        pre_tokenizer(name)
