"""The `vembed` command line. Each command imports its dependencies only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vembed.cli import export as export_commands
from vembed.cli import search as search_commands
from vembed.cli import start as start_commands
from vembed.cli import weights as weight_commands
from vembed.cli.support import (
    USAGE_ERROR,
    AnyModel,
    BatchTokens,
    ColumnMapping,
    ImageRoot,
    JsonCommand,
    JsonOutput,
    Kind,
    Nproc,
    Shards,
    TrustRemoteCode,
    WeightsDtype,
    column_mapping_of,
    guarded,
    json_result,
    model_options,
    only_checked,
    open_closed_streams,
    taken_flags,
    with_json_target,
)
from vembed.cli.support import end as _end
from vembed.cli.support import numbers as _numbers
from vembed.cli.support import option as _option
from vembed.cli.support import share as _share
from vembed.cli.support import word as _word
from vembed.errors import UserError
from vembed.models.poolings.table import POOLINGS

if TYPE_CHECKING:
    from vembed.config.arguments import TrainArguments

app = typer.Typer(
    name="vembed",
    help="Fine-tune text, image and multimodal embedding models from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
TRAIN = "Train"
DATA = "Make and check training data"
RUNS = "Look at finished runs"
USE = "Use a model"
CHANGE = "Change a model and hand it on"
SETUP = "Machine and options"
"""Headings of the commands in `vembed --help`."""
PARSES_ITS_ARGUMENTS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}
"""Settings of commands that parse their arguments themselves, because every option of the config is a flag."""

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="CFG [KEY=VALUE | --OPTION VALUE] ...")
]


def main() -> None:
    """Run the command."""
    open_closed_streams()
    sys.exit(guarded(app))  # Ctrl-C may come before a command has begun


def run_process(command_name: str, args: Sequence[str]) -> int:
    """Run a command as one process; the launcher has started the others."""
    open_closed_streams()
    if command_name == "train":
        return guarded(lambda: _train(args, starts_processes=False))
    # --nproc starts processes with the same arguments
    outer = sys.argv
    sys.argv = ["vembed", command_name, *args]
    try:
        app([command_name, *args])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    finally:
        sys.argv = outer
    return 0


def check_arguments(command_name: str, args: Sequence[str]) -> str | None:
    """Return what is wrong with the arguments of a command, as far as that is known before it begins; None if nothing is."""
    if command_name == "mine":
        from vembed.cli.commands.mine import check_mine

        try:
            check_mine(args)
        except UserError as error:
            return str(error)
        return None
    with only_checked() as said:
        try:
            code = app([command_name, *args], standalone_mode=False)
        except USAGE_ERROR as error:
            return str(error.format_message())
    return said.getvalue().removeprefix("error: ").rstrip() if code else None


@app.command(context_settings=PARSES_ITS_ARGUMENTS, rich_help_panel=TRAIN)
def train(args: Arguments = None) -> None:
    """Train a model as a config file says, on all local devices."""
    _end(lambda: _train(args or []))


@app.command(cls=JsonCommand, rich_help_panel=USE)
def eval(
    ctx: typer.Context,
    model: AnyModel,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A BEIR-style folder, or a file of pairs or scored pairs.",
        ),
    ],
    dims: Annotated[
        str,
        typer.Option(
            help="Also score at these sizes, as 256,128. Default: the model's own."
        ),
    ] = "",
    ks: Annotated[str, typer.Option(help="Cut-offs of the metrics.")] = "1,5,10,100",
    task: Annotated[str, typer.Option(help="auto, retrieval or similarity.")] = "auto",
    split: Annotated[
        str | None,
        typer.Option(help="Split of the qrels of a BEIR-style folder. Default: test."),
    ] = None,
    json_file: JsonOutput = None,
    compressed: Annotated[
        str | None,
        typer.Option(
            help="Also score int8 and binary documents, and draw quality against bytes (.png, .svg)."
        ),
    ] = None,
    column_mapping: ColumnMapping = "",
    on_bad_record: Annotated[str, typer.Option(help="stop or skip.")] = "stop",
    batch_tokens: BatchTokens = None,
    torch_dtype: WeightsDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    strategy: Shards = "ddp",
    nproc: Nproc = 1,
) -> None:
    """Score a model: nDCG, MRR, Recall and MAP over the whole corpus, or correlations for scored pairs."""

    def call() -> int | None:
        options: dict[str, Any] = {
            "dims": _numbers("--dims", dims) or None,
            "ks": _numbers("--ks", ks),
            "task": _word("--task", task, ("auto", "retrieval", "similarity")),
            "column_mapping": column_mapping_of(column_mapping),
            "on_bad_record": _word("--on-bad-record", on_bad_record, ("stop", "skip")),
            **model_options(torch_dtype, strategy),
        }
        if (code := _share(ctx, nproc)) is not None:
            return code
        from vembed.cli.commands.evaluate import run_evaluate
        from vembed.cli.commands.model_argument import usable_model

        with json_result(json_file) as on_result, usable_model(model) as model_path:
            on_result(
                run_evaluate(
                    model_path,
                    data,
                    split=split,
                    compressed=compressed,
                    batch_tokens=batch_tokens,
                    trust_remote_code=trust_remote_code,
                    **options,
                )
            )
        return 0

    _end(call)


@app.command(cls=JsonCommand, rich_help_panel=USE)
def encode(
    ctx: typer.Context,
    model: AnyModel,
    input_file: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="Texts (one per line), JSONL, a table or a folder of images. - is standard input.",
        ),
    ],
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT", help="Where to write: NAME.npy or NAME.parquet."
        ),
    ],
    kind: Kind = "document",
    column: Annotated[
        str | None, typer.Option(help="The field or column that holds the text.")
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            help="Columns to write beside the vectors, as id,title. For .npy to NAME.kept.jsonl."
        ),
    ] = "",
    input_format: Annotated[str, typer.Option(help="auto, jsonl or text.")] = "auto",
    truncate_dim: Annotated[
        int | None, typer.Option(min=1, help="Keep only the first so many numbers.")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(help="Vectors of length 1. Default: as the model says."),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            help="Hidden states instead of embeddings: all, or layers as 0,6,12 (0: the embeddings)."
        ),
    ] = "",
    pooling: Annotated[
        str,
        typer.Option(help="--layers: cls, mean, last, ... Default: the model's own."),
    ] = "",
    precision: Annotated[
        str,
        typer.Option(
            help="Of the vectors: float32, int8, uint8, binary or ubinary (one bit per coordinate)."
        ),
    ] = "float32",
    ranges: Annotated[
        str | None,
        typer.Option(
            help="int8, uint8: NAME.ranges.npy of an earlier file, so that levels mean the same in both."
        ),
    ] = None,
    image_root: ImageRoot = None,
    on_bad_record: Annotated[
        str,
        typer.Option(
            help="stop, or skip: leave out what cannot be encoded, named in NAME.skipped.jsonl."
        ),
    ] = "stop",
    batch_tokens: BatchTokens = None,
    torch_dtype: WeightsDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    strategy: Shards = "ddp",
    nproc: Nproc = 1,
    json_file: JsonOutput = None,
) -> None:
    """Turn a file of texts or records, or a folder of images, into embeddings, in the order of the input."""

    def call() -> int | None:
        options: dict[str, Any] = {
            "kind": _word("--kind", kind, ("query", "document")),
            "input_format": _word(
                "--input-format", input_format, ("auto", "jsonl", "text")
            ),
            "on_bad_record": _word("--on-bad-record", on_bad_record, ("stop", "skip")),
            "precision": _word(
                "--precision",
                precision,
                ("float32", "int8", "uint8", "binary", "ubinary"),
            ),
            "layers": "all"
            if layers == "all"
            else _numbers("--layers", layers.strip("[]")) or None,
            "pooling": _word("--pooling", pooling, tuple(POOLINGS))
            if pooling
            else None,
            **model_options(torch_dtype, strategy),
        }
        if (code := _share(ctx, nproc)) is not None:
            return code
        from vembed.cli.commands.encode import run_encode
        from vembed.cli.commands.model_argument import usable_model

        with json_result(json_file) as on_result, usable_model(model) as model_path:
            encoded = run_encode(
                model_path,
                input_file,
                output,
                truncate_dim=truncate_dim,
                normalize=normalize,
                column=column,
                ranges=ranges,
                keep=[word.strip() for word in keep.split(",") if word.strip()],
                batch_tokens=batch_tokens,
                image_root=image_root,
                trust_remote_code=trust_remote_code,
                **options,
            )
            on_result(encoded)
        return 0

    _end(call)


app.command(cls=JsonCommand, rich_help_panel=TRAIN)(search_commands.tune)
app.command(rich_help_panel=USE)(weight_commands.score)
app.command(cls=JsonCommand, rich_help_panel=CHANGE)(weight_commands.merge)
app.command(cls=JsonCommand, rich_help_panel=CHANGE)(weight_commands.edit)


@app.command(context_settings=PARSES_ITS_ARGUMENTS, rich_help_panel=DATA)
def mine(args: Arguments = None) -> None:
    """Find hard negatives for training data in a corpus."""
    _end(lambda: _make_data("mine", mine.__doc__, args or []))


@app.command(context_settings=PARSES_ITS_ARGUMENTS, rich_help_panel=DATA)
def judge(args: Arguments = None) -> None:
    """Judge the negatives of training data by rerankers or endpoints."""
    _end(lambda: _make_data("judge", judge.__doc__, args or []))


@app.command(context_settings=PARSES_ITS_ARGUMENTS, rich_help_panel=DATA)
def audit(args: Arguments = None) -> None:
    """Look at training data: duplicates, leakage, false negatives, weak positives."""
    _end(lambda: _make_data("audit", audit.__doc__, args or []))


@app.command(context_settings=PARSES_ITS_ARGUMENTS, rich_help_panel=DATA)
def generate(args: Arguments = None) -> None:
    """Make training pairs from documents, with or without a language model."""
    _end(lambda: _make_data("generate", generate.__doc__, args or []))


@app.command(rich_help_panel=TRAIN)
def demo(
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options as of train."),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", help="Folder for data, config and run.")
    ] = "demo",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="30 seconds: everything happens, little is learned."
        ),
    ] = False,
) -> None:
    """Train a small model on the functions of Python's standard library, without network access."""

    def call() -> None:
        from vembed.cli.commands.demo import run_demo

        run_demo(output, quick, options or [])

    _end(call)


@app.command(cls=JsonCommand, rich_help_panel=SETUP)
def doctor(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CFG", help="Check the machine for this config too."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Default: one per GPU, or 2 on the CPU."),
    ] = None,
    model_class: Annotated[
        str | None,
        typer.Option(
            help="Check a class of your own instead: FILE.py:Class or package.module:Class."
        ),
    ] = None,
    model_config: Annotated[
        str, typer.Option(help="Its keyword arguments, as {size: 64}.")
    ] = "{}",
    json_file: JsonOutput = None,
) -> None:
    """Check this machine: versions, devices, and a sharded self-test on several processes.

    Exit code 1 if a check fails.
    """

    def call() -> int:
        if model_class is not None:
            from vembed.cli.commands.check_class import run_model_check

            return run_model_check(
                model_class, _option("model_arguments", model_config) or {}
            )
        from vembed.cli.commands.doctor import run_doctor

        with json_result(json_file) as on_result:
            return run_doctor(config, nproc, on_result=on_result)

    _end(call)


@app.command(context_settings=PARSES_ITS_ARGUMENTS, rich_help_panel=TRAIN)
def plan(args: Arguments = None) -> None:
    """Predict the memory of each process for a config, and the settings that fit, without loading the model."""

    def call() -> int:
        from functools import partial

        rest, (gpu, memory, json_file) = taken_flags(
            with_json_target(args or []), ("--gpu", "--memory", "--json")
        )
        # A dry run needs no machine rank, and may describe GPUs of other machines.
        arguments = _arguments("plan", plan.__doc__, [*rest, "--dry-run"])
        from vembed.cli.commands.plan import predict, run_plan, show
        from vembed.parallel.hardware import read_hardware
        from vembed.pipelines.stages.estimates import plan_stages
        from vembed.pipelines.stages.sequence import pipeline_of_arguments

        with json_result(json_file) as on_result:
            results: list[Any] = []
            hardware = read_hardware(gpu, memory)
            pipeline = pipeline_of_arguments(arguments)
            if pipeline is None:
                return run_plan(arguments, hardware=hardware, on_result=on_result)
            code = plan_stages(
                pipeline,
                arguments,
                partial(predict, hardware=hardware),
                partial(show, on_result=results.append),
            )
            on_result(results)
            return code

    _end(call)


app.command(cls=JsonCommand, rich_help_panel=CHANGE)(export_commands.export)
app.command(rich_help_panel=USE)(export_commands.serve)
app.command("check-server", cls=JsonCommand, rich_help_panel=USE)(
    export_commands.check_server
)
app.command(cls=JsonCommand, rich_help_panel=CHANGE)(export_commands.push)
app.command(rich_help_panel=TRAIN)(start_commands.init)
app.command(context_settings=PARSES_ITS_ARGUMENTS, rich_help_panel=TRAIN)(
    start_commands.data
)
app.command(cls=JsonCommand, rich_help_panel=RUNS)(start_commands.report)
app.command(cls=JsonCommand, rich_help_panel=RUNS)(start_commands.compare)
app.command(cls=JsonCommand, rich_help_panel=RUNS)(start_commands.card)


@app.command(context_settings=PARSES_ITS_ARGUMENTS, rich_help_panel=SETUP)
def config(args: Arguments = None) -> None:
    """Print the resolved config, with where each value comes from. Fails if a file is missing."""

    def call() -> int:
        from vembed.cli.commands.show_config import show_config

        rest, (json_file,) = taken_flags(with_json_target(args or []), ("--json",))
        arguments = _arguments("config", config.__doc__, rest)
        with json_result(json_file) as on_result:
            return show_config(arguments, on_result=on_result)

    _end(call)


@app.command(rich_help_panel=SETUP)
def schema(
    form: Annotated[
        str,
        typer.Option(
            "--format", help="json, for editors, or markdown, the page of options."
        ),
    ] = "json",
) -> None:
    """Print the JSON schema of a config, with which editors complete and check it."""

    def call() -> None:
        from vembed.cli.commands.show_config import schema_text

        sys.stdout.write(schema_text(_word("--format", form, ("json", "markdown"))))

    _end(call)


@app.command(cls=JsonCommand, rich_help_panel=SETUP)
def version(json_file: JsonOutput = None) -> None:
    """Print the versions of vembed, Python and its main dependencies."""

    def call() -> None:
        with json_result(json_file) as on_result:
            on_result(_versions())
            _print_versions()

    _end(call)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        _end(_print_versions)


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_version,
            help="Print the versions, as `vembed version` does.",
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


def _print_versions() -> None:
    for name, number in _versions().items():
        sys.stdout.write(f"{name} {number}\n")


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import version as version_of

    import vembed

    packages = {
        name: version_of(name)
        for name in ("torch", "transformers", "accelerate", "peft")
    }
    return {
        "vembed": vembed.__version__,
        "python": platform.python_version(),
        **packages,
    }


def _train(args: Sequence[str], *, starts_processes: bool = True) -> int:
    from vembed.config.arguments import parse_train_arguments, train_help

    if {"-h", "--help"} & set(args):
        sys.stdout.write(train_help())
        return 0
    rest, (json_file,) = taken_flags(with_json_target(args), ("--json",))
    arguments = parse_train_arguments(rest)
    from vembed.cli.commands.train import run_train
    from vembed.pipelines.stages.sequence import (
        pipeline_of_arguments,
        results_of,
        run_stages,
    )

    pipeline = pipeline_of_arguments(arguments)
    with json_result(json_file) as on_result:
        if pipeline is None:
            return run_train(
                arguments,
                starts_processes=starts_processes,
                on_result=on_result if json_file else None,
            )
        code = run_stages(
            pipeline,
            arguments,
            run_process,
            check_arguments,
            starts_processes=starts_processes,
        )
        if code == 0 and json_file and not arguments.is_dry_run:
            on_result(results_of(pipeline))
        return code


def _make_data(
    command_name: Literal["mine", "judge", "audit", "generate"],
    about: str | None,
    args: Sequence[str],
) -> int:
    from vembed.cli.commands.mine import ignore, make_data

    rest, (json_file,) = taken_flags(with_json_target(args), ("--json",))
    with json_result(json_file) as on_result:
        return make_data(
            command_name,
            " ".join(str(about).split()),
            rest,
            on_result if json_file else ignore,
        )


def _arguments(
    command_name: str, about: str | None, args: Sequence[str]
) -> TrainArguments:
    """Parse the arguments of a command that takes those of train."""
    from vembed.config.arguments import command_help, parse_train_arguments

    if {"-h", "--help"} & set(args):
        sys.stdout.write(command_help(command_name, str(about)))
        raise typer.Exit(0)
    return parse_train_arguments(args)
