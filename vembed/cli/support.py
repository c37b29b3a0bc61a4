"""Helpers shared by the commands of the `vembed` command: exit codes, processes and flags."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from vembed.errors import RunError, Stopped, UserError

Nproc = Annotated[
    int,
    typer.Option(
        "--nproc", min=1, help="Processes on this machine that share the work."
    ),
]
Shards = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="ddp: a copy of the model per process, fsdp: a shard, for large models, or auto.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that the model brings along."
    ),
]
AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model folder, a Hub name, a run or a checkpoint."
    ),
]
WeightsDtype = Annotated[
    str, typer.Option("--torch-dtype", help="auto, float32, bfloat16 or float16.")
]
ColumnMapping = Annotated[
    str, typer.Option(help="As the option of that name: {question: query}.")
]
ImageRoot = Annotated[
    str | None, typer.Option(help="Where relative image paths start, and must stay.")
]
BatchTokens = Annotated[
    int | None, typer.Option(min=1, help="Padded tokens per micro-batch.")
]
Kind = Annotated[
    str, typer.Option(help="query or document: which of the model's prompts to use.")
]

USAGE_ERROR: Any = typer.BadParameter.__base__
"""Unknown flags, missing arguments, wrong types: of the click that this Typer uses, its own or the installed one."""
_only_checks: ContextVar[bool] = ContextVar("only_checks", default=False)

STANDARD_OUTPUT = "-"
JsonOutput = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE.json]",
        help="The result as JSON: alone on standard output, or in this file.",
    ),
]
"""Of commands whose class is JsonCommand."""


class JsonCommand(TyperCommand):
    """A command whose `--json` stands alone or before the name of a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; `--json` that no file follows means standard output."""
        return super().parse_args(ctx, with_json_target(args))


def with_json_target(args: Sequence[str]) -> list[str]:
    """Return the arguments with a value for each `--json` that has none."""
    arguments = list(args)
    for number, argument in enumerate(arguments):
        following = arguments[number + 1] if number + 1 < len(arguments) else ""
        if (
            argument == "--json"
            and following != STANDARD_OUTPUT
            and not following.endswith(".json")
        ):
            arguments[number] = f"--json={STANDARD_OUTPUT}"
    return arguments


@contextmanager
def json_result(target: str | None) -> Iterator[Callable[[Any], None]]:
    """Give a function that takes a command's result, and write it as JSON at the end. On standard output it stands alone:
    all else that this process and its children print goes to standard error. Of several ranks the first one writes."""
    results: list[Any] = []
    if (
        target is not None
        and target != STANDARD_OUTPUT
        and not Path(target).absolute().parent.is_dir()
    ):
        raise UserError(
            f"--json {target}: {Path(target).absolute().parent} is not a folder; give one that is there"
        )
    with _output_to_stderr() if target == STANDARD_OUTPUT else nullcontext():
        yield results.append
    if not results or target is None or os.environ.get("RANK", "0") != "0":
        return
    value = (
        asdict(results[0])
        if is_dataclass(results[0]) and not isinstance(results[0], type)
        else results[0]
    )
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--json {target} cannot be written: {error.strerror}"
        ) from error


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    saved_stdout = os.dup(1)  # children inherit the descriptor, not Python's object
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def open_closed_streams() -> None:
    """Open the standard streams that the caller has closed (`>&-`), on the null device.

    Otherwise writing to them fails, and the next file that is opened gets their number and what libraries print.
    """
    for number in range(3):  # in order: an opened file gets the lowest free number
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
    # Python has no object for a stream that was closed when it started.
    if sys.stdout is None:
        sys.stdout = open(  # noqa: SIM115
            1, "w", encoding="utf-8", errors="backslashreplace", closefd=False
        )
    if sys.stderr is None:
        sys.stderr = open(  # noqa: SIM115
            2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
        )


def guarded(function: Callable[[], int | None]) -> int:
    """Call a function and return the exit code. A UserError, or a disk that is full, is printed as a
    message; a bug keeps its traceback."""
    try:
        return function() or 0
    except UserError as error:
        return _say_error(error, 2)
    except RunError as error:
        return _say_error(error, 1)
    except Stopped as stopped:
        if (
            os.environ.get("RANK", "0") == "0"
        ):  # all ranks stop together, for one reason
            _say(f"{stopped}\n")
        return stopped.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except Exception as error:
        from vembed.saving.durability import refusal

        said = refusal(error)
        if said is None:
            raise
        _say(f"error: {said}\n")
        return 1


def end(function: Callable[[], int | None]) -> NoReturn:
    """Call a command and exit with its code."""
    raise typer.Exit(guarded(function))


def _say_error(error: Exception, code: int) -> int:
    _say(f"error: {error}\n")
    return code


def _say(text: str) -> None:
    """Write to stderr. A closed terminal is ignored: the exit code carries the result too."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


@contextmanager
def only_checked() -> Iterator[io.StringIO]:
    """Let commands that `share` their work end where they would begin it. Gives what they say about mistakes."""
    said = io.StringIO()
    token = _only_checks.set(True)
    try:
        with redirect_stderr(said):
            yield said
    finally:
        _only_checks.reset(token)


def share(ctx: typer.Context, nproc: int) -> int | None:
    """Start the same command on several processes and return its exit code; None inside such a process. Commands check
    their arguments before they call it."""
    if _only_checks.get():
        return 0
    if nproc == 1 or os.environ.get("LOCAL_RANK"):
        return None
    from vembed.parallel.launch import rank_environments, run_ranks

    command_name = ctx.info_name or ""
    args = (
        sys.argv[sys.argv.index(command_name) :]
        if command_name in sys.argv
        else [command_name, *sys.argv[1:]]
    )
    return run_ranks([sys.executable, "-m", "vembed", *args], rank_environments(nproc))


def numbers(flag: str, text: str) -> list[int]:
    """Return whole numbers from a list with commas."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{flag} {text}: give whole numbers, as 256,128") from None


def floats(flag: str, text: str) -> list[float]:
    """Return numbers from a list with commas."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{flag} {text}: give numbers, as 0.7,0.3") from None


def word(flag: str, value: str, args: Sequence[str]) -> Any:
    """Return a word that is one of several."""
    if value not in args:
        raise UserError(f"{flag} {value}: give one of {', '.join(args)}")
    return value


def model_options(torch_dtype: str, strategy: str) -> dict[str, Any]:
    """Return the checked options of commands that load a model."""
    return {
        "torch_dtype": option("torch_dtype", torch_dtype),
        "strategy": word("--strategy", strategy, ("auto", "ddp", "fsdp")),
    }


def column_mapping_of(text: str) -> dict[str, str] | None:
    """Return a column mapping; None for an empty text."""
    return dict(option("column_mapping", text)) if text else None


def option(name: str, text: str) -> Any:
    """Parse a value like the config option of that name."""
    from vembed.config.options import checked
    from vembed.config.spelling import from_text, normalise

    try:
        return checked(name, normalise(name, from_text(name, text)))
    except ValueError as error:
        raise UserError(str(error)) from None


def taken_flags(
    args: Sequence[str], flags: Sequence[str]
) -> tuple[list[str], list[str | None]]:
    """Return the arguments without the given flags, and the value of each: `--flag VALUE` or `--flag=VALUE`."""
    rest: list[str] = []
    values: dict[str, str] = {}
    remaining = iter(args)
    for argument in remaining:
        flag, has_value, value = argument.partition("=")
        if flag not in flags:
            rest.append(argument)
            continue
        values[flag] = value if has_value else next(remaining, "")
        if not values[flag] or values[flag].startswith("--"):
            raise UserError(f"{flag} needs a value")
    return rest, [values.get(flag) for flag in flags]
