"""EmbeddingModel: backbone, pooling and head in one forward, with what the step and the saved files need to know."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from vembed.config.schema import AdapterSection, ModelSection, ObjectiveSection
from vembed.errors import UserError
from vembed.models import precision
from vembed.models.adapters import add_adapters
from vembed.models.attention import PACKED_ATTENTION, CpuDropout, packs, register
from vembed.models.building import (
    build_backbone,
    cast_frozen_towers,
    scale_and_bias,
)
from vembed.models.custom.modeling import OwnModel
from vembed.models.families.backbones import layers_of
from vembed.models.families.description import ModelDescription, describe
from vembed.models.families.family import Modality
from vembed.models.families.model_files import read_dense
from vembed.models.language_head import (
    LanguageHead,
    class_with_head,
    has_language_head,
)
from vembed.models.modalities import (
    Collected,
    at_least_float32,
    image_features,
    project,
    sums_and_counts,
    tower_features,
)
from vembed.models.poolings.table import POOLINGS
from vembed.models.quantized import keep_trainable_layout, round_weights
from vembed.models.score_head import build_score_head, class_with_scores
from vembed.models.towers import (
    TOWERS_OF_MODALITY,
    freeze_unused,
    frozen_towers,
    names_frozen_by,
    tower_module,
)
from vembed.saving.checksums import check_weights

ModalitySlice = tuple[Modality, dict[str, Tensor]]
FEATURES = "features"
"""Key of inputs that are a tower's features already: the tower is left out."""


# ---- heads ----------------------------------------------------------------------------------------------------------


IDENTITY = "torch.nn.modules.linear.Identity"


class Dense(nn.Module):
    """A linear layer and an activation, equivalent to the Dense module of Sentence Transformers."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        activation: str = IDENTITY,
    ) -> None:
        """`activation`: dotted path of a class in torch.nn, as Sentence Transformers writes it."""
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation_path = activation
        kind = vars(nn).get(activation.rsplit(".", 1)[-1])
        if not activation.startswith("torch.nn") or not isinstance(kind, type):
            raise UserError(
                f"the activation {activation} of a Dense module is not a module of torch.nn"
            )
        try:
            self.activation = kind()
        except TypeError as error:  # a layer with sizes of its own
            raise UserError(
                f"the activation {activation} of a Dense module is not an activation: {error}"
            ) from error

    def forward(self, vectors: Tensor) -> Tensor:
        """Map [n, in_features] to [n, out_features], in the dtype of the weights."""
        # Autocast is off here: without the cast a bfloat16 input would meet float32 weights.
        activated: Tensor = self.activation(
            self.linear(vectors.to(self.linear.weight.dtype))
        )
        return activated

    def settings(self) -> dict[str, Any]:
        """Return the module's config.json in the Sentence Transformers layout."""
        return {
            "in_features": self.linear.in_features,
            "out_features": self.linear.out_features,
            "bias": self.linear.bias is not None,
            "activation_function": self.activation_path,
        }


class Head(nn.Sequential):
    """Dense modules in sequence. They run outside autocast: they are small, and their output is the embedding."""

    def forward(self, vectors: Tensor, *, skips_last: bool = False) -> Tensor:
        """Map [n, hidden_dim] to [n, embedding_dim], or to the input of the last module."""
        with torch.autocast(vectors.device.type, enabled=False):
            for module in list(self)[: len(self) - skips_last]:
                vectors = module(vectors)
        return vectors


def load_dense(folder: Path) -> Dense:
    """Load a Dense module saved by Sentence Transformers."""
    settings = read_dense(folder)
    try:
        dense = Dense(
            settings.in_features,
            settings.out_features,
            bias=settings.bias,
            activation=settings.activation_function or IDENTITY,
        )
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from error
    check_weights(folder)
    weights = load_file(folder / "model.safetensors")
    dense.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return dense


def principal_components(sample: Tensor, out_features: int) -> Tensor:
    """Return [out_features, dim], the principal components of the unit vectors of `sample` [n, dim], strongest first.

    Signs are fixed, so that all machines get the same result. If `sample` has fewer rows than components, the remaining
    ones are arbitrary orthogonal directions.
    """
    # float64: a covariance of float32 rounds away the weak directions.
    unit = functional.normalize(sample.double(), dim=1)
    centred = unit - unit.mean(dim=0)
    covariance = centred.T @ centred
    # eigh returns ascending eigenvalues with eigenvectors as columns: flip, then transpose to rows.
    directions: Tensor = (
        torch.linalg.eigh(covariance).eigenvectors.flip(1).T[:out_features]
    )
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    return (directions * largest.sign()).to(sample.dtype)


# ---- the model ------------------------------------------------------------------------------------------------------


class EmbeddingModel(nn.Module):
    """A backbone, its pooling and a head. The forward takes parts, so that one call can run several towers.

    Shapes on the way, for n inputs of one modality:

        token ids [n, tokens] or pixels
          -> tower: hidden states [n, tokens, token_dim]
          -> pooling: features [n, hidden_dim], which never change while the tower is frozen
          -> projection of the family (CLIP, two towers): [n, hidden_dim]
          -> head, Dense modules and this run's MRL projection: embeddings [n, embedding_dim]
    """

    def __init__(
        self,
        description: ModelDescription,
        backbone: nn.Module,
        head: nn.Module | None = None,
        *,
        pooling: nn.Module | None = None,
        scale_and_bias: tuple[float, float] | None = None,
        language_head: LanguageHead | None = None,
    ) -> None:
        """`head`: Dense modules, or a reranker's ScoreHead. `scale_and_bias`: those that CLIP or SigLIP was trained
        with (CLIP's bias is 0)."""
        super().__init__()
        self.description = description
        self.backbone = backbone
        self.pooling = pooling
        self.head = head
        self.language_head = language_head
        self.initial_scale_and_bias = scale_and_bias
        self._skips_mrl_projection = False
        self._autocasts = False

    def compute_in_bf16(self) -> None:
        """Let the backbone compute in bfloat16. Its weights stay float32."""
        precision.use_bf16(self.backbone)
        self._autocasts = True

    def forward(
        self,
        parts: list[ModalitySlice],
        *,
        features_only: bool = False,
        images_only: bool = False,
        with_auxiliary: bool = False,
    ) -> list[Tensor] | tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Return for each (modality, inputs) the [n, embedding_dim] embeddings, not normalised, in at least float32.

        `features_only`: stop at the features. Given back as {"features": ...} they stand for the inputs of a modality
        whose tower is left out. `images_only`, for the modality multimodal: what the image tower gives, which can take
        the place of the pixels. `with_auxiliary`: return also, for each part, the model's own losses by name, each
        [2, n] or [2, 1]: sums and counts.
        """
        device_type = next(self.parameters()).device.type
        # Inside the forward, so that the step, the evaluation and the use all get it.
        autocast: Any = nullcontext()
        if self._autocasts and not torch.is_autocast_enabled(device_type):
            autocast = torch.autocast(device_type, dtype=torch.bfloat16)
        outputs: list[Tensor] = []
        losses: list[dict[str, Tensor]] = []
        with autocast:
            for modality, inputs in parts:
                of_part: dict[str, Tensor] = {}
                if images_only:
                    output = image_features(self.backbone, inputs)
                elif FEATURES in inputs:
                    output = inputs[FEATURES]
                else:
                    output, of_part = self._features(modality, inputs, with_auxiliary)
                if not features_only and not images_only:
                    output = project(self.description, self.backbone, modality, output)
                    if self.head is not None:
                        # Through the head as a whole: where the model is sharded, that gathers its weights.
                        skips_last = self._skips_mrl_projection
                        output = self.head(output, skips_last=skips_last)
                wide = at_least_float32(output)
                # FSDP takes no view of a tensor that the model holds.
                outputs.append(wide.clone() if wide is output else wide)
                losses.append(of_part)
        return (outputs, losses) if with_auxiliary else outputs

    def _features(
        self, modality: Modality, inputs: dict[str, Tensor], with_auxiliary: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the pooled output of the tower, [n, width], and the losses that the model itself gives."""
        collected = Collected()
        head = self.language_head if with_auxiliary and modality == "text" else None
        if head is not None:
            # Before the tower runs: an encoder must not see the tokens that it has to tell.
            inputs, targets = head.hide(inputs)
        features = tower_features(
            self.description,
            self.backbone,
            modality,
            inputs,
            collected,
            pooling=self.pooling,
        )
        losses = {}
        if with_auxiliary:
            losses = sums_and_counts(collected.auxiliary, len(features))
        if head is not None:
            assert collected.states is not None
            losses[head.name] = head(collected.states, targets, self.backbone)
        return features, losses

    def train(self, mode: bool = True) -> Self:
        """Training mode, except for towers of which nothing is trained: their features stay the same all the time."""
        super().train(mode)
        if mode:
            for tower in frozen_towers(self.backbone, self.description.traits):
                tower_module(self.backbone, self.description.traits, tower).eval()
        return self

    def frozen_modalities(self) -> list[Modality]:
        """Return the modalities whose features never change: their towers are all frozen, and their pooling has no
        parameters. One forward pass of each input is enough for them."""
        frozen = set(frozen_towers(self.backbone, self.description.traits))
        modalities: list[Modality] = []
        for modality in self.description.modalities:
            # A trained pooling stands between the tower and its features.
            is_pooled_by_module = self.pooling is not None and not (
                self.description.traits.has_two_models and modality == "image"
            )
            if set(TOWERS_OF_MODALITY[modality]) <= frozen and not is_pooled_by_module:
                modalities.append(modality)
        return modalities

    def bytes_of_frozen_images(self) -> int | None:
        """Bytes for each token of an image that the frozen image tower of a vision-language model gives, where what it
        gave can be handed to the language model again; otherwise None."""
        family = self.description.traits
        backbone: Any = self.backbone
        if not family.reads_chats or frozen_towers(backbone, family) != ["vision"]:
            return None
        # Older Transformers take no output of the image tower.
        if "mm_encoder_outputs" not in inspect.signature(backbone.forward).parameters:
            return None
        # Qwen3-VL hands on the outputs of some inner layers too (deepstack).
        values = backbone.config.vision_config.to_dict()
        num_vectors = 1 + len(values.get("deepstack_visual_indexes") or ())
        return 4 * self.description.hidden_dim * num_vectors

    def head_names(self) -> list[str]:
        """Names of the modules behind the towers: a trained pooling, projections and head.

        They compute in float32 in every precision, because they are small and give the
        embedding. They learn at `head_learning_rate`.
        """
        projections = dict.fromkeys(self.description.traits.projections.values())
        names = [f"backbone.{name}" for name in projections]
        if self.pooling is not None:
            names.append("pooling")
        if self.head is not None:
            names.append("head")
        return names

    def heads(self) -> list[nn.Module]:
        """Return the modules of `head_names`."""
        return [self.get_submodule(name) for name in self.head_names()]

    def has_auxiliary(self) -> bool:
        """True if the model may return losses of its own."""
        return isinstance(self.backbone, OwnModel) or self.language_head is not None

    def packs_texts(self) -> bool:
        """True if texts go through the model without their padding."""
        text = self.backbone
        if self.description.traits.has_two_models:
            text = tower_module(self.backbone, self.description.traits, "text")
        return packs(text)

    # ---- the loss's learned scale and bias -------------------------------------------------------------------------

    def write_scale_and_bias(
        self, scale: float, bias: float, state: dict[str, Tensor]
    ) -> None:
        """Put what the loss has learned into a whole state dict of this model, under the backbone's own names."""
        learned = {
            "backbone.logit_scale": torch.tensor(scale).log(),
            "backbone.logit_bias": torch.tensor(bias),
        }
        for key, value in learned.items():
            if key in state:
                before = state[key]
                state[key] = value.to(before.dtype).expand(before.shape).clone()

    # ---- the MRL projection ----------------------------------------------------------------------------------------

    @property
    def mrl_projection(self) -> Dense | None:
        """The linear layer that this run added for its MRL dims, the last of the head; None where it added none."""
        if self.head is None or not self.description.adds_projection:
            return None
        return cast(Dense, cast(Head, self.head)[-1])

    @contextmanager
    def without_mrl_projection(self) -> Iterator[None]:
        """The forward gives what the MRL projection would be given: the sample for its start."""
        self._skips_mrl_projection = self.mrl_projection is not None
        try:
            yield
        finally:
            self._skips_mrl_projection = False

    def start_mrl_projection(self, sample: Tensor) -> None:
        """Start the MRL projection from the principal components of `sample` [n, size before the projection]."""
        projection = self.mrl_projection
        assert projection is not None
        weight = projection.linear.weight
        with torch.no_grad():
            weight.copy_(
                principal_components(sample.to(weight.device), weight.shape[0])
            )


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
        if has_language:
            whole_class = class_with_head
        elif description.scores is not None:
            whole_class = partial(class_with_scores, description)
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
            module.__class__ = CpuDropout
    # Checkpointing first, so that the compiler sees the checkpointed layers.
    layers = layers_of(backbone)
    if recompute:
        precision.enable_checkpointing(layers)
    wants_compiled = options.torch_compile is True if compiles is None else compiles
    # The compiler gives up on a checkpointed layer that calls attention as it is, which packed texts do.
    if wants_compiled and not (recompute and model.packs_texts()):
        register(PACKED_ATTENTION, compiled_layers=True)
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
