"""Building a model: backbone (config, dtype, attention, weights), adapters, pooling and head, and which of its parameters
are trained."""

import logging
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from vembed.config.schema import AdapterSection, ModelSection, ObjectiveSection
from vembed.config.values import ModelDtype
from vembed.errors import UserError
from vembed.files import check_weights, read_yaml
from vembed.losses.table import LOSSES
from vembed.models import attention, precision, vision
from vembed.models.adapters import add_adapters, fuse_adapters, merge_saved_adapter
from vembed.models.custom.modeling import UserModelConfig
from vembed.models.embedding_model import (
    REPLACED_BY_LOSS,
    ComposedModel,
    EmbeddingModel,
    freeze_unused,
    frozen_towers,
    names_frozen_by,
    tower_module,
)
from vembed.models.families.backbones import (
    ENCODER_ONLY,
    file_dtype,
    is_decoder_only,
    is_never_used,
    layers_of,
    linear_names_inside_layers,
    model_class,
    quiet_transformers,
)
from vembed.models.families.description import (
    DESCRIPTION_FILE,
    ModelDescription,
    describe,
)
from vembed.models.families.model_files import (
    LIBRARY_ERRORS,
    check_whole_weights,
    error_sentence,
    is_own,
)
from vembed.models.heads import (
    MASKED_TOKEN,
    NEXT_TOKEN,
    Dense,
    LanguageHead,
    build_score_head,
    choose_class_with_head,
    load_dense,
)
from vembed.models.poolings.table import POOLINGS
from vembed.models.precision import (
    keep_trainable_layout,
    round_weights,
    rounded_to_four_bits,
)

log = logging.getLogger(__name__)


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
    compiles: bool = False,
    meta: bool = False,
    for_inference: bool = False,
) -> EmbeddingModel:
    """Return the described model, with its weights, on `device`.

    `objective`: the loss, which may need a language-model head. `seed`: of new weights.

    `computes_on`: the device that the model will be moved to, if not `device`. `compute_dtype`: dtype of the
    arithmetic. `recompute`: recompute activations in the backward pass (gradient checkpointing). `compiles`: compile
    the layers. `meta`: leave backbone parameters empty (meta device), for a process
    that receives its weights from another rank. `for_inference`: it is not trained, and needs no float32 master weights.

    The order matters: adapters wrap the loaded layers, freezing looks at all parameters, checkpointing and the compiler
    wrap what is left.
    """
    device = torch.device(device)
    computes_on = computes_on or device
    adapters = adapters or AdapterSection()
    keeps_masters = not for_inference and options.torch_dtype != "pure_bfloat16"
    has_language = objective is not None and has_language_head(objective, description)
    with torch.random.fork_rng(devices=[]):
        # New weights depend on the seed only, not on earlier draws.
        torch.manual_seed(seed)
        whole: Any = build_backbone(
            description,
            options,
            adapters,
            computes_on,
            # Quantisation to 4 bits needs the values, so its layers cannot be built empty.
            meta=meta and not adapters.use_qlora,
            compute_dtype=compute_dtype,
            has_head=has_language or description.is_reranker,
            keeps_masters=keeps_masters,
        )
        backbone: nn.Module = whole
        head: nn.Module | None = None
        language_head = None
        if description.is_reranker:
            backbone = whole.base_model
            head = build_score_head(description, whole)
        elif has_language:
            backbone = whole.base_model
            language_head = LanguageHead(
                whole, description, from_scratch=options.from_scratch
            )
        if adapters.use_lora:
            add_adapters(backbone, description, adapters, options)
            keep_trainable_layout(backbone)
        if adapters.quantize_weights == "int8":
            round_weights(backbone)
        pooling, dense_modules = _modules_behind_tower(description)
    if language_head is not None and adapters.use_lora and not language_head.is_new:
        # Like all pretrained weights of a LoRA run.
        language_head.requires_grad_(False)
    if head is None and dense_modules:
        head = nn.Sequential(*dense_modules)
    model = EmbeddingModel(
        description, backbone, head, pooling=pooling, language_head=language_head
    )
    freeze_unused(backbone)
    if not adapters.use_lora:
        # With LoRA `add_adapters` has done this: no adapter in a frozen part, and all weights but the adapters frozen.
        if adapters.freeze:
            names = names_frozen_by(
                backbone, description.family_traits, adapters.freeze
            )
            for name in names:
                backbone.get_parameter(name).requires_grad = False
        _cast_frozen_towers(description, options, backbone)
    if keeps_masters:
        # Frozen heads too, even if their file holds 16 bits (see `EmbeddingModel.modules_behind_towers`).
        for head_module in model.modules_behind_towers().values():
            head_module.float()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"freeze: {adapters.freeze} leaves nothing of {options.model_name} to train; freeze less of it"
        )
    if computes_on.type == "cpu":
        # In place: names, weights and wrappers of the modules stay, only the class changes.
        for module in backbone.modules():
            if type(module) is nn.Dropout and module.p > 0.0:
                module.__class__ = attention.CpuDropout
    if computes_on.type == "cuda" and not compiles:
        # The compiler fuses the plain formulas.
        precision.fuse_norms(backbone)
        attention.fuse_rotary_positions(backbone)
        if adapters.use_lora:
            fuse_adapters(backbone)
        if description.family_traits.is_vision_language:
            # Without reading from the device where images are.
            language_model: Any = tower_module(
                backbone, description.family_traits, "text"
            )
            if "_deepstack_process" in vars(type(language_model)):
                vars(language_model)["_deepstack_process"] = vision.add_at_images
    layers = layers_of(backbone)
    if compiles:
        # Packed texts call attention outside of the compiled graph (torch.compiler.disable).
        attention.register(attention.PACKED_ATTENTION, compiled_layers=True)
        precision.compile_layers(layers)
    if recompute:
        precision.enable_checkpointing(layers)
    return model if meta else model.to(device)


def _modules_behind_tower(
    description: ModelDescription,
) -> tuple[nn.Module | None, list[Dense]]:
    """Return a trained pooling, and the model's own Dense modules with this run's MRL projection behind them."""
    pooling = None
    # None for the model's own pooling.
    kind = POOLINGS.get(description.pooling)
    if kind is not None and kind.is_trained:
        pooling = kind.build(description.token_dim)
        folder = description.pooling_folder
        if folder is not None:
            check_weights(folder)
            pooling.load_state_dict(load_file(folder / "model.safetensors"))
    dense_modules = [load_dense(folder) for folder in description.dense]
    if description.adds_projection:
        size = description.hidden_dim
        if dense_modules:
            size = dense_modules[-1].linear.out_features
        projection = Dense(size, description.embedding_dim)
        # The first rows of the identity, [embedding_dim, size]: at the start it only truncates.
        nn.init.eye_(projection.linear.weight)
        dense_modules.append(projection)
    return pooling, dense_modules


def has_language_head(
    objective: ObjectiveSection, description: ModelDescription
) -> bool:
    """Return True if the run trains by the language-model head. Raise UserError if it asks for what cannot be."""
    alone = objective.losses is None and LOSSES[objective.loss].is_of_model
    is_own_model = is_own(description.folder)
    names = {NEXT_TOKEN, MASKED_TOKEN}.intersection(objective.auxiliary_losses or {})
    has_weight = bool(names) and not is_own_model
    if not alone and not has_weight:
        return False
    is_possible = (
        not description.is_reranker
        and not is_own_model
        and description.family_traits.reads_only_text
        and not description.family_traits.is_composed
        # Each token would see the next one, which it would predict.
        and not description.bidirectional_attention
        and not description.quantized
    )
    # Tokens that are hidden from an encoder would be hidden from another loss too.
    is_possible &= alone or is_decoder_only(description.read_config())
    if has_weight and not is_possible:
        raise UserError(
            f"auxiliary_losses: {names.pop()} is not possible with {description.name}: it is for text models with causal "
            "attention, and for encoders with loss: none, without use_qlora; leave it out"
        )
    return is_possible


def is_embedding_model(folder: Path) -> bool:
    """Return whether a folder is that of an embedding model: it names a pooling, and has learned from pairs."""
    # A run of vembed by the model's auxiliary losses (such as one on the next token) writes the same layout.
    config_path = folder.parent / "config.yaml"
    if folder.name == "final" and config_path.is_file():
        options = read_yaml(config_path)
        loss = LOSSES.get(str(options.get("loss")))
        if loss is not None and loss.is_of_model and not options.get("losses"):
            return False
    return any((place / "modules.json").is_file() for place in (folder, folder.parent))


def has_initial_norms(model: nn.Module) -> bool:
    """Return whether every norm has its initial weights, ones and zeros, which no trained model has."""
    has_norms = False
    for module in model.modules():
        if "Norm" not in type(module).__name__:
            continue
        for name, weight in module.named_parameters(recurse=False):
            has_norms = True
            initial = 0.0 if name == "bias" else 1.0
            if not bool((weight == initial).all()):
                return False
    return has_norms


def load_embedder(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    computes_on: torch.device | None = None,
    meta: bool = False,
    torch_dtype: ModelDtype = "auto",
    trust_remote_code: bool = False,
) -> EmbeddingModel:
    """Load a saved model for inference: in evaluation mode, without gradients, by default in the dtype of its file.

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
    has_head: bool = False,
    **precisions: Any,
) -> nn.Module:
    """Return the backbone with its weights. `meta`: empty parameters. `has_head`: return the model with a head, whose base
    model is the backbone. `device`, `precisions`: where and how it will compute (see `_load`)."""
    folder = description.folder
    load = partial(
        _load, description, options, adapters, device, meta=meta, **precisions
    )
    whole: nn.Module = load(folder=folder, has_head=has_head)
    text: Any = whole.base_model if has_head else whole
    if description.adapter is not None and not meta:
        if description.quantized:
            # The adapter was trained on top of 4-bit weights and corrects their rounding errors. So the weights are
            # rounded before it is merged.
            with torch.no_grad():
                for name in linear_names_inside_layers(text):
                    weight: Any = text.get_submodule(name).weight
                    weight.copy_(rounded_to_four_bits(weight))
        merge_saved_adapter(text, description.adapter)
    if not description.family_traits.is_composed:
        return whole
    image_tower = load(folder=description.image_folder)
    towers = ComposedModel(text, image_tower, description)
    if (folder / DESCRIPTION_FILE).is_file():
        towers.load_projections(folder)
    return towers


def empty_backbone(description: ModelDescription) -> nn.Module:
    """Return the backbone on the meta device, without adapters or 4-bit layers. Saving uses its class and its config."""
    options = ModelSection(model_name=description.name)
    cpu = torch.device("cpu")
    return build_backbone(description, options, AdapterSection(), cpu, meta=True)


def _load(
    description: ModelDescription,
    options: ModelSection,
    adapters: AdapterSection,
    device: torch.device,
    *,
    folder: Path,
    meta: bool,
    compute_dtype: torch.dtype = torch.float32,
    keeps_masters: bool = True,
    has_head: bool = False,
) -> Any:
    """Return the Transformers model of one folder.

    Dtype first, then attention, which depends on it, then the weights, which are loaded with both. Log the choices.
    `compute_dtype`: of the arithmetic. `keeps_masters`: trained weights are float32 (master weights), whatever
    `torch_dtype` says.
    """
    config = description.read_config(folder)
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
    base_class = model_class(config, trust_remote_code=description.trust_remote_code)
    reads_text = base_class.main_input_name != "pixel_values"
    is_own = isinstance(config, UserModelConfig)
    # Trained weights are float32 masters. With adapters the backbone is frozen: no optimizer step needs masters of it.
    # None: the dtype of the files.
    dtype: torch.dtype | None = torch.float32
    if adapters.use_lora or not keeps_masters:
        dtype = precision.DTYPES.get(options.torch_dtype)
    # Attention computes in 16 bits if autocast or FSDP's policy says so (compute_dtype), or the weights are in 16 bits.
    weight_dtype = dtype or file_dtype(config)
    half_dtypes = {torch.bfloat16, torch.float16}
    half = compute_dtype in half_dtypes or weight_dtype in half_dtypes

    # ---- attention
    implementation = options.attn_implementation
    kernel, reason = attention.attention_kernel(
        implementation, base_class, device, half=half
    )
    # None: texts are packed.
    why_padded = attention.why_padded(options, config, device, half=half)
    # Where the parameters are empty, the process that reads them says it.
    level = logging.DEBUG if meta else logging.INFO
    log.log(level, "attention: %s (%s)", kernel or "the model's own", reason)
    if reads_text:
        if why_padded is not None and options.padding_free is True:
            raise UserError(
                f"padding_free: true is not possible: {why_padded}; leave it out, and texts are padded"
            )
        texts = f"padded ({why_padded})" if why_padded else "without padding"
        log.log(level, "texts: %s", texts)
        if config.model_type in attention.READ_PADDING and not meta:
            log.warning(
                "%s reads padding: embeddings and losses depend on the longest text of a micro-batch, and so on "
                "micro_batch_tokens and the number of processes; micro_batch_tokens: 1 runs each text alone",
                config.model_type,
            )
    # The attention of vembed takes the kernel's place, and calls it or its own (vembed.models.attention).
    if why_padded is None:
        kernel = attention.register(attention.PACKED_ATTENTION)
    elif (
        kernel == "sdpa"
        and implementation == "auto"
        and attention.takes_registered(base_class)
    ):
        kernel = attention.register(attention.PADDED_ATTENTION)

    # ---- weights
    built_class = base_class
    if has_head:
        built_class = choose_class_with_head(description, config)
    has_weights = any(folder.glob("*.safetensors"))
    kernel_of_class = None if is_own else kernel
    if meta or options.from_scratch or (is_own and not has_weights):
        # Random weights start in float32. Empty ones get the dtype of the files, which rank 0 reads.
        with init_empty_weights(include_buffers=False) if meta else nullcontext():
            backbone = built_class._from_config(
                config,
                dtype=weight_dtype if meta else dtype or torch.float32,
                attn_implementation=kernel_of_class,
            )
    else:
        quantization = None
        if adapters.use_qlora:
            with torch.device("meta"):
                empty = base_class(config)
            quantization = precision.four_bit(empty, compute_dtype)
        check_whole_weights(folder)
        check_weights(folder)
        try:
            with quiet_transformers():
                backbone, info = built_class.from_pretrained(
                    folder,
                    config=config,
                    use_safetensors=True,
                    output_loading_info=True,
                    dtype=dtype or "auto",
                    attn_implementation=kernel_of_class,
                    quantization_config=quantization,
                    # Weights are quantised on the device where they will be used, while they are read.
                    device_map=None if quantization is None else {"": device},
                )
        except torch.OutOfMemoryError:
            raise  # a RuntimeError too, but no fault of the files
        except (*LIBRARY_ERRORS, SafetensorError) as error:
            raise UserError(
                f"the weights of {folder} cannot be loaded: {error_sentence(error)}"
            ) from error
        # A base model's folder may lack a language-model head, which is then new.
        has_prefix = backbone.base_model is not backbone
        prefix = f"{backbone.base_model_prefix}." if has_prefix else ""
        missing = [
            name
            for name in sorted(info["missing_keys"])
            if name.startswith(prefix) and not is_never_used(name)
        ]
        if missing:
            raise UserError(
                f"{folder} lacks {len(missing):,d} of the weights of {built_class.__name__}, {missing[0]} among them; "
                "it is incomplete, or config.json, or model_arguments, is that of another model"
            )
    if is_own and reads_text and why_padded is None:
        # `takes_packed_texts` reads it. The class of the user's own takes no attn_implementation.
        backbone.config._attn_implementation = kernel
    if description.bidirectional_attention:
        # Also for kernels that apply causal attention without an explicit mask.
        for module in backbone.modules():
            if vars(module).get("is_causal") is True:
                vars(module)["is_causal"] = False
    is_vision_language = description.family_traits.is_vision_language
    if (
        is_vision_language
        and implementation == "auto"
        and kernel != "flash_attention_2"
    ):
        # flash_attention_2 takes the images of a batch at once without this.
        tower = tower_module(backbone.base_model, description.family_traits, "vision")
        why_one_by_one = vision.pack_images(tower, device, half=half)
        images = f"one by one ({why_one_by_one})" if why_one_by_one else "all at once"
        log.log(level, "images: attention over %s", images)
    if config.model_type in ENCODER_ONLY:
        # T5's embedding matrix is registered in two modules, which FSDP would shard as two parameters.
        backbone.set_input_embeddings(backbone.get_input_embeddings())
    return backbone


def _cast_frozen_towers(
    description: ModelDescription,
    options: ModelSection,
    backbone: nn.Module,
) -> None:
    """Cast frozen towers to the dtype of the option or of their files: they need no float32 master weights.

    A tower that is partly trained stays in float32 as a whole.
    """
    for tower in frozen_towers(backbone, description.family_traits):
        dtype = precision.DTYPES.get(options.torch_dtype)
        if dtype is None:
            folder = description.folder
            if tower == "vision":
                folder = description.image_folder
            dtype = file_dtype(description.read_config(folder))
        log.info("%s tower: frozen, held in %s", tower, dtype)
        tower_module(backbone, description.family_traits, tower).to(dtype)


def stored_scale_and_bias(description: ModelDescription) -> tuple[float, float] | None:
    """Return the scale and bias that CLIP or SigLIP was trained with (CLIP's bias is 0), read from the weight files; None
    for other models.

    The model's own parameters may be empty (meta) or sharded.
    """
    if not description.family_traits.has_logit_scale_and_bias:
        return None
    values = {}
    for path in description.folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in set(file.keys()).intersection(REPLACED_BY_LOSS):
                values[name] = float(file.get_tensor(name))
    if "logit_scale" not in values:
        return None
    # The files hold the logarithm of the scale.
    return math.exp(values["logit_scale"]), values.get("logit_bias", 0.0)
