"""Construction of the parts of an EmbeddingModel, each in the right dtype: backbone, head, scale and bias."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vembed.config.schema import AdapterSection, ModelSection
from vembed.errors import UserError
from vembed.models import (
    backbone_loading,
    cpu_kernels,
    packing,
    precision,
    vision,
)
from vembed.models.adapters import merge_saved_adapter, wants_adapters
from vembed.models.custom.modeling import OwnConfig
from vembed.models.families import backbones
from vembed.models.families.backbones import linear_names_inside_layers
from vembed.models.families.description import DESCRIPTION_FILE, ModelDescription
from vembed.models.heads import Dense, Head, load_dense, mrl_projection
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS
from vembed.models.quantized import four_bit, rounded_to_four_bits
from vembed.models.towers import TwoTowers, frozen_towers, tower_module

log = logging.getLogger(__name__)


def build_head(description: ModelDescription) -> Head | None:
    """Return the model's Dense modules followed by this run's MRL projection; None if there are neither."""
    modules: list[Dense] = [load_dense(folder) for folder in description.dense]
    size = modules[-1].linear.out_features if modules else description.hidden_dim
    added = None
    if description.adds_projection:
        added = mrl_projection(size, description.embedding_dim)
    return Head(modules, added) if modules or added is not None else None


def build_pooling(description: ModelDescription) -> nn.Module | None:
    """Return the module of a trained pooling with its weights; None for any other pooling."""
    if description.pooling == MODEL_POOLING:
        return None
    pooling = POOLINGS[description.pooling]
    if not pooling.is_trained:
        return None
    module = pooling.build(description.token_dim)
    if description.pooling_folder is not None:
        module.load_state_dict(
            load_file(description.pooling_folder / "model.safetensors")
        )
    return module


def build_backbone(
    description: ModelDescription,
    options: ModelSection,
    adapters: AdapterSection,
    device: torch.device,
    *,
    meta: bool,
    compute_dtype: torch.dtype = torch.float32,
    with_head: bool = False,
    keeps_masters: bool = True,
) -> nn.Module:
    """Return the backbone with its weights. `meta`: empty parameters. `device`, `compute_dtype`: where and in which
    dtype it will compute. `with_head`: the model with its language-model head, whose base model is the backbone.
    `keeps_masters`: trained weights are float32, whatever `torch_dtype` says."""
    folder = Path(description.source)
    whole: nn.Module = _load(
        description,
        options,
        adapters,
        folder,
        device,
        compute_dtype,
        meta=meta,
        with_head=with_head,
        keeps_masters=keeps_masters,
    )
    text: Any = whole.base_model if with_head else whole
    if description.adapter is not None and not meta:
        if description.quantized:
            # Its adapter has learnt over the rounded weights, and makes up for their errors.
            _round_layers(text)
        merge_saved_adapter(text, Path(description.adapter))
    if not description.traits.has_two_models:
        return whole
    assert description.image_source is not None
    assert (
        description.text_hidden_dim is not None
        and description.image_hidden_dim is not None
    )
    image = _load(
        description,
        options,
        adapters,
        Path(description.image_source),
        device,
        compute_dtype,
        meta=meta,
        keeps_masters=keeps_masters,
    )
    towers = TwoTowers(
        text,
        image,
        text_dim=description.text_hidden_dim,
        image_dim=description.image_hidden_dim,
        shared_dim=description.hidden_dim,
    )
    if (folder / DESCRIPTION_FILE).is_file():
        towers.load_projections(folder)
    return towers


def empty_backbone(description: ModelDescription) -> nn.Module:
    """Return the backbone without values, adapters or 4-bit layers: class and settings, for writing files."""
    return build_backbone(
        description,
        ModelSection(model_name=description.name),
        AdapterSection(),
        torch.device("cpu"),
        meta=True,
    )


def _load(
    description: ModelDescription,
    options: ModelSection,
    adapters: AdapterSection,
    folder: Path,
    device: torch.device,
    compute_dtype: torch.dtype,
    *,
    meta: bool,
    with_head: bool = False,
    keeps_masters: bool,
) -> PreTrainedModel:
    trust = description.trust_remote_code
    model_config = backbones.read_config(folder, trust_remote_code=trust)
    backbone_loading.adjust_config(
        model_config, bidirectional=description.bidirectional_attention
    )
    chosen = backbones.model_class(model_config, trust_remote_code=trust)
    adapted = wants_adapters(adapters)
    # With adapters the backbone is frozen: no optimizer step needs float32 masters of it.
    dtype = (
        torch.float32
        if keeps_masters and not adapted
        else precision.wanted_dtype(options)
    )
    held = backbones.file_dtype(model_config) if dtype == "auto" else dtype
    half = precision.is_half(compute_dtype, held)
    kernel, reason = precision.attention_kernel(
        options.attn_implementation, chosen, device, half=half
    )
    padded = packing.why_padded(options, model_config, device, half=half)
    takes_text = not backbones.takes_pixels(model_config, trust_remote_code=trust)
    if takes_text and padded is not None and options.padding_free is True:
        raise UserError(
            f"padding_free: true is not possible: {padded}; leave it out, and texts are padded"
        )
    if not meta:
        log.info("attention: %s (%s)", kernel or "the model's own", reason)
        if takes_text:
            log.info(
                "texts: %s",
                "without padding" if padded is None else f"padded ({padded})",
            )
    if (
        half
        and device.type == "cuda"
        and options.attn_implementation in ("auto", "sdpa")
    ):
        other = packing.why_no_flash3(model_config.to_dict(), device)
        if other is None:
            packing.use_flash3()
        log.info(
            "FlashAttention 3: %s", "used" if other is None else f"not used ({other})"
        )
    if padded is None:
        kernel = cpu_kernels.register(packing.IMPLEMENTATION, packing.attention)
    elif (
        kernel == "sdpa"
        and options.attn_implementation == "auto"
        and device.type == "cpu"
    ):
        kernel = cpu_kernels.register(cpu_kernels.IMPLEMENTATION, cpu_kernels.attention)
    backbone = backbone_loading.load_backbone(
        folder,
        model_config,
        dtype=dtype,
        quantization=_four_bit(chosen, model_config, compute_dtype)
        if adapters.use_qlora
        else None,
        device=device,
        attn_implementation=None if isinstance(model_config, OwnConfig) else kernel,
        trust_remote_code=trust,
        meta=meta,
        from_scratch=options.from_scratch,
        with_head=with_head,
    )
    if isinstance(model_config, OwnConfig) and takes_text and padded is None:
        backbone.config._attn_implementation = kernel  # by which `packs` knows it
    if description.bidirectional_attention:
        backbone_loading.see_all_tokens(backbone)
    if (
        description.traits.reads_chats
        and options.attn_implementation == "auto"
        and kernel != "flash_attention_2"
    ):
        tower = tower_module(backbone, description.traits, "vision")
        padded = vision.why_by_image(tower, device, half=half)
        if padded is None:
            vision.pack_images(tower)
        if not meta:
            log.info(
                "images: %s",
                "attention over all at once"
                if padded is None
                else f"one by one ({padded})",
            )
    backbone_loading.share_embeddings(backbone)
    return backbone


def _four_bit(
    chosen: type[PreTrainedModel],
    model_config: PretrainedConfig,
    compute_dtype: torch.dtype,
) -> BitsAndBytesConfig:
    """Return the 4-bit config for the linear layers inside the transformer layers; all others keep their dtype.

    FSDP gathers parameters in the compute dtype. Packed weights stored in another one would be converted and corrupted.
    """
    with torch.device("meta"):
        empty: nn.Module = chosen(model_config)
    inside = set(linear_names_inside_layers(empty))
    if any(isinstance(empty.get_submodule(name), Conv1D) for name in inside):
        raise UserError(
            f"use_qlora: {chosen.__name__} stores its layers transposed, which 4 bits cannot; use use_lora"
        )
    skip = [
        name
        for name, module in empty.named_modules()
        if isinstance(module, nn.Linear) and name not in inside
    ]
    return four_bit(compute_dtype, skip)


def _round_layers(backbone: nn.Module) -> None:
    with torch.no_grad():
        for name in linear_names_inside_layers(backbone):
            weight: Any = backbone.get_submodule(name).weight
            weight.copy_(rounded_to_four_bits(weight))


def cast_frozen_towers(
    description: ModelDescription,
    options: ModelSection,
    freeze: Sequence[str],
    backbone: nn.Module,
) -> None:
    """Towers of which nothing is trained need no float32 masters. A tower that is trained in part keeps one dtype."""
    for tower in frozen_towers(backbone, description.traits):
        folder = (
            description.image_source
            if tower == "vision" and description.image_source
            else description.source
        )
        file_dtype = backbones.file_dtype(
            backbones.read_config(
                Path(folder), trust_remote_code=description.trust_remote_code
            )
        )
        dtype = precision.frozen_dtype(options, file_dtype)
        log.info("%s tower: frozen, held in %s", tower, dtype)
        tower_module(backbone, description.traits, tower).to(dtype)
    partly = [
        parameter
        for parameter in backbone.parameters()
        if not parameter.requires_grad and parameter.dtype == torch.float32
    ]
    if options.torch_dtype in ("bfloat16", "float16") and freeze and partly:
        log.info(
            "torch_dtype: %s is for whole frozen towers: %d frozen tensors of partly trained towers stay float32",
            options.torch_dtype,
            len(partly),
        )


def scale_and_bias(description: ModelDescription) -> tuple[float, float] | None:
    """Return the scale and bias that CLIP or SigLIP was trained with, read from the weight files.

    The model's own parameters may be empty (meta) or sharded.
    """
    if not description.traits.has_scale_and_bias:
        return None
    values = {"logit_bias": 0.0}
    for path in sorted(Path(description.source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in {"logit_scale", "logit_bias"} & set(file.keys()):
                values[name] = float(file.get_tensor(name))
    return (
        (math.exp(values["logit_scale"]), values["logit_bias"])
        if "logit_scale" in values
        else None
    )
