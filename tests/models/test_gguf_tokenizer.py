"""Tokenizers rebuilt from GGUF metadata, against those that they were made from."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from llmrt.models.gguf import read_gguf
from llmrt.models.gguf_tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from llmrt.models.tokenizer import Tokenizer
from llmrt.wire.errors import ModelError

CORPUS = (
    "the quick brown fox jumps over the lazy dog; it's 1234 o'clock and we'll go\n\n",
    "def f(x):\n    return {'a': x ** 2}\n",
    "# caf\u00e9 na\u00efve \u4f60\u597d\u4e16\u754c \U0001f680\U0001f680\n",
    "the then there other mother father   spaces\t\ttabs 2026-11-30 3.14159\r\n",
)
TRICKY = (
    "",
    " ",
    "   ",
    "\n",
    "\r\n\r\n",
    "\t \n \t",
    "Hello world",
    " Hello  world",
    "Hello   \n\n\n   world\t\t!",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01",
    "\u65e5\u672c\u8a9e\u3068\ud55c\uad6d\uc5b4",
    "\U0001f680 \U0001f636\u200d\U0001f32b\ufe0f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1f3",
    "def f(x):\n    return {\n        'a': x**2,  # c\n\t\t'b': [1,2]}\n",
    "1234567890 3.14159 1,000,000 0x1F 2026-11-30",
    "I'm we're THEY'LL can't 'S 'T",
    "caf\u00e9 cafe\u0301 na\u00efve \u212bA\u030a \ufb01",
    "\u200b\u200d\ufeff zero width",
    "a\u00a0b\u3000c\u2003d",
    "x = <0x0A> <0xE4>",
    "\u00c3\u00c2\u00a9\x00\x01\x7f",
    "\u0178\u0120 \u010a \u2581\u2581under \u2581",
    "https://example.com/?q=a%20b&c=d#e",
    "\u0391\u0392\u0393 \u0420\u0443\u0441 \u0627\u0644",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "!!!???...---___===***",
    "'''\"\"\"```\n```python\nprint('hi')\n```",
    "word" * 50,
    " " * 17 + "x" + " " * 40,
    "\n" * 9 + "y",
    "$1,299.99\u20ac \u00a5100 \u00bd \u00b2 \u2460",
    "CamelCaseAndsnake_case-and-kebab",
    "<|end|>a<|end|>",
    "\U0001f9d1\u200d\U0001f4bb\U0001d4b3\U0002070e",
)


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    pool = ["the", " of", "\n", "\t", "  ", "12", "3", "\u00e9", "\u4f60", "\u597d", "\U0001f680"]
    pool += [
        "'ll",
        "'",
        "{",
        "}",
        "->",
        "\u044e",
        "\u0628",
        "\u0939\u093f",
        "\ud55c",
        "A",
        "b",
        "_",
    ]
    pool += [".", "\u2581", "\u0301", "\u00a0", "\r\n", "\u017f", "\u01c5"]
    return ["".join(rng.choices(pool, k=rng.randint(1, 24))) for _ in range(count)]


TEXTS = (*TRICKY, *random_texts(300))


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return read_gguf(smollm2_path).metadata


@pytest.fixture(scope="module")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


def trained() -> tokenizers.Tokenizer:
    """Byte-level BPE with GPT-2's pattern, a control token and one of the user's."""
    made = tokenizers.Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<note>", special=False, normalized=False)])
    return made


def metadata_of(made: tokenizers.Tokenizer, **changes: Any) -> dict[str, Any]:
    model = json.loads(made.to_str())["model"]
    pieces = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)
    kinds = {"<|end|>": CONTROL, "<note>": USER_DEFINED}
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": pieces,
        "token_type": [kinds.get(piece, NORMAL) for piece in pieces],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "eos_token_id": made.token_to_id("<|end|>"),
        "bos_token_id": made.token_to_id("<|end|>"),
        **changes,
    }
    found = {f"tokenizer.ggml.{key}": v for key, v in values.items() if v is not None}
    return {"general.architecture": "llama", **found}


def spm_metadata(pieces: dict[str, int], **changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary; earlier pieces have better scores."""
    values = {
        "model": "llama",
        "tokens": list(pieces),
        "token_type": list(pieces.values()),
        "scores": [-float(i) for i in range(len(pieces))],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    found = {f"tokenizer.ggml.{key}": v for key, v in values.items() if v is not None}
    return {"general.architecture": "llama", **found}


BYTES = {f"<0x{byte:02X}>": 6 for byte in range(256)}
SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
LETTERS = {"\u2581": NORMAL, "h": NORMAL, "e": NORMAL, "l": NORMAL, "o": NORMAL}
SPM = {**SPECIAL, **BYTES, "he": 1, "ll": 1, "hell": 1, "hello": 1, "\u2581hello": 1, **LETTERS}


def names(tokenizer: Tokenizer, text: str, metadata: dict[str, Any]) -> list[str]:
    pieces = metadata["tokenizer.ggml.tokens"]
    return [pieces[i] for i in tokenizer.encode(text, add_special=False)]


def test_ids_and_text_are_those_of_the_tokenizer_that_it_was_made_from() -> None:
    made = trained()
    rebuilt = Tokenizer.from_gguf(metadata_of(made))
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, add_special=False).tolist() == ids
        assert rebuilt.decode(ids) == made.decode(ids)


def test_smollm2_is_digits_and_byte_level_bpe(
    smollm2_metadata: dict[str, Any], smollm2: Tokenizer
) -> None:
    """The oracle is what `tokenizer.json` of the model's repository describes."""
    pieces = smollm2_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in smollm2_metadata["tokenizer.ggml.merges"]]
    oracle = tokenizers.Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, merges))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    oracle.add_special_tokens([AddedToken(piece, normalized=False) for piece in pieces[:17]])
    for text in TEXTS:
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert smollm2.encode(text, add_special=False).tolist() == expected
        assert smollm2.decode(expected) == text


def test_smollm2_has_its_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.eos_token_ids == {2}
    assert not smollm2.adds_bos
    assert smollm2.token_bytes[1] == b""
    assert smollm2.vocab_size == 49152
    assert not smollm2.strips_leading_space


def test_a_control_token_adds_no_text_and_a_user_defined_one_its_own() -> None:
    made = trained()
    rebuilt = Tokenizer.from_gguf(metadata_of(made))
    ids = rebuilt.encode("a<note>b<|end|>", add_special=False)
    assert made.token_to_id("<note>") in ids
    assert made.token_to_id("<|end|>") in ids
    assert rebuilt.decode(ids) == "a<note>b"


@pytest.mark.parametrize(
    ("pre", "adds_bos", "expected"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_the_file_decides_about_bos_and_else_the_family(
    pre: str, adds_bos: bool | None, expected: bool
) -> None:
    metadata = metadata_of(trained(), pre=pre, add_bos_token=adds_bos)
    assert Tokenizer.from_gguf(metadata).adds_bos is expected


def test_an_end_token_in_the_middle_of_a_turn_is_found_by_name_if_the_template_writes_it() -> None:
    metadata = metadata_of(trained(), eos_token_id=5)
    end = trained().token_to_id("<|end|>")
    assert Tokenizer.from_gguf(metadata).eos_token_ids == {5}
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}<|end|>"
    assert Tokenizer.from_gguf(metadata).eos_token_ids == {5, end}
    metadata["tokenizer.ggml.eot_token_id"] = 7
    assert Tokenizer.from_gguf(metadata).eos_token_ids == {5, 7, end}


def test_merges_of_sentencepiece_follow_from_the_scores() -> None:
    metadata = spm_metadata(SPM)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert names(tokenizer, "hello hell", metadata) == ["\u2581hello", "\u2581", "hell"]
    # "ll" is better than nothing, but "he" comes first.
    assert names(tokenizer, "helel", metadata) == ["\u2581", "he", "l", "e", "l"]


def test_sentencepiece_text_comes_back_through_byte_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata(SPM))
    assert tokenizer.strips_leading_space
    for text in (text for text in TEXTS if "\u2581" not in text):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_sentencepiece_without_space_prefix_takes_the_text_as_it_is() -> None:
    metadata = spm_metadata(SPM, add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert names(tokenizer, "hello", metadata) == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello", add_special=False)) == " hello"


def test_runs_of_spaces_in_gemma_vocabularies_are_one_token() -> None:
    runs = {"  ": USER_DEFINED, "   ": USER_DEFINED}
    metadata = spm_metadata(SPM | runs)
    metadata["general.architecture"] = "gemma3"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert names(tokenizer, "he   he", metadata) == ["he", "   ", "he"]
    assert tokenizer.decode(tokenizer.encode("he   he", add_special=False)) == "he   he"
    assert max(tokenizer.encode("he" + " " * 9, add_special=False)) < tokenizer.vocab_size


def test_of_pieces_spelled_alike_the_first_is_used() -> None:
    metadata = metadata_of(trained())
    first = metadata["tokenizer.ggml.tokens"].index("a")
    metadata["tokenizer.ggml.tokens"].append("a")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert Tokenizer.from_gguf(metadata).encode("a", add_special=False).tolist() == [first]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "model is missing"),
        ("model", "t5", "one of gpt2"),
        ("pre", None, "pre is missing"),
        ("pre", "default", "'default'"),
        ("tokens", [], "tokens is missing"),
        ("tokens", [1, 2], "list of str"),
        ("token_type", [1], "1 entries for"),
        ("merges", None, "merges is missing"),
        ("merges", ["ab"], "no pair"),
        ("merges", ["zz qq"], "no BPE"),
        ("eos_token_id", 1 << 20, "eos_token_id"),
        ("add_bos_token", 3, "add_bos_token"),
    ],
)
def test_damaged_metadata_is_refused_with_the_key(key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(metadata_of(trained(), **{key: value}))


def test_bos_without_an_id_cannot_be_added() -> None:
    with pytest.raises(ModelError, match="add_bos_token"):
        Tokenizer.from_gguf(metadata_of(trained(), bos_token_id=None, add_bos_token=True))


def test_the_hash_covers_all_that_decides_and_nothing_else() -> None:
    metadata = metadata_of(trained())
    pieces = metadata["tokenizer.ggml.tokens"]
    changes: list[dict[str, Any]] = [
        {},
        {"tokenizer.ggml.tokens": [*pieces[:-1], "<other>"]},
        {"tokenizer.ggml.merges": metadata["tokenizer.ggml.merges"][:-1]},
        {"tokenizer.ggml.pre": "smollm"},
        {"tokenizer.ggml.eos_token_id": 7},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.chat_template": "x"},
    ]
    hashes = [Tokenizer.from_gguf(metadata | change).tokenizer_hash for change in changes]
    assert len(set(hashes)) == len(changes)
    assert Tokenizer.from_gguf(metadata | {"general.name": "x"}).tokenizer_hash == hashes[0]
