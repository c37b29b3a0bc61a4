"""Commands of the `vembed` command around a run: init, data, report, compare, card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vembed.cli.support import (
    ColumnMapping,
    JsonOutput,
    column_mapping_of,
    end,
    json_result,
    taken_flags,
    with_json_target,
)


def init(
    family: Annotated[
        str, typer.Option(help="Kind of model: text_encoder, text_decoder, clip, ...")
    ] = "text_encoder",
    data: Annotated[
        str, typer.Option(help="Training data. Its first records are read.")
    ] = "train.jsonl",
    val_data: Annotated[str | None, typer.Option(help="Validation data.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub name or folder. demo: that of `vembed demo`. Default: a good one of that kind."
        ),
    ] = None,
    query: Annotated[
        str | None, typer.Option(help="The column of the queries. Default: guessed.")
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(help="The column of what they should find. Default: guessed."),
    ] = None,
    column_mapping: ColumnMapping = "",
    output: Annotated[str, typer.Option(help="The config to write.")] = "vembed.yaml",
    force: Annotated[
        bool, typer.Option("--force", help="Write over an existing file.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Train a tokenizer on the data instead, and write it to this folder."
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=300, help="Its size.")] = 8192,
) -> None:
    """Write a commented starter config for a kind of model and a data file, whose columns are guessed by content."""

    def call() -> None:
        if tokenizer is not None:
            from vembed.cli.commands.train_tokenizer import run_train_tokenizer

            count = run_train_tokenizer(data, tokenizer, vocab_size)
            sys.stdout.write(
                f"wrote {tokenizer}: {count:,d} tokens; use it with tokenizer_name: {tokenizer}\n"
            )
            return
        from vembed.cli.commands.init import run_init
        from vembed.data.formats.copies import is_pattern

        mapping = column_mapping_of(column_mapping) or {}
        mapping |= {
            name: role
            for name, role in ((query, "query"), (positive, "positive"))
            if name is not None
        }
        path = run_init(
            family,
            data,
            output,
            model=model,
            val_data=val_data,
            mapping=mapping,
            force=force,
        )
        if not Path(data).exists() and not is_pattern(data):
            sys.stderr.write(
                f"note: {data} is not here, so columns, lengths and sizes are defaults; check the path\n"
            )
        sys.stdout.write(f"wrote {path}; train with: vembed train {path}\n")

    end(call)


Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="CFG [KEY=VALUE | --OPTION VALUE] ...")
]


def data(args: Arguments = None) -> None:
    """Look at the data of a config: samples as the model reads them, lengths, repetitions, overlap."""

    def call() -> None:
        from vembed.config.arguments import command_help, parse_train_arguments
        from vembed.config.loading import resolve_run

        if {"-h", "--help"} & set(args or []):
            sys.stdout.write(command_help("data", str(data.__doc__)))
            return
        rest, (json_file,) = taken_flags(with_json_target(args or []), ("--json",))
        arguments = parse_train_arguments(rest)
        config = resolve_run(
            arguments.source, arguments.overrides, stage=arguments.stage
        ).config
        from vembed.data_tools.init.data_page import data_facts

        with json_result(json_file) as on_result:
            facts = data_facts(config)
            sys.stdout.write(facts.page)
            on_result(facts.figures)

    end(call)


def report(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The output_dir of a run, finished or not."),
    ],
    json_file: JsonOutput = None,
) -> None:
    """Write report.html and report.md of a run, also of one that was stopped or killed."""

    def call() -> None:
        from vembed.evaluation.report.comparison import run_json
        from vembed.evaluation.report.record import read_run
        from vembed.evaluation.report.report import write_report

        with json_result(json_file) as on_result:
            path = write_report(run)
            sys.stdout.write(f"wrote {path}\n")
            on_result(
                {"report": path, **run_json(Path(run).resolve().name, read_run(run))}
            )

    end(call)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, finished or not. The first is the baseline.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="The page. Default: comparison.html."),
    ] = None,
    json_file: JsonOutput = None,
) -> None:
    """Compare several runs on one page: curves, scores with intervals, settings that differ, queries won and lost."""

    def call() -> None:
        from vembed.evaluation.report.comparison import (
            as_json,
            read_several,
            score_lines,
            write_comparison,
        )

        compared_runs = read_several(runs)
        with json_result(json_file) as on_result:
            on_result(as_json(compared_runs))
            sys.stdout.write(score_lines(compared_runs))
            if output is not None or json_file is None:
                page = write_comparison(compared_runs, output or "comparison.html")
                sys.stdout.write(f"wrote {page}\n")

    end(call)


def card(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="The output_dir of a finished run, or its final/."
        ),
    ],
    json_file: JsonOutput = None,
) -> None:
    """Write the model card (README.md) of a trained model again, from the run's scores, data and settings."""

    def call() -> None:
        from vembed.cli.commands.card import run_card

        with json_result(json_file) as on_result:
            path = run_card(model)
            sys.stdout.write(f"wrote {path}\n")
            on_result({"card": path})

    end(call)
