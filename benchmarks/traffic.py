"""python -m benchmarks.traffic: bytes that the collectives of a step move, and their time, for docs/scale.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BEGIN = "<!-- tables: python -m benchmarks.traffic writes them -->\n"
END = "<!-- end of the tables -->\n"
GB = 1e9
GPU_MEMORY = 80 * GB
GPU_FLOPS = 400e12
"""Of an H100 in bfloat16: 40 % of its peak of 989e12."""
PER_MACHINE = 8
INSIDE = 450 * GB
"""Bytes per second that a GPU sends inside a machine (NVLink of the H100, one direction)."""
BETWEEN = 50 * GB
"""The same between machines: 400 Gbit/s for each GPU."""
LATENCY = 10e-6
"""Seconds of one message between two GPUs of different machines."""
ROWS = 64
TOKENS = 256
INPUTS = 2
"""Rows of a GPU, tokens of an input, inputs of a row."""
STATES = 16
"""Bytes per parameter: float32 weight, gradient, and the two moments of AdamW."""
INTEGERS = 6 * 8
"""Bytes of a row that are gathered: content of its inputs, query, positive, example, hard negative."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model."""

    name: str
    parameters: float
    hidden: int
    layers: int


MODELS = (
    Model("0.6B", 0.6e9, 1024, 28),
    Model("8B", 8e9, 4096, 36),
    Model("70B", 70e9, 8192, 80),
)
GPUS = (8, 64, 1024)


@dataclass(frozen=True)
class Moved:
    """Bytes that one GPU sends in a step, and the messages that it waits for one after the other."""

    inside: float
    between: float
    messages: float = 0.0

    @property
    def seconds(self) -> float:
        """Time if nothing overlaps with computing."""
        return self.inside / INSIDE + self.between / BETWEEN + self.messages * LATENCY


def all_gather(num_bytes: float, gpus: int) -> Moved:
    """Return what each GPU sends until all have `num_bytes` in all: a ring, over the slowest link. Also what a
    reduce-scatter of `num_bytes` sends."""
    sent = num_bytes * (gpus - 1) / gpus
    if gpus <= PER_MACHINE:
        return Moved(sent, 0.0, gpus - 1)
    return Moved(0.0, sent, gpus - 1)


def joined(*parts: Moved) -> Moved:
    """Return the sum."""
    return Moved(
        *(
            sum(getattr(sizes, name) for sizes in parts)
            for name in ("inside", "between", "messages")
        )
    )


def of_parameters(strategy: str, model: Model, gpus: int) -> Moved:
    """Return what weights and gradients move in one step, whose units stay gathered (see keeps_gathered)."""
    gradients = 4 * model.parameters
    weights = 2 * model.parameters
    if strategy == "ddp":  # all-reduce: reduce-scatter and all-gather
        return joined(all_gather(gradients, gpus), all_gather(gradients, gpus))
    if strategy == "fsdp":
        return joined(all_gather(weights, gpus), all_gather(gradients, gpus))
    machines = gpus // PER_MACHINE
    inside = joined(
        all_gather(weights, PER_MACHINE), all_gather(gradients, PER_MACHINE)
    )
    shard = gradients / PER_MACHINE * (machines - 1) / machines
    return joined(inside, Moved(0.0, 2 * shard, 2 * (machines - 1)))


def of_embeddings(model: Model, gpus: int) -> Moved:
    """Return what the embeddings and their gradients move."""
    total = 4.0 * model.hidden * ROWS * INPUTS * gpus
    return joined(
        all_gather(total, gpus),
        all_gather(total, gpus),
        all_gather(INTEGERS * ROWS * gpus, gpus),
    )


def held(model: Model, gpus: int) -> float:
    """Return the bytes of embeddings, unit vectors and gradients of both on one GPU."""
    return 4.0 * 4 * model.hidden * ROWS * INPUTS * gpus + INTEGERS * ROWS * gpus


def states(strategy: str, model: Model, gpus: int) -> float:
    """Return the bytes of weights, gradients and optimizer on one GPU."""
    parts = {"ddp": 1, "fsdp": gpus, "hsdp": PER_MACHINE}[strategy]
    return STATES * model.parameters / parts


def computing(model: Model) -> float:
    """Return the seconds of one step with Gradient Cache: two forward passes and one backward pass."""
    return 8 * model.parameters * ROWS * INPUTS * TOKENS / GPU_FLOPS


def strategy_table() -> str:
    """Return what each strategy moves."""
    lines = [
        "| model | GPUs | strategy | weights, gradients, AdamW, GB | sent inside, GB | sent between machines, GB "
        "| s if nothing overlaps | s computing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for gpus in GPUS:
            for strategy in ("ddp", "fsdp", "hsdp"):
                if strategy == "hsdp" and gpus == PER_MACHINE:
                    continue
                need = states(strategy, model, gpus)
                moved = of_parameters(strategy, model, gpus)
                need_said = f"{need / GB:,.1f}" + (
                    "" if need < GPU_MEMORY else " (does not fit)"
                )
                lines.append(
                    f"| {model.name} | {gpus:,d} | {strategy} | {need_said} | {moved.inside / GB:,.1f} | "
                    f"{moved.between / GB:,.1f} | {moved.seconds:,.2f} | {computing(model):,.2f} |"
                )
    return "\n".join(lines)


def loss_table() -> str:
    """Return what the embeddings move and take."""
    lines = [
        "| model | GPUs | rows | held, GB | sent, GB | ms |",
        "|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for gpus in GPUS:
            moved = of_embeddings(model, gpus)
            sent = moved.inside + moved.between
            lines.append(
                f"| {model.name} | {gpus:,d} | {ROWS * gpus:,d} | {held(model, gpus) / GB:,.3f} | {sent / GB:,.3f} | "
                f"{1000 * moved.seconds:,.1f} |"
            )
    return "\n".join(lines)


def tables() -> str:
    """Return both tables as the page has them."""
    return f"{strategy_table()}\n\n{loss_table()}\n"


def main() -> None:
    """Write the tables into the page."""
    page = Path("docs/scale.md")
    before, _, tail = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{tail.partition(END)[2]}")


if __name__ == "__main__":
    main()
