"""Options that commands share, and those that are made from the fields of a settings class."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.config import Section, env_name, flag_name, load, section_of

C = TypeVar("C", bound=Callable[..., None])


class TokenBias(NamedTuple):
    """One entry of `logit_bias`."""

    token_id: int
    bias: float


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with settings (default ./llmrt.toml if it exists)"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="write JSON to stdout")]
BrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        help=f"endpoint of the broker [{BrokerSettings().bind}, LLMRT_BROKER_BIND]",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="name of the model, as in llmrt ps; needed if several are served"),
]
SAMPLING: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "most tokens to generate (default: to the end of the context)"),
    "temperature": (float, "0 takes the likeliest token [0]"),
    "top_k": (int, "draw from the k likeliest tokens"),
    "top_p": (float, "draw from the likeliest tokens of this joint probability"),
    "min_p": (float, "draw from tokens at least this likely, relative to the likeliest"),
    "repetition_penalty": (float, "above 1: tokens that occurred are less likely"),
    "presence_penalty": (float, "subtracted from tokens that were generated"),
    "frequency_penalty": (float, "subtracted once per time that a token was generated"),
    "logit_bias": (
        list[TokenBias],
        "add BIAS (-100 to 100) to the logit of token ID; may be repeated",
    ),
    "min_tokens": (int, "do not end before so many tokens"),
    "ignore_eos": (bool, "go on behind the end token"),
    "stop_token_ids": (list[int], "end before this token id; may be repeated"),
    "logprobs": (int, "report so many alternatives per token (with --json)"),
    "priority": (int, "higher runs first [0]"),
    "seed": (int, "the same seed draws the same tokens"),
    "stop": (list[str], "end before this text; may be repeated"),
    "deadline_s": (float, "give up after so many seconds"),
}

BROKER_HELP = {
    "bind": "endpoint for clients",
    "worker_bind": "endpoint for workers",
    "prefill_policy": "who prefills: prefix-aware, least-loaded or round-robin",
    "decode_policy": "who decodes: prefix-aware, least-loaded or round-robin",
    "max_live": "most requests admitted at a time",
    "default_deadline_s": "deadline of a request without one",
    "max_deadline_s": "longest deadline that is granted",
    "beat_s": "seconds between two beats",
    "dead_after_beats": "beats of silence after which a worker is lost",
    "resume_window_s": "how long a lost client may come back",
    "startup_window_s": "how long after the start requests wait for a first worker",
    "max_attempts": "workers that a request may lose",
    "validate": "assert all invariants after every event",
    "log_level": "debug, info, warning or error",
}
WORKER_HELP = {
    "model": "GGUF file, or folder with config.json and safetensors",
    "role": "both (or colocated), prefill or decode",
    "broker": "endpoint of the broker for workers",
    "worker_id": "name, stable over restarts (default: role, host and pid)",
    "link": "endpoint for other workers (default: a socket in the runtime folder)",
    "runtime_dir": "folder for the sockets of workers on one host",
    "device": "what runs the model: auto, cpu (the compiled step) or torch",
    "dtype": "numbers of the weights: auto (as stored), bf16, f32 or int8",
    "kv_cache_dtype": "numbers of the KV cache: bf16, f32, int8 or fp8",
    "cpu_family": "instructions of the compiled step (default: the best of llmrt doctor)",
    "kv_tokens": "tokens that the KV cache holds (default: 4 contexts, or a quarter of memory)",
    "max_context": "longest context in tokens (default: the model's)",
    "max_running": "most requests in one step",
    "max_waiting": "most requests in the queue",
    "step_tokens": "most tokens in one step",
    "threads": "threads of a step (default: all cores, which workers of the compiled step with one "
    "runtime_dir divide at that time; with torch all of them, unless local_workers says else)",
    "local_workers": "workers on this host, among which torch divides the cores (llmrt up sets it)",
    "transfer": "how KV blocks pass between workers: auto, shm or tcp",
    "kv_host": "address at which workers of other hosts read KV blocks (default: that of link)",
    "kv_port": "port for that, 0 for a free one",
    "kv_connections": "most connections that a read of a peer's KV blocks is divided over",
    "kv_retries": "how often a read is tried again when its connection breaks",
    "kv_max_readers": "most connections of all peers that read KV blocks here",
    "kv_connect_timeout_s": "seconds for a connection to a peer",
    "kv_stall_timeout_s": "seconds until a peer that takes no bytes is hung up on",
    "kv_map_timeout_s": "seconds to map the KV cache of a peer on this host",
    "kv_read_timeout_s": "seconds for one read of a peer's KV blocks",
    "kv_probe_timeout_s": "seconds for the probe of a link",
    "placement": "where prompts are computed: auto, local or remote",
    "checksums": "compare KV blocks that are handed over: auto, off, sampled or full",
    "stream_interval_ms": "send tokens that come within so many milliseconds together",
    "speculative": "guess tokens of texts that repeat themselves, in the worker's own KV cache: "
    "off or ngram; a prefill worker never does",
    "speculative_tokens": "most guesses in a step, 1 to 16",
    "has_fencing": "kill a prefill worker of this host that is silent and may still write here",
    "has_prefix_cache": "keep the KV cache of prompts for later ones",
    "trust_remote_code": "accepted for compatibility: code from a model folder is never run",
    "validate": "assert all invariants after every event",
    "log_level": "debug, info, warning or error",
}


def with_settings(
    kind: Section,
    texts: Mapping[str, str],
    without: tuple[str, ...] = (),
) -> Callable[[C], C]:
    """Give a command that takes `**flags` one option per field; one not given is None."""

    def decorate(command: C) -> C:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {p.name for p in own} | set(without)
        types = get_type_hints(kind)
        options = [
            _option(section_of(kind), field, types[field.name], texts[field.name])
            for field in fields(kind)
            if field.name not in taken
        ]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return command

    return decorate


def with_sampling(command: C) -> C:
    """Give a command that takes `**options` the options of one generation; not given is None."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None,
                typer.Option(help=text, show_default=False, **_PARSED.get(name, {})),
            ],
        )
        for name, (kind, text) in SAMPLING.items()
    ]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


def parse_bias(text: str) -> TokenBias:
    """`ID=BIAS`; raises `BadParameter`, which is a usage error. Ranges are checked later."""
    token_id, _, bias = text.partition("=")
    try:
        return TokenBias(int(token_id), float(bias))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not ID=BIAS, as in 13=-100") from None


_PARSED: dict[str, dict[str, Any]] = {"logit_bias": {"parser": parse_bias, "metavar": "ID=BIAS"}}


def endpoint(broker: str | None) -> str:
    """Where clients reach the broker: what was asked for, or what a broker here would bind."""
    return load(BrokerSettings, {"bind": broker}).bind


def _option(section: str, field: "Field[Any]", annotation: Any, text: str) -> inspect.Parameter:
    kind = annotation if isinstance(annotation, type) else get_args(annotation)[0]
    flag = flag_name(field.name)
    declaration = f"{flag}/--no-{flag[2:]}" if field.default is True else flag
    default = "" if field.default in (MISSING, None) else f"{_shown(field.default)}, "
    if field.default is MISSING:
        default = "required, "
    option = typer.Option(
        declaration, help=f"{text} [{default}{env_name(section, field.name)}]", show_default=False
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
