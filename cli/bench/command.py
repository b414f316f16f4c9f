"""`llmrt bench`: its flags."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llmrt.cli.bench.plan import CONCURRENCY, INPUT_LENGTHS, BenchSettings
from llmrt.cli.bench.quality.command import quality
from llmrt.cli.bench.subject import COLOCATED, LAYOUTS
from llmrt.cli.options import WORKER_HELP, ConfigOption, JsonOption, with_settings
from llmrt.wire.errors import ConfigError
from llmrt.workers.settings import WorkerSettings

_DECIDED_HERE = ("role", "broker", "worker_id", "link", "runtime_dir")


class _Group(TyperGroup):
    """Takes `--goodput ttft:500 tpot:50` as other benchmarks do, beside one flag per limit."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flag(args, "--goodput", r"\w+:[\d.]+"))


app = typer.Typer(
    cls=_Group,
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
@with_settings(WorkerSettings, WORKER_HELP, without=_DECIDED_HERE)
def bench(
    ctx: typer.Context,
    metric: Annotated[
        str, typer.Option(help="ttft (by input length), decode (one stream), throughput or all")
    ] = "all",
    layout: Annotated[
        str | None, typer.Option(help="colocated or split [colocated]", show_default=False)
    ] = None,
    broker: Annotated[
        str | None,
        typer.Option(help="measure the cluster of this broker, not one started for it"),
    ] = None,
    input_lengths: Annotated[str, typer.Option(help="prompt lengths of ttft")] = ",".join(
        map(str, INPUT_LENGTHS)
    ),
    prompt_tokens: Annotated[int, typer.Option(help="of decode and throughput")] = 128,
    output_tokens: Annotated[int, typer.Option(help="of decode and throughput")] = 128,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help=f"streams at a time, of throughput [{','.join(map(str, CONCURRENCY))}]",
            show_default=False,
        ),
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="requests per second instead: an open loop, of throughput")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="of the arrivals: 1 is Poisson, less comes in bursts")
    ] = 1.0,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="requests per point and repeat [ttft 4, decode 1, throughput 2 per stream or 32]",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="times that every point is measured")] = 3,
    seed: Annotated[int, typer.Option(help="of prompts and arrivals")] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="limits in ms that a good request keeps: ttft:500 itl:50 tpot:50 e2el:9000"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="write the report, as JSON")] = None,
    png: Annotated[Path | None, typer.Option(help="write a picture of it")] = None,
    config: ConfigOption = None,
    json_output: JsonOption = False,
    **flags: object,
) -> None:
    """Measure time to first token, decode rate and throughput: three figures, each by itself.

    Example: llmrt bench --model model.gguf --metric decode

    Example: llmrt bench --broker tcp://127.0.0.1:7700 --request-rate 2 --goodput ttft:500 itl:80
    """
    if ctx.invoked_subcommand is not None:
        return
    settings = BenchSettings(
        metric=metric,
        input_lengths=_ints(input_lengths, "--input-lengths"),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        concurrency=None if concurrency is None else _ints(concurrency, "--concurrency"),
        request_rates=() if request_rate is None else _floats(request_rate, "--request-rate"),
        burstiness=burstiness,
        num_prompts=num_prompts,
        repeats=repeats,
        seed=seed,
        goodput=dict(_limit(word) for text in goodput or () for word in re.split(r"[\s,]+", text)),
    )
    if layout not in (None, *LAYOUTS):
        raise ConfigError(f"--layout is {layout!r}: one of {', '.join(LAYOUTS)} is needed")
    from llmrt.cli.bench.delivery import Delivery
    from llmrt.cli.bench.start import measure_own, measure_running

    deliver = Delivery(output, png, json_output)
    deliver.check()
    if broker is not None:
        raise typer.Exit(measure_running(broker, settings, layout, flags, deliver))
    raise typer.Exit(measure_own(settings, layout or COLOCATED, flags, config, deliver))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="report written by --output")],
    b: Annotated[Path, typer.Argument(help="another one")],
    across: Annotated[
        str, typer.Option(help="conditions that may differ, as in layout,threads")
    ] = "",
    json_output: JsonOption = False,
) -> None:
    """Compare two reports; refuse if they were not measured under equal conditions.

    Example: llmrt bench compare colocated.json split.json --across layout,workers,transfer,threads
    """
    from llmrt.cli.bench.compare import compare as compare_results
    from llmrt.cli.bench.compare import table
    from llmrt.cli.bench.result import read_results

    allowed = [name for name in across.split(",") if name]
    rows = compare_results(read_results(a), read_results(b), allowed)
    print(json.dumps([dataclasses.asdict(row) for row in rows]) if json_output else table(rows))


app.command()(quality)


def repeat_flag(args: Sequence[str], flag: str, value: str) -> list[str]:
    """`--flag a b` as `--flag a --flag b`, for values that match a pattern."""
    repeated: list[str] = []
    is_value = False
    for arg in args:
        if is_value and re.fullmatch(value, arg):
            if repeated[-1] != flag:
                repeated.append(flag)
        else:
            is_value = arg == flag
        repeated.append(arg)
    return repeated


def _ints(text: str, flag: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(number) for number in _numbers(text, flag, int)))


def _floats(text: str, flag: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(_numbers(text, flag, float)))


def _numbers(text: str, flag: str, kind: type[int] | type[float]) -> list[float]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no list of numbers, as in 1,4,16", param_hint=flag
        ) from None


def _limit(word: str) -> tuple[str, float]:
    name, _, limit = word.partition(":")
    try:
        return name, float(limit)
    except ValueError:
        raise typer.BadParameter(
            f"{word!r} is not NAME:MS, as in ttft:500", param_hint="--goodput"
        ) from None
