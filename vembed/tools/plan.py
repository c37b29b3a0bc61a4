"""`vembed plan`: predicted memory per process without loading weights, and settings that would fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from vembed.config.arguments import TrainArguments
from vembed.config.fsdp import FsdpConfig, chosen_strategy, resolve_fsdp, resolve_gradient_checkpointing
from vembed.config.loading import resolve_config
from vembed.config.schema import TrainConfig
from vembed.distributed.environment import RankInfo
from vembed.distributed.strategy import memory_of_a_process
from vembed.families.backbones import layers_of
from vembed.families.decisions import describe
from vembed.families.description import ModelDescription
from vembed.models.adapters import wants_adapters
from vembed.models.embedding_model import build_model
from vembed.tools.train import resolve_launch

GIB = 2**30
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.1, "paged_adamw_8bit": 2.1, "adafactor": 0.1, "sgd": 0.0}
"""Bytes of optimizer state per trained parameter."""
KEPT_PER_HIDDEN = 16
"""Values kept for the backward pass per token, hidden unit and transformer layer, without the feed-forward part."""
FITS = 0.9
"""A run fits if it needs at most this fraction of the memory."""
BUDGETS = (32_768, 16_384, 8_192, 4_096, 2_048, 1_024)


@dataclass(frozen=True)
class Model:
    """Sizes of a model that the prediction needs."""

    total: int
    trained: int
    weight_bytes: float
    """Bytes of the whole model as stored: float32 if trained, the file's dtype if frozen, half a byte in 4 bits."""
    layer_bytes: float
    """Bytes of the largest unit when gathered."""
    num_layers: int
    hidden: int
    inner: int


def run_plan(arguments: TrainArguments, env: Mapping[str, str] = os.environ) -> int:
    """Print the prediction for a config. Return exit code 0 if it fits, 1 if not."""
    resolved = resolve_config(arguments.source, arguments.overrides, stage=arguments.stage, env=env)
    config = resolved.config
    launch = resolve_launch(config, arguments, env)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rank_info = RankInfo(0, launch.world_size, 0, launch.num_processes)
    memory = memory_of_a_process(rank_info, device)
    fsdp, _ = resolve_fsdp(config, env)
    shards = launch.world_size if chosen_strategy(config, env) == "fsdp" and fsdp is not None else 1
    if fsdp is not None and fsdp.sharding_strategy == "HYBRID_SHARD":
        shards = launch.num_processes
    model = measure(config, describe(config))
    checkpointing, _ = resolve_gradient_checkpointing(config, env)
    budget = 8_192 if config.micro_batch_tokens == "auto" else config.micro_batch_tokens
    parts = predict(config, model, fsdp, shards, checkpointing=checkpointing, budget=budget)
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(parts, model, shards, launch.world_size))
    need = sum(parts.values())
    fits = need <= FITS * memory
    console.print(
        f"needs {need / GIB:.1f} GB of the {memory / GIB:.1f} GB of a process ({device}): "
        f"{'fits' if fits else 'does not fit'}. Activations are an estimate; the rest follows from the model's shapes."
    )
    for line in [] if fits else ways_out(config, model, fsdp, shards, memory, checkpointing=checkpointing):
        console.print(f"  {line}")
    return 0 if fits else 1


def measure(config: TrainConfig, description: ModelDescription) -> Model:
    """Return the model's sizes from its config alone. The model is built on the meta device."""
    model: nn.Module = build_model(config.model_copy(update={"use_qlora": False}), description, meta=True)
    adapted = wants_adapters(config)
    total = trained = 0
    weight_bytes = 0.0
    for parameter in model.parameters():
        count = parameter.numel()
        total += count
        trained += count if parameter.requires_grad else 0
        weight_bytes += count * _bytes_of(parameter, config, adapted=adapted)
    layers = layers_of(model)
    sizes = [sum(one.numel() for one in layer.parameters()) for layer in layers]
    widest = max((one.shape[0] for layer in layers for one in layer.parameters() if one.ndim == 2), default=0)
    compute = 4 if config.mixed_precision in ("no", "auto") and config.torch_dtype == "float32" else 2
    return Model(
        total, trained, weight_bytes, max(sizes, default=total) * compute, len(layers), description.hidden_dim, widest
    )


def predict(
    config: TrainConfig, model: Model, fsdp: FsdpConfig | None, shards: int, *, checkpointing: bool, budget: int
) -> dict[str, float]:
    """Return bytes per process by purpose."""
    # Fraction of the sharded tensors on this device; with offload they are in host memory.
    held = 0.0 if fsdp is not None and fsdp.offload and shards > 1 else 1.0 / shards
    gradient = 2.0 if config.pure_dtype else 4.0
    # 2 bytes per value: 16-bit activations.
    per_token = 2.0 * (KEPT_PER_HIDDEN * model.hidden + 3 * model.inner)
    # With recomputation one layer's activations exist at a time, plus the input of every layer.
    layers = 1 if checkpointing else model.num_layers
    boundary = 2.0 * model.hidden * model.num_layers if checkpointing else 0.0
    return {
        "weights": model.weight_bytes * held,
        "gradients": model.trained * gradient * held,
        "optimizer": model.trained * OPTIMIZER_BYTES[config.optim] * held,
        # twice: the next layer is prefetched while one computes
        "gathered layers": 2 * model.layer_bytes if shards > 1 else 0.0,
        "activations": budget * (layers * per_token + boundary),
        # float32 rows of all ranks after the gather
        "embeddings and loss": 4.0 * 4 * config.batch_size * shards * model.hidden + 64 * 2**20,
    }


def ways_out(
    config: TrainConfig, model: Model, fsdp: FsdpConfig | None, shards: int, memory: int, *, checkpointing: bool
) -> list[str]:
    """Return settings that would fit, the cheapest first."""

    def need(*, recomputed: bool, tokens: int) -> float:
        return sum(predict(config, model, fsdp, shards, checkpointing=recomputed, budget=tokens).values())

    for recomputed in (checkpointing, True):
        for budget in BUDGETS:
            if need(recomputed=recomputed, tokens=budget) <= FITS * memory:
                more = "" if recomputed == checkpointing else "gradient_checkpointing: true, "
                return [f"fits with {more}micro_batch_tokens: {budget}"]
    lines = ["no micro-batch is small enough: the weights, gradients and optimizer alone exceed the memory"]
    if not config.use_lora and not config.use_qlora:
        lines.append("use_lora: true (gradients and optimizer of the adapters only)")
    if shards == 1:
        lines.append("use_fsdp: true on several processes (everything is divided by their number)")
    if not config.use_qlora:
        lines.append("use_qlora: true (frozen weights in 4 bits)")
    if fsdp is None or not fsdp.offload:
        lines.append("use_fsdp: true with fsdp_offload_params: true (weights and optimizer in host memory, slower)")
    return lines


def _bytes_of(parameter: nn.Parameter, config: TrainConfig, *, adapted: bool) -> float:
    if config.use_qlora and not parameter.requires_grad and parameter.ndim == 2:
        # half a byte, and the scales of the quantisation blocks
        return 0.55
    if parameter.requires_grad and not config.pure_dtype:
        return 4.0
    return 2.0 if adapted and config.torch_dtype != "float32" else float(parameter.element_size())


def _table(parts: dict[str, float], model: Model, shards: int, world_size: int) -> Table:
    table = Table(title="memory of each process", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("GB", justify="right")
    for name, count in parts.items():
        table.add_row(name, f"{count / GIB:.2f}")
    table.add_row("", "")
    table.add_row("parameters", f"{model.total:,d}")
    table.add_row("trained", f"{model.trained:,d}")
    table.add_row("processes, shards", f"{world_size}, {shards}")
    return table
