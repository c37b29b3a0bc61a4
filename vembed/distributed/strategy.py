"""Choice of the strategy (single, ddp or fsdp), with its reason, from the config and the memory of a process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from vembed.config.fsdp import FsdpConfig, chosen_strategy
from vembed.config.schema import TrainConfig
from vembed.distributed.environment import RankInfo
from vembed.errors import UserError
from vembed.families import backbones
from vembed.families.model_files import model_folder, read_sentence_transformers

Strategy = Literal["single", "ddp", "fsdp"]

FITS_SHARE = 0.5
"""Weights, gradients and optimizer may take this share of the memory before `auto` shards them: the rest is for
activations, gathered embeddings and the data."""
POINTLESS_SHARE = 0.2
"""Below this share, requested FSDP gets a remark in the log."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy with its reason and advice for the log."""

    strategy: Strategy
    reason: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that training one copy of the model needs, and memory that a process has."""

    num_parameters: int
    model_bytes: int
    device_bytes: int

    @property
    def share(self) -> float:
        """Fraction of the memory of a process."""
        return self.model_bytes / self.device_bytes

    @property
    def is_small(self) -> bool:
        """True if the model is too small to benefit from sharding."""
        return self.share < POINTLESS_SHARE

    def __str__(self) -> str:
        return (
            f"{self.num_parameters:,d} parameters need {self.model_bytes / GIB:.2f}GB for weights, gradients and "
            f"optimizer, {self.share:.0%} of the {self.device_bytes / GIB:.1f}GB of a process"
        )


def choose_strategy(config: TrainConfig, fsdp: FsdpConfig | None, rank_info: RankInfo, device: torch.device) -> Choice:
    """Return the strategy with its reason. `fsdp`: resolved FSDP settings; None if the config excludes FSDP."""
    asked = chosen_strategy(config, os.environ)
    if rank_info.world_size == 1:
        if asked == "fsdp":
            return Choice(
                "single", "FSDP was asked for, but one process has nobody to shard with: the model stays whole"
            )
        return Choice("single", "one process")
    if asked == "single":
        raise UserError(
            f"strategy: single, but {rank_info.world_size} processes were started: start one, or use strategy: ddp."
        )
    if asked == "ddp":
        return Choice("ddp", "asked for")
    need = estimate_need(config, rank_info, device)
    if asked == "fsdp":
        advice = f"FSDP is not needed here: {need}; strategy: ddp would be faster" if need.is_small else None
        return Choice("fsdp", f"asked for, with the options of {fsdp.source if fsdp else 'the config'}", advice)
    if need.share > FITS_SHARE:
        return Choice("fsdp", f"auto: {need}, more than {FITS_SHARE:.0%}")
    return Choice("ddp", f"auto: {need}, so each process can hold a copy")


def estimate_need(config: TrainConfig, rank_info: RankInfo, device: torch.device) -> Need:
    """Return the memory for a copy of the model with gradients and optimizer state, without loading its weights."""
    num_parameters = sum(
        count_parameters(name, config) for name in (config.model_name, config.image_model_name) if name is not None
    )
    # Bytes per parameter: weight, gradient and optimizer state. Adapters are too small to count.
    if config.use_qlora:
        per_parameter = 0.6  # 4 bits and the quantisation tables
    elif config.use_lora:
        per_parameter = 4.0 if config.torch_dtype == "float32" else 2.0
    else:
        weight = 2.0 if config.pure_dtype and config.torch_dtype in ("bfloat16", "float16") else 4.0
        state = {"adamw": 8.0, "adamw_8bit": 2.0, "paged_adamw_8bit": 2.0, "adafactor": 0.1, "sgd": 4.0}[config.optim]
        per_parameter = 2 * weight + state
    return Need(num_parameters, int(num_parameters * per_parameter), memory_of_a_process(rank_info, device))


def count_parameters(model_name: str, config: TrainConfig) -> int:
    """Return the number of parameters of a model, without reading its weights."""
    folder = model_folder(model_name, config.model_revision)
    files = read_sentence_transformers(folder)
    backbone = files.backbone if files is not None else folder
    model_config = backbones.read_config(backbone, trust_remote_code=config.trust_remote_code)
    kind = backbones.model_class(model_config, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model = kind(model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def memory_of_a_process(rank_info: RankInfo, device: torch.device) -> int:
    """Return the bytes of the process's GPU, or its part of the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total // rank_info.local_world_size
