"""Padding-free forward pass: the texts of a micro-batch packed into one row, with attention restricted to each text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from vembed.config.schema import ModelSection
from vembed.models import cpu_kernels
from vembed.models.custom.modeling import PACKED, OwnConfig
from vembed.models.families.backbones import POSITIONS_AFTER_PADDING, is_decoder_only

IMPLEMENTATION = "vembed_packed"
"""Name of `attention` in Transformers' registry. A backbone loaded with it packs its texts."""
TOKENS = "token_index"
"""Input key: positions of real tokens in the flattened input_ids, computed on the host to avoid a GPU sync."""
MODEL_TYPES = (
    "bert",
    "distilbert",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "roberta",
    "xlm-roberta",
)
"""Model types whose layers pass extra arguments on to attention and use the given positions; each is tested."""
_MAX_HEAD_SIZE = 256


def why_padded(
    options: ModelSection, model: PretrainedConfig, device: torch.device, *, half: bool
) -> str | None:
    """Return the reason for padding texts with this model and device; None: they are packed."""
    if options.padding_free is False:
        return "padding_free: false"
    if isinstance(model, OwnConfig):
        return (
            None
            if PACKED in model.inputs
            else f"the forward of {model.class_name} takes no {PACKED}"
        )
    if model.model_type not in MODEL_TYPES:
        return f"{model.model_type} is not among the models that are tested without padding"
    if options.attn_implementation in ("eager", "sdpa"):
        return f"attn_implementation: {options.attn_implementation}"
    if device.type == "cpu":
        return None
    if not half:
        return "flash attention does not support float32"
    values = model.to_dict()
    num_heads = int(values.get("num_attention_heads") or values["n_heads"])
    width = int(values.get("hidden_size") or values["dim"])
    return why_no_kernel(int(values.get("head_dim") or width // num_heads), device)


def why_no_kernel(head_size: int, device: torch.device) -> str | None:
    """Return the reason why no variable-length kernel takes heads of this size on a GPU; None: one does."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than flash attention allows"
    if head_size > _MAX_HEAD_SIZE:
        return f"flash attention does not support a head size of {head_size}"
    if is_flash_attn_2_available():
        return None
    if "window_size" not in _varlen_arguments():
        return "flash-attn is not installed, and this torch has no attention for texts of different lengths"
    if head_size % 8:
        # flash-attn's package pads the heads; the derivative of torch's operator refuses them.
        return f"a head size of {head_size}, no multiple of 8, needs flash-attn, which is not installed"
    return None


@cache
def _varlen_arguments() -> frozenset[str]:
    """Return the names of the arguments of torch's variable-length attention; none where torch has none."""
    if find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def exclude_attention_from_compilation() -> None:
    """Let compiled layers call `attention` as it is: its kernels are whole already, and the lengths of the texts would
    make the compiler start again."""
    cpu_kernels.register(IMPLEMENTATION, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]


def packs(backbone: Any) -> bool:
    """Return True if the backbone takes packed texts."""
    return bool(backbone.config._attn_implementation == IMPLEMENTATION)


def token_index(mask: Tensor) -> Tensor:
    """Return the positions of real tokens in a flattened micro-batch."""
    return mask.flatten().nonzero().squeeze(1)


def hidden_states(
    backbone: Any,
    input_ids: Tensor,
    mask: Tensor | None,
    index: Tensor | None,
    segments: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return hidden states [n, tokens, dim] of a padded micro-batch, and the model's own losses. Only real tokens are
    computed, padding is zero.

    `index`: `token_index(mask)`, if it is known. `segments` [n, tokens]: 0 for a pair's query and 1 for its document.
    """
    num_texts, longest = input_ids.shape
    device = input_ids.device
    if mask is None:
        tokens = input_ids.flatten()
        positions = torch.arange(longest, device=device).repeat(num_texts)
        starts = torch.arange(num_texts + 1, device=device) * longest
    else:
        # Each token's position in its own text, wherever the padding stands.
        index = token_index(mask) if index is None else index
        tokens = input_ids.flatten()[index]
        positions = (mask.cumsum(dim=1) - 1).flatten()[index]
        # Cumulative text lengths with a leading 0: [n + 1].
        starts = functional.pad(mask.sum(dim=1).cumsum(dim=0), (1, 0))
    # RoBERTa and its kin count positions from the padding token's id + 1.
    if backbone.config.model_type in POSITIONS_AFTER_PADDING:
        positions = positions + backbone.config.pad_token_id + 1
    starts = starts.to(torch.int32)
    if backbone.config.model_type == OwnConfig.model_type:
        result = backbone(input_ids=tokens[None], cu_seqlens=starts)
    else:
        further: dict[str, Any] = {}
        if segments is not None:
            flat = segments.flatten()
            further["token_type_ids"] = (flat if index is None else flat[index])[None]
        if is_decoder_only(backbone.config):
            further["use_cache"] = False
        result = backbone(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=tokens.new_zeros(
                1, 1, 1, 1
            ),  # a 4D mask is passed through unchanged, and not used
            packed=Packed(starts, longest),
            **further,
        )
    output: Tensor = result.last_hidden_state.squeeze(0)
    if index is not None:
        # Scatter back to the padded layout, out of place for autograd.
        output = output.new_zeros(num_texts * longest, output.shape[1]).index_copy(
            0, index, output
        )
    return output.view(num_texts, longest, -1), result.get("auxiliary") or {}


@dataclass(frozen=True, slots=True)
class Packed:
    """Boundaries of the texts in a packed row: with lengths 3 and 2, starts is [0, 3, 5] and longest 3."""

    starts: Tensor
    """int32 [n + 1]: start of each text, and the end of the last one."""
    longest: int


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Packed | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for Transformers: for packed texts, and for all images of a batch in one row.

    `packed` is passed through the layers of texts. Image towers hand over `cu_seq_lens_q` and `max_length_q`, which say
    the same. Without either, attention is as usual (older image towers call it for each image).

    query, key, value: [n, heads, length, size], of packed inputs with n = 1. Returns [n, length, heads, size].
    """
    if cu_seq_lens_q is not None and max_length_q is not None:
        packed = Packed(cu_seq_lens_q.to(torch.int32), int(max_length_q))
    if packed is None:
        return cpu_kernels.attention(
            module, query, key, value, attention_mask, **options
        )
    dropout: float = options.get("dropout", 0.0)
    scaling: float = options.get("scaling") or query.shape[-1] ** -0.5
    causal = options.get("is_causal")
    causal = bool(module.__dict__.get("is_causal") if causal is None else causal)
    window = options.get("sliding_window")
    if window is not None and window >= packed.longest:
        window = None  # it hides nothing
    # The packed row is a batch of one: [1, heads, tokens, size]. Without its padding, lengths tell the texts apart.
    # Not `query[0]`, whose derivative is a tensor of zeros and a copy into it.
    query, key, value = (
        tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)
    )  # [tokens, heads, size]
    narrow = half_dtype(query, key, value)
    if query.device.type == "cuda" and narrow is not None:
        query = query.to(narrow)
        key = key.to(narrow)
        value = value.to(narrow)
        output = _by_kernel(query, key, value, packed, dropout, scaling, causal, window)
        return output[None], None
    query, key, value = cpu_kernels.in_autocast_dtype(query, key, value)
    # A limit on the scores of all heads together, so that a piece stays in the caches.
    scores_at_once = cpu_kernels.SCORE_BYTES // query.dtype.itemsize // query.shape[1]
    pieces = cut(tuple(packed.starts.tolist()), scores_at_once, causal, window)
    # Dropout of grouped queries, where heads of keys are fewer, is left to sdpa.
    drops_here = dropout > 0.0 and key.shape[1] == query.shape[1]
    by_piece = cpu_kernels.dropped_attention if drops_here else _by_sdpa
    return by_piece(query, key, value, pieces, dropout, scaling)[None], None


def half_dtype(*tensors: Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype in which attention of these tensors runs; None: in float32, which no kernel computes.

    Autocast leaves rotary positions and norms in float32 beside values in 16 bits. Without autocast its dtype on GPUs
    is float16, so it is asked for only where it is on.
    """
    narrow = [
        tensor.dtype
        for tensor in tensors
        if tensor.dtype in (torch.bfloat16, torch.float16)
    ]
    if narrow:
        return narrow[-1]
    device = tensors[0].device.type
    return (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    )


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Packed,
    dropout: float,
    scaling: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Run flash-attn's variable-length kernel if it is installed, otherwise torch's. Shapes: [tokens, heads, size]."""
    # A window of w tokens includes the token itself; -1 means unlimited.
    left = -1 if window is None else window - 1
    sides = (left, 0 if causal else left)
    starts = packed.starts
    if is_flash_attn_2_available() and not uses_flash3():
        from flash_attn import flash_attn_varlen_func

        row = (query, key, value, starts, starts, packed.longest, packed.longest)
        attended: Tensor = flash_attn_varlen_func(
            *row,
            dropout_p=dropout,
            softmax_scale=scaling,
            causal=causal,
            window_size=sides,
        )
        return attended
    # Fewer heads of keys than of queries: torch's newer kernel takes them as they are, otherwise keys are repeated.
    grouped: dict[str, Any] = {}
    times = query.shape[1] // key.shape[1]
    if times > 1 and dropout == 0.0 and "enable_gqa" in _varlen_arguments():
        grouped["enable_gqa"] = True
    elif times > 1:
        key = key.repeat_interleave(times, dim=1)
        value = value.repeat_interleave(times, dim=1)
    row = (query, key, value, starts, starts, packed.longest, packed.longest)
    if dropout > 0.0:
        # varlen_attn has no dropout, but the operator behind it has. Its derivative draws the same mask again, from
        # the random state that it returns. Here -1 is not "unlimited": a window that is not set is left out.
        limits: dict[str, int] = {}
        if window is not None:
            limits = {"window_size_left": sides[0], "window_size_right": sides[1]}
        dropped: Tensor = _flash_forward()(
            *row, dropout, causal, False, scale=scaling, **limits
        )[0]
        return dropped
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(*row, scale=scaling, window_size=sides, **grouped)
    assert isinstance(output, Tensor)
    return output


def _flash_forward() -> Any:
    return torch.ops.aten._flash_attention_forward


# ---- on CPUs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive texts whose scores are computed together, padded to the longest among them."""

    tokens: slice
    num_texts: int
    longest: int
    slots: Tensor | None
    """Indices of the num_texts * longest slots that hold tokens; None: all."""
    visible: Tensor | None
    """Bool mask [num_texts or 1, 1, longest, longest], true where a query may attend to a key; None: everywhere."""

    def take(self, values: Tensor) -> Tensor:
        """Return the piece's tokens, padded: [texts, heads, longest, size]."""
        return self.pad(values[self.tokens])

    def put(self, result: Tensor, values: Tensor) -> None:
        """Write the real tokens of [texts, heads, longest, size] into [tokens, heads, size]."""
        if self.slots is None:
            by_text = result[self.tokens].view(
                self.num_texts, self.longest, *result.shape[1:]
            )
            by_text.copy_(values.transpose(1, 2))
        else:
            result[self.tokens] = self.unpad(values)

    def pad(self, tokens: Tensor) -> Tensor:
        """Map [tokens, heads, size] to [texts, heads, longest, size], with zeros in empty slots."""
        num_slots = self.num_texts * self.longest
        if self.slots is not None:
            tokens = tokens.new_zeros(num_slots, *tokens.shape[1:]).index_copy_(
                0, self.slots, tokens
            )
        return tokens.view(self.num_texts, self.longest, *tokens.shape[1:]).transpose(
            1, 2
        )

    def unpad(self, padded: Tensor) -> Tensor:
        """Undo `pad`: map [texts, heads, longest, size] to [tokens, heads, size]."""
        tokens = padded.transpose(1, 2).reshape(-1, padded.shape[1], padded.shape[3])
        return tokens if self.slots is None else tokens.index_select(0, self.slots)


@lru_cache(maxsize=8)
def cut(
    starts: tuple[int, ...], scores_at_once: int, causal: bool, window: int | None
) -> tuple[Piece, ...]:
    """Return the pieces of a packed row. Each has at most `scores_at_once` scores per head, or a single text.

    Cached, since all layers of a forward pass use the same pieces.
    """
    lengths = [end - start for start, end in pairwise(starts)]
    pieces = []
    first = 0
    # Greedy, in the order of the texts: their tokens stand one behind the other, so that a piece is one slice.
    while first < len(lengths):
        last = first + 1
        longest = lengths[first]
        while last < len(lengths):
            # Adding a text pads all texts of the piece to the new longest.
            wider = max(longest, lengths[last])
            if (last + 1 - first) * wider**2 > scores_at_once:
                break
            last = last + 1
            longest = wider
        pieces.append(
            _piece(
                slice(starts[first], starts[last]),
                lengths[first:last],
                longest,
                causal,
                window,
            )
        )
        first = last
    return tuple(pieces)


def _piece(
    tokens: slice, lengths: list[int], longest: int, causal: bool, window: int | None
) -> Piece:
    slot = torch.arange(longest)
    # [texts, longest]: True where a slot holds a token. Texts start at slot 0, so the padding is on the right.
    real = slot < torch.tensor(lengths)[:, None]
    slots = None if min(lengths) == longest else real.flatten().nonzero().squeeze(1)
    visible = (
        None if slots is None else real[:, None, None, :].expand(-1, 1, longest, -1)
    )
    if causal or window is not None:
        # [longest, longest]: key position less query position; positive lies in the future.
        ahead = slot[None, :] - slot[:, None]
        allowed = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        if window is not None:
            allowed = allowed & (ahead > -window) & (ahead < window)
        visible = allowed[None, None] if visible is None else visible & allowed
    return Piece(tokens, len(lengths), longest, slots, visible)


def _by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: tuple[Piece, ...],
    dropout: float,
    scaling: float,
) -> Tensor:
    sizes = [piece.tokens.stop - piece.tokens.start for piece in pieces]
    # Grouped queries: each head of keys serves `times` heads of queries.
    times = query.shape[1] // key.shape[1]
    # Joined at the end: each write into one buffer would add a copy to the graph.
    attended = []
    for piece, *parts in zip(
        pieces,
        *(torch.split(tensor, sizes) for tensor in (query, key, value)),
        strict=True,
    ):
        queries, keys, values = (piece.pad(part) for part in parts)
        if times > 1:
            keys = keys.repeat_interleave(times, dim=1)
            values = values.repeat_interleave(times, dim=1)
        scores = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=piece.visible,
            dropout_p=dropout,
            scale=scaling,
        )
        attended.append(piece.unpad(scores))
    return torch.cat(attended)


# ---- FlashAttention 3, through torch, on Hopper GPUs ----------------------------------


FLASH3_PACKAGE = "flash_attn_interface"
"""The module that FlashAttention 3 installs."""
HOPPER_CAPABILITY = (9, 0)
_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attention_dropout_prob",
)


def use_flash3(config: Mapping[str, Any], device: torch.device) -> str | None:
    """Let torch compute flash attention by FlashAttention 3 in this process from now on, or return the reason why not.

    `config`: of the model.
    """
    if (
        device.type != "cuda"
        or torch.cuda.get_device_capability(device) != HOPPER_CAPABILITY
    ):
        return "it is for Hopper GPUs"
    if find_spec(FLASH3_PACKAGE) is None:
        return "it is not installed"
    if "activate_flash_attention_impl" not in vars(torch.nn.attention):
        return "this torch cannot use it"
    if _has_attention_dropout(config):
        # It takes the place of torch's kernel for all calls, and refuses those with dropout.
        return "it has no attention dropout, and the model has"
    if not uses_flash3():
        torch.nn.attention.activate_flash_attention_impl("FA3")
    return None


def uses_flash3() -> bool:
    """Return True if torch computes flash attention by FlashAttention 3."""
    known = "current_flash_attention_impl" in vars(torch.nn.attention)
    return known and torch.nn.attention.current_flash_attention_impl() == "FA3"


def _has_attention_dropout(config: Mapping[str, Any]) -> bool:
    for name, value in config.items():
        if isinstance(value, Mapping) and _has_attention_dropout(value):
            return True
        if name in _DROPOUTS and value:
            return True
    return False
