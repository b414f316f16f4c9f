"""Encoding and decoding: text rules, special tokens, bounds, and folders with tokenizer.json."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, WordPiece

from llmrt.engine.batch import Vocabulary
from llmrt.engine.detokenizer import Detokenizer
from llmrt.models.chat_template import ChatTemplate
from llmrt.models.gguf import read_gguf
from llmrt.models.tokenizer import Tokenizer
from llmrt.wire.errors import InvalidRequest, ModelError

CORPUS = ("the quick brown fox jumps over the lazy dog 1234 ", "\u4f60\u597d \U0001f680 caf\u00e9 ")
TEXTS = (
    "",
    " ",
    "the dog",
    "  the  dog\n",
    "\u4f60\u597d\U0001f680",
    "a<|eot_id|>b",
    "x<note>y",
    "\0\ufeff",
)


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return read_gguf(smollm2_path).metadata


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    assert tokenizer.chat_template is not None
    return ChatTemplate(
        tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )


def chat_ids(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> list[int]:
    prompt = template.render([{"role": "user", "content": text}], now=0.0)
    return tokenizer.encode(prompt, add_special=False).tolist()


def fast_tokenizer(
    made: tokenizers.Tokenizer, folder: Path, **options: Any
) -> transformers.PreTrainedTokenizerFast:
    make: Any = transformers.PreTrainedTokenizerFast
    fast: transformers.PreTrainedTokenizerFast = make(tokenizer_object=made, **options)
    fast.save_pretrained(folder)
    return fast


def saved(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer as transformers saves it; it puts `<|bos|>` in front."""
    made = tokenizers.Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|eos|>", "<|eot_id|>"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<note>", special=False, normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return fast_tokenizer(made, folder, bos_token="<|bos|>", eos_token="<|eos|>")


def change_json(path: Path, **changes: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | changes))


@pytest.mark.parametrize(
    ("text", "num_tokens"), [("hi", 31), ("ab", 31), ("ab\0cd", 33), ("\U0001f600", 33)]
)
def test_prompt_lengths_of_the_smollm2_chat(
    tokenizer: Tokenizer, template: ChatTemplate, text: str, num_tokens: int
) -> None:
    assert len(chat_ids(tokenizer, template, text)) == num_tokens


def test_nul_and_byte_order_mark_are_kept(tokenizer: Tokenizer) -> None:
    text = "\ufeffab\0cd"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@pytest.mark.parametrize("parse_special", [True, False])
def test_half_a_surrogate_pair_is_refused_with_its_place(
    tokenizer: Tokenizer, parse_special: bool
) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+D83D\) at character 2"):
        tokenizer.encode("ab\ud83d", add_special=False, parse_special=parse_special)
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.min_tokens("\ude00")


def test_bos_comes_exactly_once(metadata: dict[str, Any], template: ChatTemplate) -> None:
    adding = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert chat_ids(adding, template, "hi")[:3] == [1, 9690, 198]
    assert len(chat_ids(adding, template, "hi")) == 31
    prompt = template.render([{"role": "user", "content": "hi"}], now=0.0)
    assert adding.encode(prompt, add_special=True).tolist() == chat_ids(adding, template, "hi")
    plain = adding.encode("hi", add_special=False).tolist()
    assert adding.encode("hi", add_special=True).tolist() == [1, *plain]
    assert adding.encode("", add_special=True).tolist() == [1]


def test_without_parse_special_a_control_token_is_text(tokenizer: Tokenizer) -> None:
    text = "<|im_end|>"
    assert tokenizer.encode(text, add_special=False).tolist() == [2]
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert 2 not in ids
    assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=200)
    | st.text(st.sampled_from(" \nabZ9.\u00e9\u4f60\x04"), max_size=400)
    | st.lists(st.sampled_from(["<|im_start|>", "  ", "Administration", "\n\n", "0"])).map("".join)
)
def test_min_tokens_is_a_lower_bound(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, add_special=False))


@pytest.mark.parametrize("text", ["a" * 320_000, "A" * 320_000, "1" * 20_000, "\u4f60" * 90_000])
def test_a_text_far_too_long_is_known_without_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.min_tokens(text) > 8192
    assert tokenizer.max_token_bytes == 81


def test_a_word_of_320000_letters_is_encoded_within_two_seconds(tokenizer: Tokenizer) -> None:
    start = time.process_time()
    assert len(tokenizer.encode("a" * 320_000, add_special=False)) == 80_000
    assert time.process_time() - start < 2.0


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    longest, is_done = 0.0, False

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not is_done:
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    tokenizer.encode("ab" * 400_000, add_special=False)
    duration = time.perf_counter() - start
    is_done = True
    watcher.join()
    assert longest < duration / 2


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20))
def test_decode_is_what_the_detokenizer_streams(tokenizer: Tokenizer, ids: list[int]) -> None:
    vocabulary: Vocabulary = tokenizer
    detokenizer = Detokenizer(vocabulary)
    streamed = "".join([*(detokenizer.feed(i) for i in ids), detokenizer.flush()])
    assert streamed == tokenizer.decode(ids)


def test_ids_beyond_the_vocabulary_add_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([9690, 60_000]) == tokenizer.decode([9690])


def test_a_folder_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    fast = saved(tmp_path)
    tokenizer = Tokenizer.from_files(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special=True).tolist() == fast.encode(text)
        ids = fast.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special=False).tolist() == ids
        assert tokenizer.decode(ids) == fast.decode(ids, skip_special_tokens=True)
        assert tokenizer.min_tokens(text) <= len(ids)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|eos|>")
    assert tokenizer.adds_bos
    assert tokenizer.vocab_size == len(fast)


def test_a_folder_with_sentencepiece_gives_the_text_of_transformers(tmp_path: Path) -> None:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {"\u2581": 257, "t": 258, "h": 259, "e": 260, "he": 261, "the": 262, "\u2581the": 263}
    merges = [("h", "e"), ("t", "he"), ("\u2581", "the")]
    made = tokenizers.Tokenizer(BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast_tokenizer(made, tmp_path)
    tokenizer = Tokenizer.from_files(tmp_path)
    for text in ("the the", "\u4f60 \U0001f680", " the"):
        ids = tokenizer.encode(text, add_special=False)
        assert ids.tolist() == made.encode(text).ids
        assert tokenizer.decode(ids) == made.decode(ids.tolist()) == text
        assert tokenizer.min_tokens(text) <= len(ids)
    assert tokenizer.strips_leading_space


def test_end_tokens_come_from_all_files_and_the_template(tmp_path: Path) -> None:
    saved(tmp_path)
    assert Tokenizer.from_files(tmp_path).eos_token_ids == {1}
    change_json(tmp_path / "generation_config.json", eos_token_id=[1, 7])
    assert Tokenizer.from_files(tmp_path).eos_token_ids == {1, 7}
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|eot_id|>")
    assert Tokenizer.from_files(tmp_path).eos_token_ids == {1, 2, 7}


def test_the_chat_template_is_found_where_it_may_be(tmp_path: Path) -> None:
    saved(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    assert Tokenizer.from_files(tmp_path).chat_template is None
    change_json(config, chat_template="one")
    assert Tokenizer.from_files(tmp_path).chat_template == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    change_json(config, chat_template=named)
    assert Tokenizer.from_files(tmp_path).chat_template == "two"
    change_json(config, chat_template=named[:1])
    with pytest.raises(ModelError, match="default"):
        Tokenizer.from_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("three")
    assert Tokenizer.from_files(tmp_path).chat_template == "three"


def test_add_bos_token_in_the_configuration_wins(tmp_path: Path) -> None:
    saved(tmp_path)
    change_json(tmp_path / "tokenizer_config.json", add_bos_token=False)
    assert not Tokenizer.from_files(tmp_path).adds_bos


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    saved(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.enable_truncation(2)
    made.enable_padding(length=4)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_files(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the quick dog", add_special=True)) == "the quick dog"


def test_where_a_step_drops_text_nothing_is_promised(tmp_path: Path) -> None:
    saved(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_files(tmp_path).min_tokens(" " * 1000 + "a" * 1000) == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is no tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("tokenizer_config.json", '{"bos_token": "<none>"}', "'<none>'"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("generation_config.json", '{"eos_token_id": 1000000}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_file(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    saved(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_files(tmp_path)


def test_a_folder_without_a_tokenizer_and_an_unknown_decoder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_files(tmp_path)
    made = tokenizers.Tokenizer(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer.from_files(tmp_path)
