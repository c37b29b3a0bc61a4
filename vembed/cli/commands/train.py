"""`vembed train`, `plan` and `tune`: one training run or the stages of a config, predicted, run, or searched."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from vembed.cli.arguments import NO_FLAGS, LaunchFlags
from vembed.cli.support import (
    MODE,
    ConfigArguments,
    Overrides,
    Result,
    number_table,
    parts_of,
    plain_console,
)

if TYPE_CHECKING:
    from vembed.parallel.step_memory import MemoryEstimate

BUDGETS = (32_768, 16_384, 8_192, 4_096, 2_048, 1_024)
"""Values of micro_batch_tokens that are tried, the fastest first."""


def train(
    ctx: typer.Context, args: ConfigArguments = None, use: LaunchFlags = NO_FLAGS
) -> Any:
    """Train a model as a config file (YAML, TOML or JSON) says, on all local devices.

    Every option of the config is a word here too, as batch_size=16 or --batch-size 16. `vembed schema --format markdown` lists
    them. Often used: --nproc N (processes on this machine, by default one per GPU), --num-machines N, --accelerate-config
    FILE|PRESET, --resume [PATH], --overwrite, --verbose, --quiet, --debug. The command line wins over the file.

    Exit codes: 0 done, 1 failed, 2 bad usage, config or data, 130 or 143 stopped by a signal, and saved.
    """
    arguments = use.with_words(args)
    from vembed.cli.run_train import run_train
    from vembed.config.loading import chosen_pipeline
    from vembed.pipelines.stages import results_of, run_stages

    writes_json = ctx.obj is not None
    train_one = partial(run_train, starts_processes=MODE.get() != "process")
    pipeline = chosen_pipeline(arguments.source, arguments.overrides, arguments.stage)
    if pipeline is None:
        code, result = train_one(arguments, returns_result=writes_json)
        return result or code
    code = run_stages(pipeline, arguments, lambda stage: train_one(stage)[0])
    if code or not writes_json or arguments.is_dry_run:
        return code
    return results_of(pipeline)


def tune(
    config: Annotated[str, Argument(metavar="CFG")],
    overrides: Overrides = None,
    trials: Annotated[int, Option(min=1)] = 20,
    options: str = "",
    output: str = "tune",
    nproc: Annotated[int, Option(min=0)] = 0,
    seed: int = 0,
    dry_run: bool = False,
) -> Result | None:
    """Search for better values of a few options, and write the best config as YAML.

    Args:
        config: The config to start from, with validation data.
        trials: Trials in all, those of an earlier start included.
        options: Options to search, as learning_rate,temperature.
        output: Folder of the search, in which it goes on.
        nproc: Trials at once. 0: one for each GPU.
        seed: Seed of the search.
        dry_run: Show the options, their ranges and the trials.
    """
    from vembed.pipelines.option_search import Search, run_tune

    names = tuple(parts_of("--options", options, str))
    search = Search(config, tuple(overrides or ()), Path(output), trials, names, seed)
    return run_tune(search, nproc=nproc, is_dry_run=dry_run)


def plan(
    args: ConfigArguments = None,
    gpu: str | None = None,
    memory: str | None = None,
    use: LaunchFlags = NO_FLAGS,
) -> tuple[Any, int]:
    """Predict the memory of each process for a config, and the settings that fit, without loading the model.

    Args:
        gpu: Plan for other GPUs, as 2xA100-80GB, with an estimate of the hours.
        memory: Plan for GPUs of this memory each, in GB.
    """
    # A dry run needs no machine rank, and may describe GPUs of other machines.
    arguments = replace(use, is_dry_run=True).with_words(args)
    from vembed.cli.run_train import resolve_launch
    from vembed.parallel.devices import GIB, read_hardware
    from vembed.parallel.step_memory import MemoryEstimate
    from vembed.pipelines.prediction import FITS, place_here, training_time

    planned, count = read_hardware(gpu, memory)
    run = arguments.resolve()
    ranks = resolve_launch(run, arguments, num_gpus=count).first_rank
    placement = place_here(run, ranks, planned)
    estimate = MemoryEstimate(placement)
    size = estimate.size
    need = estimate.in_step()
    fits = need.total <= FITS * placement.memory
    seconds, hours_line = training_time(estimate, planned)
    num_bytes = asdict(need)
    rows = [(name, f"{num_bytes[name] / GIB:.2f}") for name in num_bytes]
    rows += [
        ("", ""),
        ("parameters", f"{size.total:,d}"),
        ("trained", f"{size.trained:,d}"),
        ("processes, shards", f"{ranks.world_size}, {placement.num_shards}"),
        ("rows of each process", f"{placement.num_examples:,d}"),
    ]
    console = plain_console()
    console.print(number_table(("what", "GB"), rows, "memory of each process"))
    fsdp_notes = () if placement.fsdp is None else run.fsdp_notes
    for line in (*run.notes, *fsdp_notes, *placement.notes):
        console.print(f"note: {line}")
    for name, decision in placement.decisions.items():
        console.print(f"{name}: {decision}")
    where = planned.name if planned else str(placement.device)
    console.print(
        f"needs {need.total / GIB:.1f} GB of the {placement.memory / GIB:.1f} GB of a process ({where}): "
        f"{'fits' if fits else 'does not fit'}. Activations are an estimate; the rest follows from the model's shapes."
    )
    ways = [] if fits else ways_out(estimate)
    for line in (*ways, hours_line):
        console.print(line)
    result = {
        "fits": fits,
        "needed_bytes": need.total,
        "available_bytes": placement.memory,
        "memory_bytes": num_bytes,
        "decisions": {name: str(value) for name, value in placement.decisions.items()},
        "ways_out": ways,
        "seconds": seconds,
    }
    return result, 0 if fits else 1


def ways_out(estimate: MemoryEstimate) -> list[str]:
    """Return settings that would fit, the cheapest first."""
    from vembed.parallel.step_memory import smaller_states
    from vembed.pipelines.prediction import FITS

    placement = estimate.placement
    config = placement.run.config
    recomputation = placement.recomputation.value
    limit = FITS * placement.memory
    cache = ""
    if config.batch.use_gradient_cache is False:
        cache = "use_gradient_cache: auto, "
    # Smaller micro-batches cost less time than recomputation, so all of them are tried first.
    for recomputes in (recomputation, True):
        more = "" if recomputes == recomputation else "gradient_checkpointing: true, "
        for budget in BUDGETS:
            need = estimate.in_step(
                tokens=budget, recomputes=recomputes, uses_cache=True
            )
            if need.total <= limit:
                return [f"fits with {more}{cache}micro_batch_tokens: {budget}"]
    return [
        "no micro-batch is small enough: the weights, gradients and optimizer alone take too much",
        *smaller_states(placement),
    ]
