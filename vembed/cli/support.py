"""Shared by all commands: their options, exit codes, `--json`, and processes that share the work."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from vembed.errors import RunError, Stopped, UserError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_NO_MEMORY = re.compile(
    "can't allocate memory|Cannot allocate memory|failed to map segment|can't start new thread"
)
"""In messages of torch, of the system and of its loader of libraries."""
_NO_CHOICE = re.compile(r"(?:Value error, )?('.*' is not one of (.*))\.")
"""In messages of Typer about an option with choices. Newer ones begin as pydantic's."""
_LOST_RANK = re.compile("closed by peer|reset by peer|remote process exited")
"""In messages of gloo and NCCL after another process of the run has ended."""
ConfigArguments = Annotated[
    list[str] | None, Argument(metavar="CFG [KEY=VALUE | --OPTION VALUE] ...")
]
Overrides = Annotated[list[str] | None, Argument(metavar="KEY=VALUE")]
Nproc = Annotated[
    int,
    Option("--nproc", min=1, help="Processes on this machine that share the work."),
]
TrustRemoteCode = Annotated[
    bool,
    Option("--trust-remote-code", help="Run Python code that the model brings along."),
]
AnyModel = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A model folder, a Hub name, a run or its config.",
    ),
]
ColumnMapping = Annotated[
    str, Option(help="As the option of that name: {question: query}.")
]
ImageRootOption = Annotated[
    str | None, Option(help="Where relative image paths start, and must stay.")
]
BatchTokens = Annotated[
    int | None, Option(min=1, help="Padded tokens per micro-batch.")
]
KindOption = Annotated[
    Literal["query", "document"],
    Option(help="query or document: which of the model's prompts to use."),
]
PositiveNumber = Annotated[int | None, Option(min=1)]
Result = dict[str, Any]
"""What `--json` writes of a command."""
OutputFile = Annotated[str, Option("--output", "-o")]
TruncateDim = Annotated[
    int | None, Option(min=1, help="Keep only the first so many numbers.")
]
NewFolder = Annotated[str, Option("--output", "-o", help="A new folder.")]
CheckData = Annotated[
    str | None,
    Option(help="Evaluation data for texts and nDCG. Default: those of the run."),
]


@dataclass(frozen=True)
class ModelUse:
    """How a command loads its model and shares its work. These are options of each command with such a parameter."""

    torch_dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = (
        "auto"
    )
    trust_remote_code: TrustRemoteCode = False
    strategy: Annotated[
        Literal["auto", "ddp", "fsdp"],
        Option(
            help="ddp: a copy of the model per process, fsdp: a shard, for large models, or auto."
        ),
    ] = "ddp"
    nproc: Nproc = 1

    def share(self, source: str = "") -> None:
        """End the command here if other processes are to do its work. `source`: what it reads."""
        if source == "-" and self.nproc > 1:
            raise UserError(
                f"standard input (-) is read by one process: leave out --nproc {self.nproc}, or give a file"
            )
        option("torch_dtype", self.torch_dtype)
        share(self.nproc)

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the path or Hub name of a model, and the options to load it. The session of the processes is one of them."""
        from vembed.parallel.session import start_command_session

        path = usable_model(name)
        with start_command_session(path, self.strategy) as session:
            options = {
                "torch_dtype": option("torch_dtype", self.torch_dtype),
                "trust_remote_code": self.trust_remote_code,
                "session": session,
            }
            yield path, options


ALONE = ModelUse()
"""One process, and the model as it is stored."""

MODE: ContextVar[Literal["command", "check", "process"]] = ContextVar(
    "mode", default="command"
)
"""check: a command ends where its work would begin. process: a launcher has started this process."""
STANDARD_OUTPUT = "-"
CONFIG_FILES = (".yaml", ".yml", ".toml")
"""Endings of configs that stand for their run. A .json is likelier to be a file of a model."""
LINE = "=" * 50


class StartRanks(Exception):  # noqa: N818 - not an error: the work is for other processes
    """Ends a command whose work is done by several processes, with the same arguments. Its own argument: their environments."""


class Command(TyperCommand):
    """A command. It returns None, an exit code, the result for `--json`, or (result, exit code)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; `--json` that no file follows means standard output."""
        self.words = list(args)
        try:
            return super().parse_args(ctx, with_json_target(args))
        except typer.BadParameter as error:
            refusal = _NO_CHOICE.fullmatch(error.message)
            if refusal is not None:
                word, *choices = re.findall("'([^']*)'", refusal[1])
                error.message = refusal[1] + did_you_mean(word, choices)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command and exit with its code."""
        raise typer.Exit(guarded(lambda: self._run(ctx)))

    def _run(self, ctx: Any) -> int:
        target = ctx.params.pop("json_file", None)
        ctx.obj = target
        if target not in (None, STANDARD_OUTPUT) and MODE.get() != "check":
            require_folder(Path(target))
        try:
            is_alone = target == STANDARD_OUTPUT
            with _output_to_stderr() if is_alone else nullcontext():
                result = super().invoke(ctx)
        except StartRanks as start:
            from vembed.parallel.launch import run_ranks

            command = [sys.executable, "-m", "vembed", str(self.name), *self.words]
            return run_ranks(command, *start.args)
        code = 0
        if isinstance(result, tuple):
            result, code = result
        if result is None or isinstance(result, int):
            return result or code
        # Of several ranks the first one writes.
        if target is not None and is_first_rank():
            if is_dataclass(result) and not isinstance(result, type):
                result = asdict(result)
            text = json.dumps(result, indent=2, ensure_ascii=False, default=str) + "\n"
            if target == STANDARD_OUTPUT:
                sys.stdout.write(text)
            else:
                Path(target).write_text(text, encoding="utf-8")
        return code


def require_folder(path: Path) -> None:
    """Raise UserError if the folder of a file that is to be written is not there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: {folder} is not a folder")


def with_json_target(args: Sequence[str]) -> list[str]:
    """Return the arguments with a value for each `--json` that has none."""
    arguments = list(args)
    for number, argument in enumerate(arguments):
        following = arguments[number + 1] if number + 1 < len(arguments) else ""
        is_target = following == STANDARD_OUTPUT or following.endswith(".json")
        if argument == "--json" and not is_target:
            arguments[number] = f"--json={STANDARD_OUTPUT}"
    return arguments


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
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            stream = open(number, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def quieten_libraries() -> None:
    """Silence what torchao logs about kernels of GPUs that are not here. Call this before Transformers is imported,
    which imports torchao where it is installed."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def guarded(function: Callable[[], int | None]) -> int:
    """Call a function and return the exit code. A UserError, or a disk that is full, is printed as a
    message; a bug keeps its traceback."""
    try:
        return function() or 0
    except (UserError, RunError) as error:
        _print_error(f"error: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    except Stopped as stopped:
        # All ranks stop together, for one reason.
        if is_first_rank():
            _print_error(f"{stopped}\n")
        return stopped.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except typer.Exit:
        raise
    except Exception as error:
        from vembed.files import disk_refusal

        message = disk_refusal(error)
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            message = (
                f"there is not enough memory ({str(error) or type(error).__name__}): give the process more (ulimit -v, the memory "
                "of the container), or make batch_size, micro_batch_tokens or the model smaller"
            )
        if _LOST_RANK.search(str(error)):
            place = [*getattr(error, "__notes__", []), ""][0]
            message = f"lost the connection to another rank, which has ended (this one is {place})"
        if message is None:
            raise
        _print_error(f"error: {message}\n")
        return 1


def is_first_rank() -> bool:
    """Return whether this process is alone or the one of several that writes."""
    return os.environ.get("RANK", "0") == "0"


def _print_error(text: str) -> None:
    """Write to stderr. A closed terminal is ignored: the exit code carries the result too."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is."""
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True, markup=False, highlight=False)


def number_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
) -> Table:
    """Return a table of names and, to the right, numbers."""
    from rich.table import Table

    first, *columns = header
    table = Table(first, box=None, pad_edge=False, title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def print_progress(line: str) -> None:
    """Print a line of progress at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def print_lines(*lines: str) -> None:
    """Print lines at once: other processes write to the same terminal."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def share(nproc: int, **machines: Any) -> None:
    """End the command here if other processes are to do its work. Commands check their arguments before they call it."""
    if MODE.get() == "check":
        raise typer.Exit(0)
    # LOCAL_RANK: this is one of those processes.
    if os.environ.get("LOCAL_RANK") or nproc * machines.get("num_machines", 1) == 1:
        return
    from vembed.parallel.launch import rank_environments

    raise StartRanks(rank_environments(nproc, **machines))


def usable_model(name: str) -> str:
    """Return the model that a name stands for: of a training config that of its run, or of the last of its stages. Raise
    UserError for a checkpoint."""
    from vembed.config.loading import chosen_pipeline, load_config
    from vembed.weights.sources import is_checkpoint

    path = Path(name).expanduser()
    if is_checkpoint(path):
        raise UserError(
            f"{name} is a checkpoint: first make a model of it (`vembed export {name} FOLDER`)"
        )
    if path.suffix not in CONFIG_FILES or not path.is_file():
        return name
    pipeline = chosen_pipeline(name)
    if pipeline is None:
        folder = Path(load_config(name).run.output_dir)
    else:
        trainings = [stage for stage in pipeline.stages if stage.kind == "train"]
        folder = trainings[-1].folder
    if not folder.is_dir():
        raise UserError(
            f"{name} has not been trained: its run would be in {folder}; give a model, or first `vembed train {name}`"
        )
    return str(folder)


def parts_of(
    flag: str,
    text: str,
    kind: type = int,
) -> Any:
    """Return the numbers of a list with commas."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(
            f"{flag} {text}: give {'whole ' if kind is int else ''}numbers with commas"
        ) from None


def option(name: str, text: str) -> Any:
    """Parse a value like the config option of that name; None for an empty text."""
    from vembed.config.options import all_options, canonical

    if not text:
        return None
    try:
        return canonical(name, all_options()[name].parse(text))
    except ValueError as error:
        raise UserError(str(error)) from None
