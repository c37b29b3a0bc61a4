"""`vembed plan`: prediction of the memory that a run needs on each process, without weights, and settings that fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vembed.cli.commands.hours import Speed, speed_of, training_time
from vembed.cli.commands.train import resolve_launch
from vembed.config.arguments import TrainArguments
from vembed.config.loading import resolve_run
from vembed.parallel.devices import bf16_instructions
from vembed.parallel.environment import RankInfo
from vembed.parallel.estimate import GIB, Memory, ModelSize, measure
from vembed.parallel.hardware import Gpu, Hardware
from vembed.parallel.placement import Placement, memory_of_a_process, place

FITS = 0.9
"""A run fits if it needs at most this fraction of the memory."""
BUDGETS = (32_768, 16_384, 8_192, 4_096, 2_048, 1_024)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of the memory of each process of a run and of its time, from the shapes of its model alone."""

    placement: Placement
    size: ModelSize
    memory: Memory
    gpu: Gpu | None
    seconds: float | None
    """An estimate; None where there is none."""
    hours_line: str
    """The estimate with what it rests on, or why there is none."""

    @property
    def fits(self) -> bool:
        """True if each process has the memory."""
        return self.memory.total <= FITS * self.placement.memory

    @property
    def needed(self) -> str:
        """The memory in words."""
        return f"{self.memory.total / GIB:.1f} GB of the {self.placement.memory / GIB:.1f} GB of a process"

    @property
    def speed_alone(self) -> Speed:
        """Arithmetic of a process that shares its machine with no other."""
        return speed_of(replace(self.placement, ranks=RankInfo()), self.gpu)


def predict(
    arguments: TrainArguments,
    env: Mapping[str, str] = os.environ,
    *,
    hardware: Hardware | None = None,
) -> Prediction:
    """Return the prediction for a config. `hardware`: instead of this machine's."""
    run = resolve_run(
        arguments.source, arguments.overrides, stage=arguments.stage, env=env
    )
    launch = resolve_launch(
        run, arguments, env, num_gpus=None if hardware is None else hardware.count
    )
    has_gpu = hardware is not None or torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    rank_info = launch.first_rank
    gpu = None if hardware is None else hardware.gpu
    available = memory_of_a_process(rank_info, device) if gpu is None else gpu.memory
    placement = place(
        run, rank_info, device, available, gpu=gpu, instructions=bf16_instructions()
    )
    # The placement has measured the model only where the strategy depends on its size.
    size = placement.size or measure(run.config)
    seconds, hours_line = training_time(placement, size, speed_of(placement, gpu))
    return Prediction(
        placement, size, placement.predict(size), gpu, seconds, hours_line
    )


def run_plan(
    arguments: TrainArguments,
    env: Mapping[str, str] = os.environ,
    *,
    hardware: Hardware | None = None,
    on_result: Callable[[Any], None] = lambda _: None,
) -> int:
    """Print the prediction for a config; exit code 0 if it fits, 1 if not. `hardware`: instead of this machine's.
    `on_result` takes the prediction as a dict."""
    prediction = predict(arguments, env, hardware=hardware)
    show(prediction, on_result)
    return 0 if prediction.fits else 1


def show(prediction: Prediction, on_result: Callable[[Any], None]) -> None:
    """Print a prediction in full. `on_result` takes it as a dict."""
    placement = prediction.placement
    size = prediction.size
    memory = prediction.memory
    gpu = prediction.gpu
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(memory, size, placement))
    for line in (*placement.run.notes, *_fsdp_notes(placement), *placement.notes):
        console.print(f"note: {line}")
    for name, decision in placement.decisions.items():
        console.print(f"{name}: {decision}")
    console.print(f"graphs: {placement.graphs(size)}")
    where = str(placement.device) if gpu is None else gpu.name
    console.print(
        f"needs {prediction.needed} ({where}): {'fits' if prediction.fits else 'does not fit'}. Activations are an "
        "estimate; the rest follows from the model's shapes."
    )
    ways = [] if prediction.fits else ways_out(placement, size)
    most_rows = placement.most_rows(size) * placement.ranks.world_size
    for line in ways:
        console.print(f"  {line}")
    on_result(
        {
            "fits": prediction.fits,
            "needed_bytes": memory.total,
            "available_bytes": placement.memory,
            "device": where,
            "memory_bytes": asdict(memory),
            "parameters": size.total,
            "trained_parameters": size.trained,
            "num_processes": placement.ranks.world_size,
            "num_shards": placement.num_shards,
            "rows": placement.rows,
            "largest_batch": most_rows,
            "decisions": {
                name: str(decision) for name, decision in placement.decisions.items()
            },
            "ways_out": ways,
            "seconds": prediction.seconds,
        }
    )
    console.print(
        f"largest batch: about {most_rows:,d} rows, by the memory of the loss"
    )
    console.print(prediction.hours_line)


def _fsdp_notes(placement: Placement) -> tuple[str, ...]:
    return () if placement.fsdp is None else tuple(placement.run.fsdp_notes)


def ways_out(placement: Placement, size: ModelSize) -> list[str]:
    """Return settings that would fit, the cheapest first."""
    config = placement.run.config
    recomputation = placement.recomputation.value
    limit = FITS * placement.memory
    if (
        config.batch.use_gradient_cache is False
        and placement.predict(size, uses_cache=True).total <= limit
    ):
        return [
            "fits with use_gradient_cache: auto (the gradient is the same, for one more forward pass)"
        ]
    # Smaller micro-batches cost less time than recomputation, so all of them are tried first.
    for recomputes in (recomputation, True):
        for budget in BUDGETS:
            if (
                placement.predict(
                    size, tokens=budget, recomputes=recomputes, uses_cache=True
                ).total
                <= limit
            ):
                more = (
                    ""
                    if recomputes == recomputation
                    else "gradient_checkpointing: true, "
                )
                more += (
                    "use_gradient_cache: auto, "
                    if config.batch.use_gradient_cache is False
                    else ""
                )
                return [f"fits with {more}micro_batch_tokens: {budget}"]
    lines = [
        "no micro-batch is small enough: the weights, gradients and optimizer alone take too much"
    ]
    if not config.adapters.use_lora:
        lines.append("use_lora: true (gradients and optimizer of the adapters alone)")
    if placement.num_shards == 1:
        lines.append(
            "use_fsdp: true on several processes (everything is divided by their number)"
        )
    if not config.adapters.use_qlora:
        lines.append("use_qlora: true (frozen weights in 4 bits)")
    if placement.fsdp is None or not placement.fsdp.offload:
        lines.append(
            "use_fsdp: true with fsdp_offload_params: true (weights and optimizer in host memory, slower)"
        )
    return lines


def _table(memory: Memory, size: ModelSize, placement: Placement) -> Table:
    table = Table(
        title="memory of each process", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("what")
    table.add_column("GB", justify="right")
    names = {
        "gathered": "gathered parameters",
        "copies": "weights in bfloat16",
        "loss": "embeddings and loss",
    }
    for name, count in asdict(memory).items():
        table.add_row(names.get(name, name), f"{count / GIB:.2f}")
    table.add_row("", "")
    table.add_row("parameters", f"{size.total:,d}")
    table.add_row("trained", f"{size.trained:,d}")
    table.add_row(
        "processes, shards", f"{placement.ranks.world_size}, {placement.num_shards}"
    )
    table.add_row("rows of each process", f"{placement.rows:,d}")
    return table
