"""Building a model: the backbone of the described files (config, dtype, attention, weights), adapters, pooling, head,
and what of it is trained."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vembed.config.schema import AdapterSection, ModelSection, ObjectiveSection
from vembed.errors import UserError
from vembed.models import attention, precision, vision
from vembed.models.adapters import add_adapters, merge_saved_adapter
from vembed.models.custom.modeling import OwnConfig
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import (
    ENCODER_ONLY,
    file_dtype,
    is_never_used,
    layers_of,
    linear_names_inside_layers,
    model_class,
    quiet_transformers,
    read_config,
)
from vembed.models.families.description import (
    DESCRIPTION_FILE,
    ModelDescription,
    describe,
)
from vembed.models.families.model_files import (
    LIBRARY_ERRORS,
    check_whole_weights,
    first_sentence,
)
from vembed.models.heads import (
    Dense,
    Head,
    LanguageHead,
    build_score_head,
    has_language_head,
    load_dense,
    whole_class_of,
)
from vembed.models.poolings.table import POOLINGS
from vembed.models.precision import (
    four_bit,
    keep_trainable_layout,
    round_weights,
    rounded_to_four_bits,
)
from vembed.models.towers import (
    TwoTowers,
    freeze_unused,
    frozen_towers,
    names_frozen_by,
    tower_module,
)
from vembed.saving.checksums import check_weights

log = logging.getLogger(__name__)

WholeClass = Callable[[PretrainedConfig], type[PreTrainedModel]]
"""The class of a model with its head, by the model's config."""


def build_model(
    description: ModelDescription,
    options: ModelSection,
    adapters: AdapterSection | None = None,
    *,
    objective: ObjectiveSection | None = None,
    seed: int = 42,
    device: torch.device | str = "cpu",
    computes_on: torch.device | None = None,
    compute_dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    compiles: bool | None = None,
    meta: bool = False,
    for_inference: bool = False,
) -> EmbeddingModel:
    """Return the described model, with its weights, on `device`.

    `objective`: the loss, which may need a language-model head. `seed`: of new weights.

    `computes_on`: the device that the model will be moved to, if not `device`. `compute_dtype`: dtype of the
    arithmetic. `recompute`: recompute activations in the backward pass (gradient checkpointing). `compiles`: compile
    the layers; None: only if the config asks for it. `meta`: leave backbone parameters empty, for a process that
    receives its weights from another rank. `for_inference`: it is not trained, and needs no float32 master weights.
    """
    device = torch.device(device)
    computes_on = computes_on or device
    adapters = adapters or AdapterSection()
    keeps_masters = not for_inference and options.torch_dtype != "pure_bfloat16"
    has_language = objective is not None and has_language_head(objective, description)
    with torch.random.fork_rng(devices=[]):
        # New weights depend on the seed only, not on earlier draws.
        torch.manual_seed(seed)
        whole_class = None
        if has_language or description.scores is not None:
            whole_class = partial(whole_class_of, description)
        whole: Any = build_backbone(
            description,
            options,
            adapters,
            computes_on,
            # Quantisation to 4 bits needs the values, so its layers cannot be built empty.
            meta=meta and not adapters.use_qlora,
            compute_dtype=compute_dtype,
            whole_class=whole_class,
            keeps_masters=keeps_masters,
        )
        backbone: nn.Module = whole if whole_class is None else whole.base_model
        score_head = None
        if description.scores is not None:
            score_head = build_score_head(description, whole)
        language_head = None
        if has_language:
            language_head = LanguageHead(
                whole, description, from_scratch=options.from_scratch
            )
        if adapters.use_lora:
            add_adapters(backbone, description.traits, adapters, options)
            keep_trainable_layout(backbone)
        if adapters.quantize_weights == "int8":
            round_weights(backbone)
        pooling = None
        declared = POOLINGS.get(description.pooling)
        if declared is not None and declared.is_trained:
            pooling = declared.build(description.token_dim)
            folder = description.pooling_folder
            if folder is not None:
                check_weights(folder)
                pooling.load_state_dict(load_file(folder / "model.safetensors"))
        # The model's own Dense modules, then this run's MRL projection.
        modules = [load_dense(folder) for folder in description.dense]
        if description.adds_projection:
            size = description.hidden_dim
            if modules:
                size = modules[-1].linear.out_features
            projection = Dense(size, description.embedding_dim)
            # The first rows of the identity: plain truncation.
            nn.init.eye_(projection.linear.weight)
            modules.append(projection)
    if language_head is not None and adapters.use_lora and not language_head.is_new:
        # As all weights but the adapters.
        language_head.requires_grad_(False)
    model = EmbeddingModel(
        description,
        backbone,
        score_head or (Head(*modules) if modules else None),
        pooling=pooling,
        scale_and_bias=scale_and_bias(description),
        language_head=language_head,
    )
    freeze_unused(
        backbone, description.traits, description.image_pooling or description.pooling
    )
    if not adapters.use_lora:
        # Adapters keep out of frozen parts, and freeze all others themselves.
        for name in names_frozen_by(backbone, description.traits, adapters.freeze):
            backbone.get_parameter(name).requires_grad = False
        cast_frozen_towers(description, options, adapters.freeze, backbone)
    if keeps_masters:
        # Also frozen ones, whose file may hold 16 bits.
        for head_module in model.heads():
            head_module.float()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"freeze: {adapters.freeze} leaves nothing of {options.model_name} to train; freeze less of it"
        )
    # After the weights are in place: only the class of dropout modules changes. Attention is chosen at loading.
    for module in backbone.modules() if computes_on.type == "cpu" else ():
        if type(module) is nn.Dropout and module.p > 0.0:
            module.__class__ = attention.CpuDropout
    # Checkpointing first, so that the compiler sees the checkpointed layers.
    layers = layers_of(backbone)
    if recompute:
        precision.enable_checkpointing(layers)
    wants_compiled = options.torch_compile is True if compiles is None else compiles
    # The compiler gives up on a checkpointed layer that calls attention as it is, which packed texts do.
    if wants_compiled and not (recompute and model.packs_texts()):
        attention.register(attention.PACKED_ATTENTION, compiled_layers=True)
        precision.compile_layers(layers)
    return model if meta else model.to(device)


def load_embedder(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    computes_on: torch.device | None = None,
    meta: bool = False,
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    trust_remote_code: bool = False,
) -> EmbeddingModel:
    """A saved model, ready for use: in evaluation mode, nothing trainable, by default in the dtype of its file.
    `computes_on` and `meta`: as in `build_model`, for a model that will be sharded."""
    options = ModelSection(
        model_name=str(directory),
        torch_dtype=torch_dtype,
        trust_remote_code=trust_remote_code,
    )
    model = build_model(
        describe(options, for_inference=True),
        options,
        device=device,
        computes_on=computes_on,
        meta=meta,
        for_inference=True,
    )
    return model.eval().requires_grad_(False)


def build_backbone(
    description: ModelDescription,
    options: ModelSection,
    adapters: AdapterSection,
    device: torch.device,
    *,
    meta: bool,
    compute_dtype: torch.dtype = torch.float32,
    whole_class: WholeClass | None = None,
    keeps_masters: bool = True,
) -> nn.Module:
    """Return the backbone with its weights. `meta`: empty parameters. `device`, `compute_dtype`: where and in which
    dtype it will compute. `whole_class`: class of the model with a head, whose base model is the backbone.
    `keeps_masters`: trained weights are float32, whatever `torch_dtype` says."""
    load = partial(
        _load,
        description,
        options,
        adapters,
        device=device,
        compute_dtype=compute_dtype,
        meta=meta,
        keeps_masters=keeps_masters,
    )
    folder = Path(description.source)
    whole: nn.Module = load(folder, whole_class=whole_class)
    text: Any = whole if whole_class is None else whole.base_model
    if description.adapter is not None and not meta:
        if description.quantized:
            # The adapter has learnt over the rounded weights, and makes up for their errors.
            with torch.no_grad():
                for name in linear_names_inside_layers(text):
                    weight: Any = text.get_submodule(name).weight
                    weight.copy_(rounded_to_four_bits(weight))
        merge_saved_adapter(text, Path(description.adapter))
    if not description.traits.has_two_models:
        return whole
    assert description.image_source is not None
    towers = TwoTowers(text, load(Path(description.image_source)), description)
    if (folder / DESCRIPTION_FILE).is_file():
        towers.load_projections(folder)
    return towers


def empty_backbone(description: ModelDescription) -> nn.Module:
    """Return the backbone without values, adapters or 4-bit layers: class and settings, for writing files."""
    options = ModelSection(model_name=description.name)
    cpu = torch.device("cpu")
    return build_backbone(description, options, AdapterSection(), cpu, meta=True)


def _load(
    description: ModelDescription,
    options: ModelSection,
    adapters: AdapterSection,
    folder: Path,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    meta: bool,
    keeps_masters: bool,
    whole_class: WholeClass | None = None,
) -> PreTrainedModel:
    """Return the model of one folder: its dtype, its attention, then its weights."""
    trust = description.trust_remote_code
    config = read_config(folder, trust_remote_code=trust)
    if config.model_type == "vit_mae":
        # Pre-training masks random patches. An embedding must see all of them.
        config.mask_ratio = 0.0
    if config.model_type == "dinov3_vit":
        # Pre-training moves positions at random. Embeddings must be deterministic.
        config.pos_embed_shift = None
        config.pos_embed_jitter = None
        config.pos_embed_rescale = None
    if description.bidirectional_attention:
        config.get_text_config().is_causal = False
    base_class = model_class(config, trust_remote_code=trust)
    reads_text = base_class.main_input_name != "pixel_values"
    is_own = isinstance(config, OwnConfig)
    # Trained weights are float32 masters. With adapters the backbone is frozen: no optimizer step needs masters of it.
    dtype: torch.dtype | None = torch.float32
    if adapters.use_lora or not keeps_masters:
        dtype = precision.DTYPES.get(options.torch_dtype)
    # Attention in 16 bits: by autocast or FSDP's policy, or for weights of such a dtype.
    computed = {compute_dtype, dtype or file_dtype(config)}
    half = not computed.isdisjoint({torch.bfloat16, torch.float16})

    # ---- attention
    implementation = options.attn_implementation
    kernel, reason = attention.attention_kernel(
        implementation, base_class, device, half=half
    )
    padded = attention.why_padded(options, config, device, half=half)
    own_kernel = "the model's own"
    notes = [f"attention: {kernel or own_kernel} ({reason})"]
    if reads_text:
        if padded is not None and options.padding_free is True:
            raise UserError(
                f"padding_free: true is not possible: {padded}; leave it out, and texts are padded"
            )
        texts = "without padding" if padded is None else f"padded ({padded})"
        notes.append(f"texts: {texts}")
    if half and device.type == "cuda" and implementation in ("auto", "sdpa"):
        problem = attention.use_flash3(config.to_dict(), device)
        used = "used" if problem is None else f"not used ({problem})"
        notes.append(f"FlashAttention 3: {used}")
    if padded is None:
        kernel = attention.register(attention.PACKED_ATTENTION)
    elif kernel == "sdpa" and implementation == "auto" and device.type == "cpu":
        kernel = attention.register(attention.CPU_ATTENTION)

    # ---- weights
    built_class = base_class if whole_class is None else whole_class(config)
    has_weights = any(folder.glob("*.safetensors"))
    kernel_of_class = None if is_own else kernel
    if meta or options.from_scratch or (is_own and not has_weights):
        stored = dtype or (file_dtype(config) if meta else torch.float32)
        empty: Any = nullcontext()
        if meta:
            empty = init_empty_weights(include_buffers=False)
        else:
            log.info(
                "weights: random, drawn by the constructor of %s under the run's seed",
                built_class.__name__,
            )
        with empty:
            backbone = built_class._from_config(
                config, dtype=stored, attn_implementation=kernel_of_class
            )
    else:
        quantization = None
        if adapters.use_qlora:
            quantization = _four_bit(base_class, config, compute_dtype)
        backbone = _load_weights(
            folder,
            config,
            built_class,
            dtype=dtype or "auto",
            attn_implementation=kernel_of_class,
            quantization_config=quantization,
            # Weights are quantised on the device where they will be used, while they are read.
            device_map=None if quantization is None else {"": device},
        )
    if is_own and reads_text and padded is None:
        backbone.config._attn_implementation = kernel  # by which `packs` knows it
    if description.bidirectional_attention:
        # Also for kernels that apply causal attention without an explicit mask.
        for module in backbone.modules():
            if vars(module).get("is_causal") is True:
                vars(module)["is_causal"] = False
    reads_chats = description.traits.reads_chats
    if reads_chats and implementation == "auto" and kernel != "flash_attention_2":
        tower = tower_module(backbone.base_model, description.traits, "vision")
        by_image = vision.pack_images(tower, device, half=half)
        images = "attention over all at once"
        if by_image is not None:
            images = f"one by one ({by_image})"
        notes.append(f"images: {images}")
    if config.model_type in ENCODER_ONLY:
        # T5's embedding matrix is registered in two modules, which FSDP would shard as two parameters.
        backbone.set_input_embeddings(backbone.get_input_embeddings())
    for note in notes if not meta else ():
        log.info("%s", note)
    return backbone


def _load_weights(
    folder: Path,
    config: PretrainedConfig,
    built_class: type[PreTrainedModel],
    **options: Any,
) -> PreTrainedModel:
    """Return a model with the weights of a folder. Raise UserError unless all that an embedding depends on are there."""
    check_whole_weights(folder)
    check_weights(folder)
    try:
        with quiet_transformers():
            model, info = built_class.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except (*LIBRARY_ERRORS, SafetensorError) as error:
        raise UserError(
            f"the weights of {folder} cannot be loaded: {first_sentence(error)}"
        ) from error
    # A base model's folder may lack a language-model head, which is then new.
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    missing = [
        name
        for name in sorted(info["missing_keys"])
        if name.startswith(prefix) and not is_never_used(name)
    ]
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing):,d} of the weights of {built_class.__name__}, {missing[0]} among them; "
            "it is incomplete, or its config.json is that of another model"
        )
    unused = info["unexpected_keys"]
    if unused:
        log.info("ignored %d unused weights of %s", len(unused), folder)
    return cast(PreTrainedModel, model)


def _four_bit(
    base_class: type[PreTrainedModel],
    config: PretrainedConfig,
    compute_dtype: torch.dtype,
) -> BitsAndBytesConfig:
    """Return the 4-bit config for the linear layers inside the transformer layers; all others keep their dtype.

    FSDP gathers parameters in the compute dtype. Packed weights stored in another one would be converted and corrupted.
    """
    with torch.device("meta"):
        empty: nn.Module = base_class(config)
    inside = set(linear_names_inside_layers(empty))
    skip = []
    for name, module in empty.named_modules():
        if name in inside and isinstance(module, Conv1D):
            raise UserError(
                f"use_qlora: {base_class.__name__} stores its layers transposed, which 4 bits cannot; use use_lora"
            )
        if isinstance(module, nn.Linear) and name not in inside:
            skip.append(name)
    return four_bit(compute_dtype, skip)


def cast_frozen_towers(
    description: ModelDescription,
    options: ModelSection,
    freeze: Sequence[str],
    backbone: nn.Module,
) -> None:
    """Towers of which nothing is trained need no float32 masters. A tower that is trained in part keeps one dtype."""
    for tower in frozen_towers(backbone, description.traits):
        dtype = precision.DTYPES.get(options.torch_dtype)
        if dtype is None:
            folder = description.source
            if tower == "vision" and description.image_source is not None:
                folder = description.image_source
            trust = description.trust_remote_code
            dtype = file_dtype(read_config(Path(folder), trust_remote_code=trust))
        log.info("%s tower: frozen, held in %s", tower, dtype)
        tower_module(backbone, description.traits, tower).to(dtype)
    if not freeze or options.torch_dtype not in ("bfloat16", "float16"):
        return
    frozen = [value for value in backbone.parameters() if not value.requires_grad]
    if any(parameter.dtype == torch.float32 for parameter in frozen):
        log.info(
            "torch_dtype: %s is for whole frozen towers: frozen tensors of partly trained towers stay float32",
            options.torch_dtype,
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
    if "logit_scale" not in values:
        return None
    return math.exp(values["logit_scale"]), values["logit_bias"]
