"""How a GGUF vocabulary of the gpt2 kind cuts text into words, by its `tokenizer.ggml.pre` name.

A GGUF file has only the name; the patterns are those of the models' own `tokenizer.json` files
and of llama.cpp's `llama-vocab.cpp`. Tokens never cross a cut, so that one wrong character in a
pattern gives other tokens without any error: an unknown name is refused, never guessed.

Patterns are Oniguruma's, which reads `\\U0001F600` as the letters that it is written with:
characters beyond `\\uFFFF` must stand for themselves.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from llmrt.wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`splits` cut the text one after the other, each isolating its matches.

    `is_nfc`: text is composed first (Unicode NFC). `ignores_merges`: a word that is a token as a
    whole is taken as it is. `adds_bos`: what holds for files that don't say.
    """

    splits: tuple[str, ...]
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.is_nfc else None

    def steps(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, to_bytes])


def pre_tokenizer(name: str) -> PreTokenizer:
    """The entry for a `tokenizer.ggml.pre` name; raises `ModelError` if there is none."""
    found = _BY_NAME.get(name)
    if found is None:
        raise ModelError(
            f"tokenizer.ggml.pre is {name!r}, which this release does not know: "
            f"it knows {', '.join(sorted(_BY_NAME))}"
        )
    return found


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _letters_digits(letter: str, digits: str) -> str:
    """The family of cl100k: a word with at most one mark before it, some digits, or marks."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letter}+"
    marks = rf" ?[^\s{letter.strip('[]')}\p{{N}}]+[\r\n]*"
    return rf"{_ENDINGS}|{word}|{digits}|{marks}{_BLANKS}"


def _cased_words(ending: str, digits: str) -> str:
    """The family of o200k: words are cut where small letters turn into capitals."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    mark = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{mark}{upper}*{lower}+{ending}|{mark}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_BLANKS}"


_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _BLANKS
)

_ENTRIES: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (("gpt-2", "mpt", "olmo"), PreTokenizer((_GPT2,))),
    (("gpt-neox",), PreTokenizer((_GPT2,), is_nfc=True)),
    (("smollm", "starcoder", "refact"), PreTokenizer((_DIGIT, _GPT2))),
    (("command-r",), PreTokenizer((_DIGIT, _GPT2), is_nfc=True)),
    (
        ("llama-bpe", "llama3", "llama-v3"),
        PreTokenizer(
            (_letters_digits(r"\p{L}", r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True
        ),
    ),
    (
        ("qwen2", "deepseek-r1-qwen"),
        PreTokenizer((_letters_digits(r"\p{L}", r"\p{N}"),), is_nfc=True),
    ),
    (("qwen35",), PreTokenizer((_letters_digits(r"[\p{L}\p{M}]", r"\p{N}"),), is_nfc=True)),
    (
        ("tekken",),
        PreTokenizer((_cased_words("", r"\p{N}"),), ignores_merges=True, adds_bos=True),
    ),
    (("gpt-4o",), PreTokenizer((_cased_words(rf"{_ENDINGS}?", r"\p{N}{1,3}"),))),
    (
        ("deepseek-coder",),
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    ),
    (
        ("deepseek-v3",),
        PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
    ),
    (
        ("falcon",),
        PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ),
)
_BY_NAME = {name: entry for names, entry in _ENTRIES for name in names}
