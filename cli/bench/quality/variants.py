"""One model on the CPU in several formats: packed once per format of weights, in memory."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmrt.cli.bench.quality.divergence import Logits
from llmrt.engine.batch import LOCAL_ARENA, Batch, Row, SampleSpec, SequenceId
from llmrt.engine.cpu_device import CpuDevice
from llmrt.engine.cpu_program import CpuProgram, check_kv_dtype
from llmrt.engine.cpu_weights import check_model, weight_requests
from llmrt.kernels.cpu.library import LibraryMissing, best_family
from llmrt.kvtransfer.host_memory import available_bytes
from llmrt.kvtransfer.layout import blocks_for
from llmrt.models.loading import OpenedModel
from llmrt.models.packing import PackRequest, make_plan, pack_weights
from llmrt.wire.errors import ConfigError
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.wire.sampling import SamplingParams

REFERENCE = "f32"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Most tokens of a window, of which there is one at a time, and of each of `num_prompts`
    prompts with what is generated behind it."""

    window: int
    prompt: int
    num_prompts: int

    @property
    def max_context(self) -> int:
        return max(self.window, self.prompt)

    @property
    def num_blocks(self) -> int:
        return max(blocks_for(self.window), blocks_for(self.prompt) * self.num_prompts)


class Variant:
    """A model in one format of weights and one of the KV cache, with blocks of its own.

    `weight_bytes` are those of its packed weights, `kv_token_bytes` those of one position.
    """

    def __init__(
        self, dtype: str, weight_bytes: int, program: CpuProgram, sizes: Sizes, threads: int | None
    ) -> None:
        self.dtype, self.kv_dtype = dtype, program.kv_dtype
        self.label = f"{dtype} weights, {program.kv_dtype} KV"
        self.weight_bytes = weight_bytes
        self._sizes = sizes
        self._device = CpuDevice(program, threads=threads)
        self.numerics_id = self._device.numerics_id
        self.kv_token_bytes = self._device.kv_block_bytes // BLOCK_TOKENS
        arena = memoryview(bytearray(sizes.num_blocks * self._device.kv_block_bytes))
        self._device.add_arena(LOCAL_ARENA, arena)

    def logits(self, token_ids: "array[int]", start: int) -> Logits:
        """Of all tokens at positions `start` on, [tokens, vocab]; those before were computed."""
        blocks = array("I", range(blocks_for(self._sizes.window)))
        row = Row(SequenceId(0), LOCAL_ARENA, token_ids, start, blocks)
        return self._device.all_logits(Batch(0, (row,)))

    def generate(
        self,
        prompts: "Sequence[array[int]]",
        num_tokens: int,
        on_token: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """The likeliest tokens behind each prompt, end tokens like any other.

        `on_token` is called whenever all of them have one more.

        Raises `InternalError` if a logit is not finite.
        """
        sequences = [array("I", prompt) for prompt in prompts]
        starts = [0] * len(prompts)
        for _ in range(num_tokens):
            rows = [
                self._row(idx, ids, start)
                for idx, (ids, start) in enumerate(zip(sequences, starts, strict=True))
            ]
            drawn = self._device.run(Batch(0, tuple(rows))).drawn
            for idx, draw in enumerate(drawn):
                if draw.error is not None:
                    raise draw.error
                starts[idx] = len(sequences[idx])
                sequences[idx].append(draw.token_ids[0])
            on_token()
        return [ids[-num_tokens:].tolist() for ids in sequences]

    def _row(self, idx: int, token_ids: "array[int]", start: int) -> Row:
        """The rest of a prompt, and the likeliest token behind it."""
        size = blocks_for(self._sizes.prompt)
        blocks = array("I", range(idx * size, (idx + 1) * size))
        end = len(token_ids)
        sample = SampleSpec(SamplingParams(), 0, end, token_ids, end)
        return Row(SequenceId(idx), LOCAL_ARENA, token_ids[start:], start, blocks, sample)


@dataclass(frozen=True, slots=True)
class Formats:
    """What to pack for each format of weights that is asked for, and the formats of the KV cache.

    `notes` say which were left out.
    """

    requests: Mapping[str, list[PackRequest]]
    kv_dtypes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(weights, KV cache) of all that is compared, the reference left out."""
        pairs = [(dtype, kv_dtype) for dtype in self.requests for kv_dtype in self.kv_dtypes]
        return [pair for pair in pairs if pair != (REFERENCE, REFERENCE)]


def choose_formats(opened: OpenedModel, dtypes: Sequence[str], kv_dtypes: Sequence[str]) -> Formats:
    """What was asked for, but nothing twice.

    Raises `ConfigError` for a format that does not exist, and if the compiled step cannot run
    the model here or has no room for it.
    """
    try:
        best_family()
    except LibraryMissing as error:
        raise ConfigError(str(error)) from None
    check_model(opened.spec)
    for kv_dtype in kv_dtypes:
        check_kv_dtype(kv_dtype)
    found: dict[str, list[PackRequest]] = {}
    notes = []
    for dtype in dict.fromkeys(dtypes):
        requests = weight_requests(opened.spec, opened.tensors, dtype)
        same = [name for name, known in found.items() if known == requests]
        if same:
            notes.append(f"{dtype} weights of this model are those of {same[0]}: measured once")
        else:
            found[dtype] = requests
    _check_memory(opened, found)
    return Formats(found, tuple(dict.fromkeys(kv_dtypes)), tuple(notes))


def load_variants(
    opened: OpenedModel, formats: Formats, sizes: Sizes, threads: int | None
) -> Iterator[Variant]:
    """The reference first, then the others, by format of weights. Raises `ConfigError`."""
    for dtype in dict.fromkeys((REFERENCE, *formats.requests)):
        requests = formats.requests.get(dtype) or _reference_requests(opened)
        packed = pack_weights(opened.tensors, requests)
        weight_bytes = sum(tensor.data.size for tensor in packed.tensors.values())
        kv_dtypes = [kv_dtype for found, kv_dtype in formats.pairs if found == dtype]
        for kv_dtype in ([REFERENCE] if dtype == REFERENCE else []) + kv_dtypes:
            program = CpuProgram(
                opened.spec, packed, kv_dtype=kv_dtype, max_context=sizes.max_context
            )
            yield Variant(dtype, weight_bytes, program, sizes, threads)


def _reference_requests(opened: OpenedModel) -> list[PackRequest]:
    return weight_requests(opened.spec, opened.tensors, REFERENCE)


def _check_memory(opened: OpenedModel, found: Mapping[str, list[PackRequest]]) -> None:
    plans = {REFERENCE: _reference_requests(opened), **found}
    needed = sum(make_plan(opened.tensors, requests).size_bytes for requests in plans.values())
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"weights in {', '.join(plans)} take {needed >> 20} MiB, {available >> 20} MiB are "
            "available: name fewer formats by --dtype, or a smaller model"
        )
