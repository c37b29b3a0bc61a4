"""The `vembed` command line. Only the module of the command that is run is imported."""

import inspect
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from copy import copy
from dataclasses import fields
from importlib import import_module
from types import NoneType
from typing import Annotated, Any, get_type_hints

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from vembed.cli.support import (
    MODE,
    Command,
    guarded,
    open_closed_streams,
    quieten_libraries,
)

COMMANDS = {
    "train": ("train", "Train a model as a config file says."),
    "eval": ("scores", "Score a model: nDCG, MRR, Recall, or correlations."),
    "encode": ("encode", "Turn texts, records or images into embeddings."),
    "tune": ("train", "Search for better values of a few options."),
    "score": ("scores", "Score given pairs, by their similarity or a reranker."),
    "rerank": ("scores", "Sort lists of documents by a reranker."),
    "merge": ("weights", "Merge models of one architecture into one."),
    "edit": ("weights", "Remove what tells two sets of texts apart."),
    "mine": ("make_data", "Find hard negatives in a corpus."),
    "judge": ("make_data", "Judge negatives by rerankers or endpoints."),
    "audit": ("make_data", "Look for duplicates, leakage, false negatives."),
    "generate": ("make_data", "Make training pairs from documents."),
    "demo": ("demo", "Train a small model, without network access."),
    "doctor": ("doctor", "Check this machine, and sharded training on it."),
    "plan": ("train", "Predict the memory and the hours of a config."),
    "export": ("export", "Write a model in the format of another runtime."),
    "serve": ("serve", "Serve embeddings over HTTP."),
    "check-server": ("serve", "Compare a running server with the model."),
    "push": ("export", "Push a model to the Hub."),
    "init": ("init", "Write a starter config for a data file."),
    "data": ("runs", "Look at the data of a config, as the model reads them."),
    "report": ("runs", "Write report.html and report.md of a run."),
    "compare": ("runs", "Compare several runs on one page."),
    "card": ("runs", "Write the model card of a trained model again."),
    "config": ("config", "Print the resolved config."),
    "schema": ("config", "Print the JSON schema of a config."),
    "version": ("config", "Print the versions."),
}
"""Name -> module in `vembed/cli/commands`, and one line for `vembed --help`."""
HEADINGS = {
    "Train": "train tune demo plan init data",
    "Use a model": "eval encode score rerank serve check-server",
    "Change a model and hand it on": "merge edit export push",
    "Make and check training data": "mine judge audit generate",
    "Machine and options": "doctor config schema version",
    "Look at finished runs": "report compare card",
}
"""Headings in `vembed --help`, with their commands."""
DATA_COMMANDS = ("mine", "judge", "audit", "generate")
"""Commands with a config of their own."""


ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""Name and text of a parameter in a docstring."""


def json_option(
    json_file: Annotated[str | None, Option("--json", metavar="[FILE.json]")] = None,
) -> None:
    """Declare the option that all commands with a result have.

    Args:
        json_file: The result as JSON: alone on standard output, or in this file.
    """


def command_of(
    name: str,
    function: Any,
    **settings: Any,
) -> Any:
    """Return a function as a command. Its parameters become arguments, if they have no default, and options; their help
    is what its docstring says of them."""
    about, _, arguments = str(inspect.getdoc(function)).partition("\n\nArgs:\n")
    hints = get_type_hints(function, include_extras=True)
    parameters = dict(inspect.signature(function).parameters)
    run = function
    use = parameters.pop("use", None)
    if use is not None:
        # A dataclass, whose fields are options.
        kind = type(use.default)

        def run(**arguments: Any) -> Any:
            values = {field.name: arguments.pop(field.name) for field in fields(kind)}
            return function(use=kind(**values), **arguments)

        parameters |= inspect.signature(kind).parameters
        hints |= get_type_hints(kind, include_extras=True)
    for parameter, text in ARGUMENT.findall(arguments):
        default = parameters[parameter].default
        if not hasattr(hints[parameter], "__metadata__"):
            declared = Option()
            if default is inspect.Parameter.empty:
                declared = Argument(metavar=parameter.upper())
            elif default is False:  # a flag that can only be set
                declared = Option(f"--{parameter.replace('_', '-')}")
            hints[parameter] = Annotated[hints[parameter], declared]
        (declared,) = hints[parameter].__metadata__
        declared = copy(declared)  # the type may be that of several commands
        declared.help = " ".join(text.split())
        hints[parameter] = Annotated[hints[parameter].__origin__, declared]
    declared_parameters = []
    for parameter, declaration in parameters.items():
        declared_parameters.append(declaration.replace(annotation=hints[parameter]))
    run.__signature__ = inspect.Signature(declared_parameters)
    command_app = typer.Typer(add_completion=False)
    command_app.command(name, cls=Command, help=about, context_settings=settings)(run)
    return typer.main.get_command(command_app)


def load_command(name: str) -> Any:
    """Import a command and return it with its options."""
    module = import_module(f"vembed.cli.commands.{COMMANDS[name][0]}")
    function = getattr(module, name.replace("-", "_"))
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    hints = get_type_hints(function)
    if "args" in hints:
        # The command parses words itself: options of the config are flags too, in kebab or snake case.
        settings["ignore_unknown_options"] = True
        settings["token_normalize_func"] = lambda flag: flag.replace("_", "-")
    if name in DATA_COMMANDS:
        settings["help_option_names"] = []  # theirs lists the options of their config
    command = command_of(name, function, **settings)
    # A command that returns nothing, or an exit code, has no result.
    if hints["return"] not in (int, NoneType):
        command.params += command_of("json", json_option).params
    return command


class LazyCommands(TyperGroup):
    """The commands by name. `vembed --help` shows them from the table, without importing them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for heading, names in HEADINGS.items():
            for name in names.split():
                _, about = COMMANDS[name]
                command = TyperCommand(name, help=about, rich_help_panel=heading)
                self.add_command(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the imported command and its arguments."""
        name, _, arguments = super().resolve_command(ctx, args)
        return name, load_command(str(name)), arguments


app = typer.Typer(
    name="vembed",
    help="Fine-tune text, image and multimodal embedding models from one YAML file.",
    cls=LazyCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_versions(is_asked: bool) -> None:
    if is_asked:
        from vembed.cli.commands.config import version

        version()
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        Option(
            "--version",
            is_eager=True,
            callback=_print_versions,
            help="Print the versions, as `vembed version` does.",
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Run the command."""
    open_closed_streams()
    quieten_libraries()
    sys.exit(guarded(app))  # Ctrl-C may come before a command has begun


def run_process(command_name: str, args: Sequence[str]) -> int:
    """Run a command as one process; the launcher has started the others."""
    open_closed_streams()
    quieten_libraries()
    token = MODE.set("process")
    try:
        app([command_name, *args])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    finally:
        MODE.reset(token)
    return 0


def check_arguments(command_name: str, args: Sequence[str]) -> str | None:
    """Return what is wrong with the arguments of a command, as far as that is known before it begins; None if nothing is."""
    # Unknown flags, missing arguments: of the click that this Typer uses, its own or the installed one.
    usage_error: Any = typer.BadParameter.__base__
    errors = io.StringIO()
    token = MODE.set("check")
    try:
        with redirect_stderr(errors):
            code = app([command_name, *args], standalone_mode=False)
    except usage_error as error:
        return str(error.format_message())
    finally:
        MODE.reset(token)
    return errors.getvalue().removeprefix("error: ").rstrip() if code else None
