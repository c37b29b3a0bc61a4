"""EmbeddingModel: backbone, pooling and head in one forward, with what the step and the saved files need to know.
Functions for its towers and their freezing. ComposedModel: a text model and an image model as one backbone.

Tower and projection are separate steps, so that the pooled output of a frozen tower can be cached while its projection is
trained.
"""

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from vembed.errors import UserError, nearest
from vembed.models import precision
from vembed.models.attention import (
    SHARED_PREFIX,
    TOKEN_INDEX,
    Packed,
    real_tokens,
    shared_indices,
    takes_packed_texts,
)
from vembed.models.custom.modeling import UserModel, UserModelConfig
from vembed.models.families.backbones import (
    POSITIONS_AFTER_PADDING,
    StateDict,
    is_decoder_only,
    is_never_used,
    layers_of,
)
from vembed.models.families.description import IMAGE_TOWER_FOLDER, ModelDescription
from vembed.models.families.family import Family, Modality, Tower
from vembed.models.heads import Dense, LanguageHead
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS
from vembed.models.precision import at_least_float32
from vembed.models.vision import (
    LONGEST_IMAGE,
    VISION_PREFIX,
    image_tower_output,
    run_image_tower,
)

log = logging.getLogger(__name__)

StopAfter = Literal["images", "pooled", "embeddings"]
"""How far a forward pass goes: to the output of the image tower, to the pooled output of the tower, or to the end."""
Inputs = dict[str, Tensor]
"""Collated inputs of one modality, by the names of the backbone's arguments."""
ModalitySlice = tuple[Modality, Inputs]
"""A slice of a micro-batch: its inputs of one modality."""
Backbone = Any
"""A Transformers model or ComposedModel. Any, because their attributes are untyped."""
POOLED = "pooled"
"""Input key: the pooled output of a tower, in place of all other inputs. The tower does not run."""
IMAGE_STATES = "image_states"
"""Input key of the modality multimodal: precomputed output of the image tower, in place of the pixels."""
SEGMENTS = "token_type_ids"
"""Input key of pairs: 0 for tokens of the query and 1 for those of the document, for models that tell them apart."""

TOWERS_OF_MODALITY: dict[Modality, tuple[Tower, ...]] = {
    "text": ("text",),
    "image": ("vision",),
    "multimodal": ("text", "vision"),
}
"""Modality -> the towers that its inputs pass through."""
_INPUT_EMBEDDINGS = re.compile(
    r"(^|\.)(embeddings|embed_tokens|shared|wte|wpe|patch_embed|pos_embed)(\.|$)"
)
"""Matches the names of the parameters that `freeze: [embeddings]` selects, outside of layers."""
REPLACED_BY_LOSS = ("logit_scale", "logit_bias")
"""Parameters of CLIP and SigLIP that the loss replaces by its own."""


@dataclass(frozen=True)
class TowerOutput:
    """What the tower of a modality gives."""

    pooled: Tensor
    """[n, width]."""
    states: Tensor | None = None
    """[n, tokens, dim], before the pooling."""
    auxiliary: Mapping[str, Any] = field(default_factory=dict)
    """The model's auxiliary losses by name. A loss is either a scalar, which is the mean over the inputs, or a pair
    (sums, counts). Sums and counts are single numbers, or [n], one for each input."""


class EmbeddingModel(nn.Module):
    """A backbone, its pooling and a head. One forward takes inputs of several modalities, so it can run several towers.

    Shapes on the way, for n inputs of one modality:

        token ids [n, tokens] or pixels
          -> tower: hidden states [n, tokens, token_dim]
          -> pooling: vectors [n, width], which never change while the tower is frozen
          -> projection of the family (CLIP, SigLIP, composed): vectors [n, projection_dim]
          -> head (Dense modules, the last of which may be this run's MRL projection): embeddings [n, embedding_dim]

    The head of a reranker (ScoreHead or AnswerHead) gives the score of each pair: embeddings [n, 1].
    """

    def __init__(
        self,
        description: ModelDescription,
        backbone: nn.Module,
        head: Any = None,
        *,
        pooling: nn.Module | None = None,
        language_head: LanguageHead | None = None,
    ) -> None:
        """`head`: a sequence of Dense modules, or that of a reranker. None: no head. `pooling`: the module of a trained
        pooling. None for poolings without weights, which `description.pooling` names. `language_head`: for the auxiliary
        losses of predicted tokens."""
        super().__init__()
        self.description = description
        self.backbone = backbone
        self.pooling = pooling
        self.head = head
        self.language_head = language_head
        self.has_auxiliary = (
            isinstance(backbone, UserModel) or language_head is not None
        )
        """True if the model may return auxiliary losses."""
        self._autocasts = False
        """True if the forward runs under bfloat16 autocast. See `compute_in_bf16`."""

    def compute_in_bf16(self) -> None:
        """Let the backbone compute in bfloat16. Its weights stay float32."""
        precision.use_bf16(self.backbone)
        self._autocasts = True

    def forward(
        self,
        slices: list[ModalitySlice],
        *,
        stop_after: StopAfter = "embeddings",
        with_auxiliary: bool = False,
    ) -> list[Tensor] | tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Return for each slice (modality, inputs) the [n, embedding_dim] embeddings, not normalised, in at least
        float32.

        `stop_after`: "pooled" returns the pooled output [n, width] of the tower. Passed as the inputs {"pooled": ...} of a
        later call, it replaces the inputs of the tower, which does not run again. "images", for the modality multimodal
        alone, returns the output of the image tower, which can replace the pixels. `with_auxiliary`: return also, for
        each slice, the model's auxiliary losses by name, each [2, n] or [2]: sums and counts.
        """
        device_type = next(self.parameters()).device.type
        # Inside the forward, so that the step, the evaluation and the use all get it.
        autocast: Any = nullcontext()
        if self._autocasts and not torch.is_autocast_enabled(device_type):
            autocast = torch.autocast(device_type, dtype=torch.bfloat16)
        outputs = []
        losses = []
        with autocast:
            for modality, inputs in slices:
                slice_losses = {}
                if stop_after == "images":
                    vectors = image_states(self.backbone, inputs)
                elif POOLED in inputs:
                    vectors = inputs[POOLED]
                elif with_auxiliary:
                    language_head = self.language_head if modality == "text" else None
                    tower_inputs = inputs
                    if language_head is not None:
                        # Before the tower runs: an encoder must not see the tokens that it has to predict.
                        tower_inputs, targets = language_head.mask_tokens(inputs)
                    output = self.tower_output(modality, tower_inputs)
                    vectors = output.pooled
                    slice_losses = sums_and_counts(output.auxiliary, len(vectors))
                    if language_head is not None:
                        loss = language_head(output.states, targets, self.backbone)
                        slice_losses[language_head.name] = loss
                else:
                    vectors = self.tower_output(modality, inputs).pooled
                if stop_after == "embeddings":
                    vectors = self.project(modality, vectors)
                output_vectors = at_least_float32(vectors)
                # A float32 tensor is returned as it is, and may be a view. FSDP takes no view as an output.
                if output_vectors is vectors:
                    output_vectors = output_vectors.clone()
                outputs.append(output_vectors)
                losses.append(slice_losses)
        return (outputs, losses) if with_auxiliary else outputs

    def tower_output(self, modality: Modality, inputs: Inputs) -> TowerOutput:
        """Run the tower of one modality on its collated inputs, or both towers of a vision-language model.

        `family.forward_kinds[modality]` decides how: `pooled_towers` (CLIP) pool themselves, `image` is an image encoder,
        `vision_language` a vision-language model, and `text` is for all other texts, padded or packed.
        """
        description = self.description
        family = description.family_traits
        forward_kind = family.forward_kinds[modality]
        pooling_name = description.pooling
        backbone = self.backbone
        # CLIP and composed models are called tower by tower, a vision-language model as a whole.
        if family.is_composed or forward_kind == "pooled_towers":
            (tower,) = TOWERS_OF_MODALITY[modality]
            backbone = tower_module(backbone, family, tower)
        if SHARED_PREFIX in inputs and not takes_packed_texts(backbone):
            inputs = with_shared_prefix(inputs)
        mask = padding_mask(inputs)
        if forward_kind == "pooled_towers":
            arguments = {**inputs, "attention_mask": mask}
            # A family with texts of fixed length was trained without a mask.
            if mask is None or family.has_fixed_length:
                del arguments["attention_mask"]
            return TowerOutput(backbone(**arguments).pooler_output)
        pooling_module = self.pooling
        is_packed = forward_kind == "text" and takes_packed_texts(backbone)
        if forward_kind == "image":
            pooling_name = description.image_pooling or pooling_name
            if family.is_composed:
                pooling_module = None  # that of the text tower
            output = run_image_encoder(backbone, inputs)
        elif forward_kind == "vision_language":
            output = run_vision_language(backbone, inputs, mask)
        elif is_packed:
            output = run_packed(backbone, inputs, mask)
        else:
            output = run_texts(description, backbone, inputs, mask)
        states = output.last_hidden_state
        if is_packed:
            # From states [1, all tokens, dim] of one row back to [n, tokens, dim]. Not `[0]`: the backward
            # pass of an index makes a tensor of zeros and copies into it.
            states = states.squeeze(0)
            if SHARED_PREFIX in inputs:
                states = states[len(inputs[SHARED_PREFIX]) :]
            states = padded_states(states, inputs, mask)
        elif states.ndim == 4:
            # Convolutional: [n, channels, height, width] to [n, positions, channels].
            states = states.flatten(2).transpose(1, 2)
        if pooling_name == MODEL_POOLING:
            pooled = output.pooler_output.flatten(1)
        else:
            pooled = pool(pooling_name, states, mask, module=pooling_module)
        return TowerOutput(pooled, states, output.get("auxiliary") or {})

    def project(self, modality: Modality, pooled: Tensor) -> Tensor:
        """Map pooled outputs [n, width] of a tower to embeddings [n, embedding_dim], by the family's projection and the head."""
        description = self.description
        vectors = pooled
        name = description.family_traits.projections.get(modality)
        if name is not None:
            projection: Any = self.backbone.get_submodule(name)
            # Outside autocast, in the dtype of its weights, as `Dense` in heads.py.
            with torch.autocast(pooled.device.type, enabled=False):
                vectors = projection(pooled.to(projection.weight.dtype))
        if self.head is not None:
            vectors = self.head(vectors)
        width = vectors.shape[-1]
        if width != description.embedding_dim:
            raise UserError(
                f"the model gives vectors of {width} numbers for the modality {modality}, and "
                f"{description.embedding_dim} were declared: by `width` of the pooling {description.pooling}, or "
                f"`embedding_size` of the family {description.family}"
            )
        return vectors

    def train(self, mode: bool = True) -> Self:
        """Set training mode. Fully frozen towers stay in eval mode, so that their output does not change."""
        super().train(mode)
        family = self.description.family_traits
        for tower in frozen_towers(self.backbone, family) if mode else ():
            tower_module(self.backbone, family, tower).eval()
        return self

    def frozen_modalities(self) -> list[Modality]:
        """Return the modalities whose pooled outputs never change: their towers are all frozen, and their pooling has no
        parameters. One forward pass of each input is enough for them."""
        family = self.description.family_traits
        frozen = set(frozen_towers(self.backbone, family))
        modalities = []
        for modality in family.forward_kinds:
            # A trained pooling stands between the tower and the pooled output.
            has_trained_pooling = self.pooling is not None and not (
                family.is_composed and modality == "image"
            )
            if set(TOWERS_OF_MODALITY[modality]) <= frozen and not has_trained_pooling:
                modalities.append(modality)
        return modalities

    def frozen_image_token_bytes(self) -> int | None:
        """Return the bytes of the image tower's output per image token, where this output can be kept for a second pass.

        That needs a vision-language model with a frozen image tower and a trained language model. Otherwise None.
        """
        family = self.description.family_traits
        backbone: Any = self.backbone
        if not family.is_vision_language or frozen_towers(backbone, family) != [
            "vision"
        ]:
            return None
        # Older Transformers take no output of the image tower.
        if "mm_encoder_outputs" not in inspect.signature(backbone.forward).parameters:
            return None
        # Qwen3-VL hands on the outputs of some inner layers too (deepstack).
        values = backbone.config.vision_config.to_dict()
        num_vectors = 1 + len(values.get("deepstack_visual_indexes") or ())
        # In float32, as the forward returns them.
        return 4 * self.description.hidden_dim * num_vectors

    def modules_behind_towers(self) -> dict[str, nn.Module]:
        """Return the modules behind the towers by name: a trained pooling, projections and head.

        They compute in float32 in every precision, because they are small and give the
        embedding. They learn at `head_learning_rate`.
        """
        modules = {}
        for name in self.description.family_traits.projections.values():
            modules[f"backbone.{name}"] = self.backbone.get_submodule(name)
        if self.pooling is not None:
            modules["pooling"] = self.pooling
        if self.head is not None:
            modules["head"] = self.head
        return modules

    def packs_texts(self) -> bool:
        """True if texts go through the model without their padding."""
        family = self.description.family_traits
        return "text" in family.forward_kinds and takes_packed_texts(
            tower_module(self.backbone, family, "text")
        )

    # ---- the loss's learned scale and bias -------------------------------------------------------------------------

    def write_logit_scale_and_bias(
        self,
        scale: float,
        bias: float,
        state: StateDict,
    ) -> None:
        """Write the loss's learned scale and bias into a full state dict of this model, under the backbone's names."""
        learned = {
            "backbone.logit_scale": torch.tensor(scale).log(),
            "backbone.logit_bias": torch.tensor(bias),
        }
        for key in learned.keys() & state.keys():
            # CLIP's are scalars, SigLIP's have the shape [1].
            like = state[key]
            state[key] = learned[key].to(like.dtype).expand_as(like).clone()

    # ---- the MRL projection ----------------------------------------------------------------------------------------

    @property
    def mrl_projection(self) -> Dense | None:
        """The linear layer that this run added for its Matryoshka dims, the last of the head; None where it added none."""
        if self.head is None or not self.description.adds_projection:
            return None
        return cast(Dense, self.head[-1])


# ---- calls of the backbone, by kind of input ---------------------------------------------------------------------


def run_texts(
    description: ModelDescription,
    backbone: Backbone,
    inputs: Inputs,
    mask: Tensor | None,
) -> Any:
    """Return the output of a text model, of padded texts."""
    arguments: dict[str, object] = {"input_ids": inputs["input_ids"]}
    if SEGMENTS in inputs:
        arguments[SEGMENTS] = inputs[SEGMENTS]
    if mask is not None:
        arguments["attention_mask"] = mask
    if description.family_traits.is_vision_language or is_decoder_only(backbone.config):
        # Keys and values for generation would be kept for every layer, and never read.
        arguments["use_cache"] = False
        if mask is not None and description.padding_side == "left":
            # Positions count from the first real token. Otherwise they would depend on the amount of left padding.
            arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return backbone(**arguments)


def run_packed(
    backbone: Backbone,
    inputs: Inputs,
    mask: Tensor | None,
) -> Any:
    """Return the output of a text model for texts in one row without their padding: states [1, all tokens, dim]."""
    # [n, longest], padded. Below: `tokens` and `positions` [all tokens], `starts` [n + 1].
    input_ids = inputs["input_ids"]
    num_texts, longest = input_ids.shape
    device = input_ids.device
    index = None
    if mask is None:
        tokens = input_ids.flatten()
        positions = torch.arange(longest, device=device).repeat(num_texts)
        starts = torch.arange(num_texts + 1, device=device) * longest
    else:
        # Each token's position in its own text, wherever the padding stands.
        index = token_index(inputs, mask)
        tokens = input_ids.flatten()[index]
        positions = (mask.cumsum(dim=1) - 1).flatten()[index]
        # Where each text begins in the row: cumulative lengths with a leading 0.
        ends = mask.sum(dim=1).cumsum(dim=0)
        starts = functional.pad(ends, (1, 0))
    # RoBERTa and models derived from it count positions from the padding token's id + 1.
    if backbone.config.model_type in POSITIONS_AFTER_PADDING:
        positions = positions + backbone.config.pad_token_id + 1
    shared = None
    if SHARED_PREFIX in inputs:
        # The row begins with the prefix, and each text continues its positions. Only templates of rerankers have one.
        prefix = inputs[SHARED_PREFIX]
        num_shared = len(prefix)
        # [all tokens] slots in the flattened padded batch. slot // longest is the number of the token's text.
        slots = index
        if slots is None:
            slots = torch.arange(len(tokens), device=device)
        shared = shared_indices(starts, slots // longest, num_shared)
        tokens = torch.cat([prefix, tokens])
        prefix_positions = torch.arange(num_shared, device=device)
        positions = torch.cat([prefix_positions, positions + num_shared])
        # From here on `starts` is as if each text had its own copy of the prefix.
        starts = starts + num_shared * torch.arange(num_texts + 1, device=device)
        longest += num_shared
    starts = starts.to(torch.int32)
    if backbone.config.model_type == UserModelConfig.model_type:
        return backbone(input_ids=tokens[None], cu_seqlens=starts)
    arguments = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        # Transformers passes a 4D mask on unchanged instead of building one. The attention of vembed ignores it.
        "attention_mask": tokens.new_zeros(1, 1, 1, 1),
        "packed": Packed(starts, longest, shared),
    }
    if SEGMENTS in inputs:
        segments = inputs[SEGMENTS].flatten()
        if index is not None:
            segments = segments[index]
        arguments[SEGMENTS] = segments[None]
    if is_decoder_only(backbone.config):
        arguments["use_cache"] = False
    return backbone(**arguments)


def with_shared_prefix(inputs: Inputs) -> Inputs:
    """Put the shared prefix back before each text. All padding is then on the left."""
    inputs = dict(inputs)
    prefix = inputs.pop(SHARED_PREFIX).expand(len(inputs["input_ids"]), -1)
    inputs["input_ids"] = torch.cat([prefix, inputs["input_ids"]], dim=1)
    if "attention_mask" in inputs:
        mask = torch.cat([torch.ones_like(prefix), inputs["attention_mask"]], dim=1)
        # No padding may stand between prefix and text: sliding windows and convolutions count padding too. The stable sort
        # moves it to the front.
        order = mask.argsort(dim=1, stable=True)
        inputs["input_ids"] = inputs["input_ids"].gather(1, order)
        inputs["attention_mask"] = mask.gather(1, order)
    return inputs


def token_index(inputs: Inputs, mask: Tensor) -> Tensor:
    """Return the slots of the real tokens in the flattened mask, from collation where it has made them."""
    index = inputs.get(TOKEN_INDEX)
    return real_tokens(mask) if index is None else index


def padded_states(
    states: Tensor,
    inputs: Inputs,
    mask: Tensor | None,
) -> Tensor:
    """Map the states [all tokens, dim] of packed texts to [n, tokens, dim], with zeros as padding."""
    num_texts, longest = inputs["input_ids"].shape
    if mask is not None:
        index = token_index(inputs, mask)
        # `index_copy` and not `index_copy_`: autograd needs a new tensor.
        padded = states.new_zeros(num_texts * longest, states.shape[1])
        states = padded.index_copy(0, index, states)
    return states.view(num_texts, longest, -1)


def run_vision_language(
    backbone: Backbone,
    inputs: Inputs,
    mask: Tensor | None,
) -> Any:
    """Return the output of a vision-language model for token ids with images. Collation has made their positions
    (time, height, width)."""
    arguments: dict[str, Any] = {
        key: value for key, value in inputs.items() if not key.startswith(VISION_PREFIX)
    }
    arguments.pop("attention_mask", None)
    if mask is not None:
        arguments["attention_mask"] = mask
    states = arguments.pop(IMAGE_STATES, None)
    if states is not None:
        # [1 + m, tokens, width]: see `image_states`.
        image = image_tower_output(states[0], states[1:])
        arguments["mm_encoder_outputs"] = {"image": image}
    elif LONGEST_IMAGE in inputs:
        # Collation has made the image tower's other inputs too. The backbone does not take them, so the tower runs here.
        del arguments["pixel_values"]
        arguments["mm_encoder_outputs"] = {"image": run_image_tower(backbone, inputs)}
    return backbone(**arguments, use_cache=False)


def run_image_encoder(backbone: Backbone, inputs: Inputs) -> Any:
    """Return the output of an image encoder."""
    # A frozen tower may be held in another dtype than the pixels.
    pixels = inputs["pixel_values"].to(backbone.dtype)
    arguments = {**inputs, "pixel_values": pixels}
    if backbone.config.model_type == "vit_mae":
        # The model orders patches by noise: ascending noise keeps their order, and mask_ratio 0 keeps all of them.
        num_patches = backbone.embeddings.patch_embeddings.num_patches
        ascending = torch.arange(num_patches, device=pixels.device)
        arguments["noise"] = ascending.expand(len(pixels), -1)
    return backbone(**arguments)


def image_states(backbone: Backbone, inputs: Inputs) -> Tensor:
    """Return [1 + m, tokens, width]: the image tower's output for all images, then the outputs of m inner layers.

    The inner layers are those of Qwen3-VL's deepstack; m is 0 for other models.
    """
    output = run_image_tower(backbone, inputs)
    inner_outputs = vars(output).get("deepstack_features") or []
    # A tuple with one tensor per image, or with one for all images.
    layers = [
        torch.cat(list(images)) for images in (output.pooler_output, *inner_outputs)
    ]
    return torch.stack(layers)


def padding_mask(inputs: Inputs) -> Tensor | None:
    """Return the attention mask [n, tokens]; None without padding, which lets attention use a faster path.

    The mask is inspected on CPUs only: on a GPU this would force a synchronisation. Collation may omit a mask of ones.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        return None
    if mask.device.type == "cpu" and bool(mask.all()):
        return None
    return mask


# ---- pooling, and losses of the model ----------------------------------------------------------------------------


def pool(
    pooling_name: str,
    hidden: Tensor,
    mask: Tensor | None,
    *,
    module: nn.Module | None = None,
) -> Tensor:
    """Map [n, tokens, dim] to [n, width], in at least float32.

    `mask` [n, tokens] is 1 on real tokens, with the padding on either side. None: no
    padding. `module`: that of a trained pooling.
    """
    hidden = at_least_float32(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        if module is None:
            return POOLINGS[pooling_name].pool(hidden, mask)
        vectors: Tensor = module(hidden, mask)
        return vectors


def sums_and_counts(auxiliary: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Return each auxiliary loss as [2, n] or [2], sums and counts, in at least float32. `count`: inputs of the pass.

    Sums and counts, and not means: a mean over the global batch is then exact, however it is cut into micro-batches.
    """
    losses = {}
    for name, value in auxiliary.items():
        pair = value
        if isinstance(value, Tensor | float | int):
            pair = (value * count, count)
        sums = at_least_float32(torch.as_tensor(pair[0]))
        if sums.shape not in ((), (1,), (count,)) or len(pair) != 2:
            raise TypeError(
                f"the auxiliary loss {name} must be a scalar, or a pair (sums, counts) of numbers or of one number for "
                f"each of {count} inputs"
            )
        counts = torch.as_tensor(pair[1], device=sums.device).detach()
        counts = counts.to(sums.dtype).expand_as(sums)
        # A new tensor: FSDP wants no view as a result.
        losses[name] = torch.stack([sums, counts])
    return losses


# ---- hidden states of the layers -------------------------------------------------------------------------------------


class LayerPooler(nn.Module):
    """Pooled hidden states of chosen layers of the text tower. Layer 0 is the input of the first transformer layer, layer
    k the output of the k-th one. Collective where the model is sharded."""

    def __init__(
        self,
        model: nn.Module,
        backbone: nn.Module,
        description: ModelDescription,
        layers: Literal["all"] | Sequence[int],
        pooling_name: str | None,
    ) -> None:
        """`model`: the module that is called, sharded or not. `backbone`: its submodule with the layers."""
        super().__init__()
        self.model = model
        tower = tower_module(backbone, description.family_traits, "text")
        self._transformer_layers = layers_of(tower)
        self._takes_packed_texts = takes_packed_texts(tower)
        known = range(len(self._transformer_layers) + 1)
        numbers = known if layers == "all" else layers
        try:
            # Negative numbers count from the last layer, as in a Python list.
            self.layers = [known[int(number)] for number in numbers]
        except IndexError as error:
            raise UserError(
                f"layers: this model has layers 0 (its embeddings) to {known[-1]}, and {list(numbers)} are asked for"
            ) from error
        # A pooling of the model itself, and a trained one, are for the last layer only.
        default_name = description.pooling
        if default_name == MODEL_POOLING or POOLINGS[default_name].is_trained:
            default_name = "mean"
        self.pooling_name = pooling_name or default_name
        config: Any = tower.config
        hidden_dim = int(config.get_text_config().hidden_size)
        self.width = POOLINGS[self.pooling_name].width(hidden_dim)

    def forward(self, slices: list[ModalitySlice]) -> list[Tensor]:
        """Return [n, layers * width], layer by layer, for the one slice (modality, inputs)."""
        ((_, inputs),) = slices
        captured = dict[int, Tensor]()

        def keep(number: int, hidden: Tensor) -> None:
            if number in captured:
                raise UserError(
                    "the layers of this model share their weights, so one layer runs several times in a pass. vembed "
                    "reads no hidden states of such a model: use its embeddings"
                )
            captured[number] = self.pool_layer(hidden, inputs)

        def capture_input(
            _: nn.Module,
            arguments: tuple[Any, ...],
            named: dict[str, Any],
        ) -> None:
            keep(0, arguments[0] if arguments else named["hidden_states"])

        def capture_output(
            number: int,
            _: nn.Module,
            __: Any,
            output: Any,
        ) -> None:
            keep(number, output[0] if isinstance(output, tuple) else output)

        # Hooks, and not output_hidden_states: they are the same for padded, packed and sharded models.
        hooks = []
        if 0 in self.layers:
            hook = self._transformer_layers[0].register_forward_pre_hook(
                capture_input, with_kwargs=True
            )
            hooks.append(hook)
        for number, layer in enumerate(self._transformer_layers, start=1):
            if number in self.layers:
                capture = partial(capture_output, number)
                hooks.append(layer.register_forward_hook(capture))
        try:
            self.model(slices)
        finally:
            for hook in hooks:
                hook.remove()
        return [torch.cat([captured[layer] for layer in self.layers], dim=1)]

    def pool_layer(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """Pool the states of a layer, padded [n, tokens, dim] or packed [1, all tokens, dim], to [n, width]."""
        mask = padding_mask(inputs)
        if self._takes_packed_texts:
            hidden = padded_states(hidden[0], inputs, mask)
        return pool(self.pooling_name, hidden, mask).float()


# ---- towers: their parameters, and freezing ----------------------------------------------------------------------------


def frozen_towers(backbone: nn.Module, family: Family) -> list[Tower]:
    """Return the towers without trained parameters."""
    # By parameters and not by the option: adapters freeze towers too.
    frozen = dict(family.towers)
    for name, parameter in backbone.named_parameters():
        for tower, prefix in family.towers.items():
            if parameter.requires_grad and name.startswith(prefix):
                frozen.pop(tower, None)
    return list(frozen)


def tower_module(
    backbone: nn.Module,
    family: Family,
    tower: Tower,
) -> nn.Module:
    """Return the tower's module; the backbone itself if it has a single tower."""
    return backbone.get_submodule(family.towers[tower].removesuffix("."))


def freeze_unused(backbone: nn.Module) -> None:
    """Freeze parameters that no embedding depends on. They would never get a gradient, and FSDP would wait for it."""
    unused = []
    for name, parameter in backbone.named_parameters():
        if name in REPLACED_BY_LOSS or is_never_used(name):
            parameter.requires_grad = False
            unused.append(name)
    if unused:
        log.info("frozen: %s (no embedding depends on them)", ", ".join(unused))


def names_frozen_by(
    backbone: nn.Module,
    family: Family,
    selectors: Sequence[str],
) -> set[str]:
    """Return the names of the backbone parameters that the option `freeze` selects."""
    all_names = [name for name, _ in backbone.named_parameters()]
    layer_ids = set(map(id, layers_of(backbone)))
    # Each tower's layers in the order of the forward pass, by the prefix of their parameters. Layers are numbered through
    # the whole tower, also where a hierarchical model groups them in stages.
    layers: dict[str, list[str]] = {tower: [] for tower in family.towers}
    for module_name, module in backbone.named_modules():
        for tower, tower_prefix in family.towers.items():
            if id(module) in layer_ids and module_name.startswith(tower_prefix):
                layers[tower].append(f"{module_name}.")
    frozen = set()
    for selector in selectors:
        # Only a number of layers has a "=", as in text.first_n_layers=4.
        key, _, count = selector.partition("=")
        tower_name = key.removesuffix("first_n_layers").removesuffix(".")
        prefixes = []
        if selector in family.towers:
            prefixes = [family.towers[cast(Tower, selector)]]
        elif selector == "embeddings":
            # Embeddings inside of layers (of relative positions) belong to their layer.
            inside = tuple(chain.from_iterable(layers.values()))
            for name in all_names:
                if _INPUT_EMBEDDINGS.search(name) and not name.startswith(inside):
                    prefixes.append(name)
        elif key.endswith("first_n_layers") and count.isdecimal():
            stacks = [layers[tower] for tower in layers if tower_name in ("", tower)]
            if int(count) <= max(map(len, stacks), default=0):
                for stack in stacks:
                    prefixes += stack[: int(count)]
        else:
            path = selector.removeprefix("backbone.").removesuffix(".")
            # Whole names: layer.1 does not select layer.10.
            prefixes = [f"{path}."]
        names = {name for name in all_names if f"{name}.".startswith(tuple(prefixes))}
        if not names:
            near = nearest(selector, all_names, cutoff=0.0)
            numbers = {tower: len(stack) for tower, stack in layers.items()}
            raise UserError(
                f"freeze: {selector} selects nothing of this model. Give one of its towers ({', '.join(layers)}), embeddings, "
                f"first_n_layers=N or TOWER.first_n_layers=N with N up to the number of layers ({numbers}), or the "
                f"name of a module or parameter (the nearest is {near})"
            )
        log.info("freeze: %s, %d tensors", selector, len(names))
        frozen |= names
    return frozen


# ---- two models in one ----------------------------------------------------------------


PROJECTIONS_FILE = "projections.safetensors"
"""File with the weights of both projections, in the text tower's folder."""


class ComposedModel(nn.Module):
    """The backbone of the family `composed`: a text model and an image model, with a projection of each into a shared
    space."""

    def __init__(
        self,
        text_model: PreTrainedModel,
        vision_model: PreTrainedModel,
        description: ModelDescription,
    ) -> None:
        super().__init__()
        self.text_model = text_model
        self.vision_model = vision_model
        shared_dim = description.hidden_dim
        projections = []
        for width in (description.text_hidden_dim, description.image_hidden_dim):
            assert width is not None
            projection = nn.Linear(width, shared_dim, bias=False)
            if width == shared_dim:
                nn.init.eye_(projection.weight)
            else:
                nn.init.orthogonal_(projection.weight)
            projections.append(projection)
        self.text_projection, self.visual_projection = projections
        self.projections_are_new = True
        """False once trained ones are loaded."""

    def load_projections(self, folder: Path) -> None:
        """Load the projections of a saved composed model."""
        weights = load_file(folder / PROJECTIONS_FILE)
        # The towers have files of their own.
        for name in ("text_projection", "visual_projection"):
            projection = self.get_submodule(name)
            projection.load_state_dict({"weight": weights[f"{name}.weight"]})
        self.projections_are_new = False

    def save_pretrained(self, folder: Path, *, state_dict: StateDict) -> None:
        """Save the text tower and the projections in `folder`, and the image tower in a subfolder."""
        # Each tower's file has the names of the tower itself, so that it loads alone.
        text = pop_with_prefix(state_dict, "text_model.")
        self.text_model.save_pretrained(folder, state_dict=text)
        vision = pop_with_prefix(state_dict, "vision_model.")
        target = folder / IMAGE_TOWER_FOLDER
        self.vision_model.save_pretrained(target, state_dict=vision)
        known = {"text_projection.weight", "visual_projection.weight"}
        assert state_dict.keys() == known, sorted(state_dict)
        projections = {key: value.contiguous() for key, value in state_dict.items()}
        save_file(projections, folder / PROJECTIONS_FILE)


def pop_with_prefix(state: StateDict, prefix: str) -> StateDict:
    """Take what begins with a prefix out of a state dict, and return it under names without the prefix."""
    names = [name for name in state if name.startswith(prefix)]
    return {name.removeprefix(prefix): state.pop(name) for name in names}
