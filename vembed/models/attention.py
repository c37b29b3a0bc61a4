"""Attention: which kernel a model gets, texts packed into one row without padding, and dropout on CPUs.

`attention` is the function that Transformers calls. Without packed texts it is sdpa. Packed texts go to a
variable-length kernel on GPUs. On CPUs the batch is cut into pieces whose score matrices fit the caches, with dropout
of our own: torch draws one random number per element, serially, which takes a third of a small encoder's step, and its
attention with dropout writes every intermediate matrix to memory. Here one 64-bit number gives four 16-bit draws, and
masks are applied to the bits of the numbers (`x & mask`, which vectorises in every dtype). The distribution is the
same. The draws differ from torch's and depend on torch's seed only.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from vembed.config.schema import ModelSection
from vembed.errors import UserError
from vembed.models.custom.modeling import PACKED, UserModelConfig

PACKED_ATTENTION = "vembed_packed"
"""Name of `attention` in Transformers' registry. A backbone loaded with it packs its texts."""
PADDED_ATTENTION = "vembed_padded"
"""Name of `attention` for padded inputs."""
IMAGE_ATTENTION = "vembed_packed_flash_images"
"""Name of `attention` for image towers. With "flash" in it, they hand over cumulative lengths."""
SHARED_PREFIX = "prefix_ids"
"""Input key: [p] token ids that precede each text of `input_ids`, which are without them."""
TOKEN_INDEX = "token_index"
"""Input key: [real tokens], their positions in the flattened input_ids. Computed on the host to avoid a GPU sync."""
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
READ_PADDING = ("canine", "convbert", "fnet", "funnel", "nystromformer", "yoso")
"""Model types whose layers mix padding into the states of a text, whatever the mask."""
_MAX_HEAD_SIZE = 256
SCORE_BYTES = 2**21
"""Bytes of one piece's score matrices."""
DRAW_LEVELS = 2**16
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the number of bytes of a number."""


# ---- which kernel ------------------------------------------------------------------------------------------------


def attention_kernel(
    option: str,
    backbone: type[PreTrainedModel],
    device: torch.device,
    *,
    half: bool,
) -> tuple[str | None, str]:
    """Return the attention implementation to load and the reason; None: the model's default.

    `option`: attn_implementation. `half`: attention runs in 16 bits.
    """
    if option == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError(
            "attn_implementation: flash_attention_2 needs the package flash-attn and a CUDA GPU, and at least one "
            "is missing here; use sdpa (or auto)"
        )
    if option != "auto":
        return option, "attn_implementation in the config"
    problem = why_no_flash(device, half=half)
    if not backbone._supports_flash_attn:
        problem = "this model does not support flash-attn"
    elif not is_flash_attn_2_available():
        problem = problem or "flash-attn is not installed"
    if problem is None:
        return "flash_attention_2", "auto: flash-attn is installed"
    return "sdpa" if backbone._supports_sdpa else None, f"auto: {problem}"


def why_padded(
    options: ModelSection,
    model: PretrainedConfig,
    device: torch.device,
    *,
    half: bool,
) -> str | None:
    """Return the reason for padding texts with this model and device; None: they are packed."""
    if options.padding_free is False:
        return "padding_free: false"
    if isinstance(model, UserModelConfig):
        if PACKED in model.inputs:
            return None
        return f"the forward of {model.class_name} takes no {PACKED}"
    if model.model_type not in MODEL_TYPES:
        return f"{model.model_type} is not among the models that are tested without padding"
    if options.attn_implementation in ("eager", "sdpa"):
        return f"attn_implementation: {options.attn_implementation}"
    if device.type == "cpu":
        return None
    # DistilBERT's dim is hidden_size too.
    width = model.hidden_size // model.num_attention_heads
    head_size = model.to_dict().get("head_dim") or width
    return why_no_flash(device, half=half, head_size=int(head_size))


def why_no_flash(
    device: torch.device,
    *,
    half: bool,
    head_size: int = 0,
) -> str | None:
    """Return the reason why no flash attention runs on a device, with heads of a size if it is given; None: it does."""
    if head_size > _MAX_HEAD_SIZE or head_size % 8:
        return f"flash attention does not support a head size of {head_size}"
    if device.type != "cuda":
        return "no CUDA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than flash attention allows"
    return None if half else "flash attention does not support float32"


def register(name: str, *, compiled_layers: bool = False) -> str:
    """Register `attention` with Transformers under a name, with its masks, and return the name.

    `compiled_layers`: compiled layers call it as it is. Its kernels are whole already, and the lengths of the texts
    would make the compiler start again.
    """
    function: Any = attention
    if compiled_layers:
        function = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask_without_wait)
    return name


def takes_registered(model: type[PreTrainedModel]) -> bool:
    """Return whether a class looks up its attention where `register` puts it. Falcon and Data2VecVision have a table of
    their own."""
    module = sys.modules[model.__module__]
    looks_up = "ALL_ATTENTION_FUNCTIONS" in vars(module)
    return looks_up or model._supports_attention_backend


def mask_without_wait(
    *args: Any,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Return the mask that sdpa gets, or None where it needs none. The values of a mask on a GPU are not read.

    Collation leaves out a mask of ones, so that a mask which is given hides something.
    """
    if attention_mask is not None:
        options["allow_is_causal_skip"] = False
        options["allow_is_bidirectional_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **options)
    return mask


def takes_packed_texts(backbone: Any) -> bool:
    """Return True if the backbone takes packed texts."""
    return bool(backbone.config._attn_implementation == PACKED_ATTENTION)


def real_tokens(mask: Tensor) -> Tensor:
    """Return the positions [real tokens] of the ones of a mask [n, tokens], counted in the flattened mask."""
    return mask.flatten().nonzero().squeeze(1)


# ---- the function that layers call -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """Boundaries of the texts in a packed row: with lengths 3 and 2, starts is [0, 3, 5] and longest 3."""

    starts: Tensor
    """int32 [n + 1]: start of each text, and the end of the last one."""
    longest: int
    shared: Shared | None = None
    """Set where the texts begin with the same tokens, which the row holds once. `starts` and `longest` are those of the
    whole texts."""


@dataclass(frozen=True)
class Shared:
    """Indices of causal texts with a shared prefix: a row [prefix, rest of each text], and whole texts end to end.

    The layers compute the row. Only attention computes the whole texts, so that every kernel takes them.
    """

    whole: Tensor
    """int64 [tokens of the whole texts]: where each token is in the row."""
    row: Tensor
    """int64 [tokens of the row]: where each token is in the whole texts. The prefix is that of the first text, which
    sees nothing behind it, as in all others."""


def shared_indices(
    starts: Tensor,
    texts: Tensor,
    prefix: int,
) -> Shared:
    """Return the indices for a prefix of so many tokens.

    starts: [n + 1] start of the rest of each text among all rests, end to end. texts: [tokens of the rests], the
    number of each token's text.
    """
    num_texts = len(starts) - 1
    num_tokens = len(texts)
    device = starts.device
    tokens = torch.arange(num_tokens, device=device)
    prefix_tokens = torch.arange(prefix, device=device)
    # Behind the prefix of its own text and of each text before it.
    rest_at = tokens + prefix * (texts + 1)
    whole_starts = starts[:-1] + prefix * torch.arange(num_texts, device=device)
    prefixes_at = whole_starts[:, None] + prefix_tokens
    whole = tokens.new_empty(num_tokens + num_texts * prefix)
    whole[prefixes_at] = prefix_tokens.expand(num_texts, -1)
    whole[rest_at] = prefix + tokens
    return Shared(whole, torch.cat([prefix_tokens, rest_at]))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for Transformers: for padded inputs, packed texts, and all images of a batch in one row.

    `packed` is passed through the layers of texts. Image towers hand over `cu_seq_lens_q` and `max_length_q`, which say
    the same (older ones call this for each image, without either).

    query, key, value: [n, heads, length, size], of packed inputs with n = 1. Returns [n, length, heads, size].
    """
    num_rows, num_heads, length, size = query.shape
    causal = bool(module.__dict__.get("is_causal") if is_causal is None else is_causal)
    if cu_seq_lens_q is not None and max_length_q is not None:
        packed = Packed(cu_seq_lens_q.to(torch.int32), int(max_length_q))
    # sdpa is slow with dropout on a CPU alone. It handles what the pieces of a padded batch do not: grouped queries,
    # keys of another length, and causal attention without a mask.
    if packed is None and (
        dropout in (0.0, 1.0)
        or query.device.type != "cpu"
        or key.shape != query.shape
        or (causal and attention_mask is None)
    ):
        output, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **options,
        )
        return output, None
    scaling = scaling or size**-0.5
    # [n * length, heads, size]: one text behind the other, of packed texts without padding. Not `query[0]`, whose
    # derivative is a tensor of zeros and a copy into it.
    query, key, value = (
        tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)
    )
    narrow = half_dtype(query, key, value)
    if narrow is not None:
        query, key, value = (tensor.to(narrow) for tensor in (query, key, value))
    shared = None if packed is None else packed.shared
    if shared is not None:
        query, key, value = (
            tensor.index_select(0, shared.whole) for tensor in (query, key, value)
        )
    score_bytes = num_heads * query.dtype.itemsize
    pieces: Sequence[Piece]
    if packed is None:
        # Consecutive rows whose scores [rows, heads, length, length] have at most SCORE_BYTES, at least one row.
        step = max(1, SCORE_BYTES // max(1, score_bytes * length**2))
        pieces = []
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            visible = attention_mask
            if visible is not None and len(visible) > 1:
                visible = visible[start:stop]
            tokens = slice(start * length, stop * length)
            pieces.append(Piece(tokens, stop - start, length, None, visible))
    else:
        window = sliding_window
        if window is not None and not causal:
            # The masks of Transformers for decoders that see all tokens include the one at the window's end.
            window += 1
        if window is not None and window >= packed.longest:
            window = None  # it hides nothing
        if query.device.type == "cuda" and narrow is not None:
            output = by_kernel(
                query, key, value, packed, dropout, scaling, causal, window
            )
            if shared is not None:
                output = output.index_select(0, shared.row)
            return output[None], None
        # A limit on the scores of all heads together, so that a piece stays in the caches.
        starts = tuple(packed.starts.tolist())
        pieces = cut(starts, SCORE_BYTES // score_bytes, causal, window)
    # Dropout of grouped queries, where heads of keys are fewer, is left to sdpa.
    if dropout > 0.0 and key.shape[1] == num_heads:
        output = _DroppedAttention.apply(query, key, value, pieces, dropout, scaling)  # type: ignore[no-untyped-call]
    else:
        output = sdpa_by_piece(query, key, value, pieces, dropout, scaling)
    if shared is not None:
        output = output.index_select(0, shared.row)
    return output.view(num_rows, length, num_heads, -1), None


def half_dtype(*tensors: Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype in which attention of these tensors runs; None: in float32, which no kernel computes.

    Autocast leaves rotary positions and norms in float32 beside values in 16 bits. Without autocast its dtype on GPUs
    is float16, so it is asked for only where it is on.
    """
    for tensor in reversed(tensors):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            return tensor.dtype
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Packed,
    dropout: float,
    scaling: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Run torch's variable-length flash attention. Shapes: [tokens, heads, size]."""
    from torch.nn.attention.varlen import varlen_attn  # a slow import

    # A window of w tokens includes the token itself; -1 means unlimited.
    left = -1 if window is None else window - 1
    sides = (left, 0 if causal else left)
    # Fewer heads of keys than of queries: torch's newer kernel takes them as they are, otherwise keys are repeated.
    grouped: dict[str, Any] = {}
    times = query.shape[1] // key.shape[1]
    arguments = inspect.signature(varlen_attn).parameters
    if times > 1 and dropout == 0.0 and "enable_gqa" in arguments:
        grouped["enable_gqa"] = True
    elif times > 1:
        key = key.repeat_interleave(times, dim=1)
        value = value.repeat_interleave(times, dim=1)
    boundaries = (packed.starts, packed.starts, packed.longest, packed.longest)
    row = (query, key, value, *boundaries)
    if dropout > 0.0:
        # varlen_attn has no dropout, but the operator behind it has. Its derivative draws the same mask again, from
        # the random state that it returns. Here -1 is not "unlimited": a window that is not set is left out.
        limits: dict[str, int] = {}
        if window is not None:
            limits = {"window_size_left": sides[0], "window_size_right": sides[1]}
        dropped: Tensor = torch.ops.aten._flash_attention_forward(
            *row, dropout, causal, False, scale=scaling, **limits
        )[0]
        return dropped
    output = varlen_attn(*row, scale=scaling, window_size=sides, **grouped)
    assert isinstance(output, Tensor)
    return output


# ---- rotary positions on GPUs ------------------------------------------------------------------------------------


_ROTARY_MODELS = (
    "eurobert",
    "gemma",
    "gemma2",
    "gemma3",
    "llama",
    "mistral",
    "modernbert",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_vl",
)
"""Models of Transformers whose function `apply_rotary_pos_emb` has the formula x * cos + rotate_half(x) * sin."""


def fuse_rotary_positions(backbone: nn.Module) -> None:
    """Let the backbone's model of Transformers apply rotary positions by fewer kernels on GPUs, in this process."""
    names = {type(module).__module__ for module in backbone.modules()}
    for model in _ROTARY_MODELS:
        name = f"transformers.models.{model}.modeling_{model}"
        library: Any = sys.modules.get(name)
        if name in names and not isinstance(library.apply_rotary_pos_emb, partial):
            plain = library.apply_rotary_pos_emb
            library.apply_rotary_pos_emb = partial(rotate_both, plain)


def rotate_both(
    plain: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Apply rotary positions to queries and keys, in their dtypes. `plain`: the function of Transformers."""
    # The compiler fuses the plain formula.
    if query.device.type != "cuda" or torch.compiler.is_compiling():
        return plain(query, key, cos, sin, unsqueeze_dim=unsqueeze_dim)
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    queries = _Rotated.apply(query, cos, sin)  # type: ignore[no-untyped-call]
    keys = _Rotated.apply(key, cos, sin)  # type: ignore[no-untyped-call]
    return queries, keys


class _Rotated(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin for x = [first, second], where rotate_half(x) = [-second, first].

    Three kernels in each direction: the second term is added to each half in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        sin_first, sin_second = sin.chunk(2, dim=-1)
        return _rotated(values, cos, sin_first, sin_second, sign=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        sin_first, sin_second = sin.chunk(2, dim=-1)
        # The transposed rotation.
        result = _rotated(gradients[0], cos, sin_second, sin_first, sign=-1)
        return result, None, None


def _rotated(
    values: Tensor,
    cos: Tensor,
    first_sin: Tensor,
    second_sin: Tensor,
    sign: int,
) -> Tensor:
    """Return values * cos + sign * [-second * first_sin, first * second_sin] for values = [first, second]."""
    first, second = values.chunk(2, dim=-1)
    output = torch.mul(values, cos, out=torch.empty_like(values))
    output_first, output_second = output.chunk(2, dim=-1)
    output_first.addcmul_(second, first_sin, value=-sign)
    output_second.addcmul_(first, second_sin, value=sign)
    return output


# ---- pieces on CPUs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Consecutive texts whose scores are computed together, padded to the longest among them."""

    tokens: slice
    num_texts: int
    longest: int
    slots: Tensor | None
    """Indices of the num_texts * longest slots that hold tokens; None: all."""
    visible: Tensor | None
    """Mask that broadcasts to the scores [num_texts, heads, longest, longest]: bool, true where a query may attend to a
    key, or added to them; None: everywhere."""

    def pad(self, tokens: Tensor) -> Tensor:
        """Map the piece's [tokens, heads, size] to [texts, heads, longest, size], with zeros in empty slots."""
        if self.slots is not None:
            padded = tokens.new_zeros(self.num_texts * self.longest, *tokens.shape[1:])
            tokens = padded.index_copy_(0, self.slots, tokens)
        by_text = tokens.view(self.num_texts, self.longest, *tokens.shape[1:])
        return by_text.transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """Undo `pad`: map [texts, heads, longest, size] to [tokens, heads, size]."""
        _, num_heads, _, size = padded.shape
        tokens = padded.transpose(1, 2).reshape(-1, num_heads, size)
        return tokens if self.slots is None else tokens.index_select(0, self.slots)

    def put(self, result: Tensor, padded: Tensor) -> None:
        """Write the real tokens of [texts, heads, longest, size] into [all tokens, heads, size]."""
        if self.slots is None:
            # One copy, not two: `unpad` would make the transposed values contiguous first.
            self.pad(result[self.tokens]).copy_(padded)
        else:
            result[self.tokens] = self.unpad(padded)


@lru_cache(maxsize=8)
def cut(
    starts: tuple[int, ...],
    scores_at_once: int,
    causal: bool,
    window: int | None,
) -> tuple[Piece, ...]:
    """Return the pieces of a packed row. Each has at most `scores_at_once` scores per head, or a single text.

    Cached, since all layers of a forward pass use the same pieces.
    """
    lengths = [stop - start for start, stop in pairwise(starts)]
    pieces = []
    first = 0
    # Greedy, in the order of the texts: their tokens stand one behind the other, so that a piece is one slice.
    while first < len(lengths):
        stop = first + 1
        longest = lengths[first]
        while stop < len(lengths):
            # Adding a text pads all texts of the piece to the new longest.
            wider = max(longest, lengths[stop])
            if (stop + 1 - first) * wider**2 > scores_at_once:
                break
            stop += 1
            longest = wider
        of_piece = lengths[first:stop]
        slot = torch.arange(longest)
        slots = None
        visible = None
        if min(of_piece) < longest:
            # [texts, longest]: True where a slot holds a token. Texts start at slot 0, so the padding is on the right.
            real = slot < torch.tensor(of_piece)[:, None]
            slots = real_tokens(real)
            visible = real[:, None, None, :].expand(-1, 1, longest, -1)
        if causal or window is not None:
            # [longest, longest]: key position less query position; positive lies in the future.
            ahead = slot[None, :] - slot[:, None]
            allowed = ahead <= (0 if causal else longest)
            if window is not None:
                allowed = allowed & (ahead > -window) & (ahead < window)
            visible = allowed[None, None] if visible is None else visible & allowed
        tokens = slice(starts[first], starts[stop])
        pieces.append(Piece(tokens, len(of_piece), longest, slots, visible))
        first = stop
    return tuple(pieces)


def sdpa_by_piece(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Sequence[Piece],
    dropout: float,
    scaling: float,
) -> Tensor:
    """Return torch's attention [tokens, heads, size], piece by piece."""
    sizes = [piece.tokens.stop - piece.tokens.start for piece in pieces]
    # Grouped queries: each head of keys serves `times` heads of queries.
    times = query.shape[1] // key.shape[1]
    # Split at once and joined at the end: slices and writes into one buffer would each add a copy to the graph.
    splits = [torch.split(tensor, sizes) for tensor in (query, key, value)]
    attended = []
    for piece, *parts in zip(pieces, *splits, strict=True):
        queries, keys, values = (piece.pad(part) for part in parts)
        if times > 1:
            keys = keys.repeat_interleave(times, dim=1)
            values = values.repeat_interleave(times, dim=1)
        padded = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=piece.visible,
            dropout_p=dropout,
            scale=scaling,
        )
        attended.append(piece.unpad(padded))
    return torch.cat(attended)


class _DroppedAttention(torch.autograd.Function):
    """dropout(softmax(q k^T * scaling + mask)) v [tokens, heads, size], computed piece by piece.

    Saves the probabilities with their draws for the backward pass, so nothing is drawn or computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Sequence[Piece],
        p: float,
        scaling: float,
    ) -> Tensor:
        num_heads = query.shape[1]
        output = value.new_empty(*query.shape[:-1], value.shape[-1])
        saved: list[Tensor] = []
        for piece in pieces:
            # Saved as the backward pass needs them: [texts * heads, longest, size], copied once, queries scaled.
            queries, keys, values = (
                piece.pad(tensor[piece.tokens]).flatten(0, 1).contiguous()
                for tensor in (query, key, value)
            )
            queries = queries * scaling
            scores = torch.bmm(queries, keys.transpose(1, 2))
            if piece.visible is not None:
                # A view, so that the mask [n or 1, 1, longest, longest] is applied to all heads of a text in place.
                by_head = scores.view(-1, num_heads, *scores.shape[1:])
                if piece.visible.dtype == torch.bool:
                    # The lowest finite value, not -inf: a row of padding that sees nothing must not become NaN.
                    lowest = torch.finfo(scores.dtype).min
                    by_head.masked_fill_(~piece.visible, lowest)
                else:
                    by_head += piece.visible
            probabilities = torch.softmax(scores, dim=-1)
            keep_mask, ctx.scale = keep_draws(
                probabilities.shape, p, probabilities.dtype
            )
            integers = probabilities.view(keep_mask.dtype)
            # Negative where dropout keeps a probability. The lowest integer is the sign bit, which no probability has:
            # to add it sets it, in one pass.
            signed = torch.add(
                integers, keep_mask, alpha=torch.iinfo(integers.dtype).min
            )
            integers.mul_(keep_mask)  # of the probabilities, in place
            # The factor for kept elements is applied to the small output instead of the probabilities.
            attended = torch.bmm(probabilities, values).mul_(ctx.scale)
            padded = attended.view(piece.num_texts, num_heads, piece.longest, -1)
            piece.put(output, padded)
            saved += queries, keys, values, signed.view(probabilities.dtype)
        ctx.save_for_backward(*saved)
        ctx.pieces = pieces
        ctx.scaling = scaling
        ctx.shapes = query.shape, key.shape, value.shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        # One buffer for each of query, key and value. The pieces cover all their tokens, so nothing stays unset.
        results = [gradients[0].new_empty(shape) for shape in ctx.shapes]
        for index, piece in enumerate(ctx.pieces):
            queries, keys, values, signed = saved[4 * index : 4 * index + 4]
            padded = piece.pad(gradients[0][piece.tokens])
            gradient = padded.flatten(0, 1).contiguous() * ctx.scale
            integers = signed.view(BITS[signed.dtype.itemsize])
            # An arithmetic shift fills a number with its sign: all bits where it is kept.
            keep_mask = integers >> (8 * signed.dtype.itemsize - 1)
            all_but_sign = torch.iinfo(integers.dtype).max
            probabilities = (integers & all_but_sign).view(signed.dtype)
            # Chain rule in reverse order: d(dropped probabilities), d(probabilities), d(scores), then query and key.
            through = masked_(torch.bmm(gradient, values.transpose(1, 2)), keep_mask)
            scores = torch.ops.aten._softmax_backward_data(
                through, probabilities, -1, probabilities.dtype
            )
            dropped = masked_(probabilities, keep_mask)
            grads = (
                # Of the queries before they were scaled.
                torch.bmm(scores, keys).mul_(ctx.scaling),
                torch.bmm(scores.transpose(1, 2), queries),
                torch.bmm(dropped.transpose(1, 2), gradient),
            )
            for result, grad in zip(results, grads, strict=True):
                # [texts * heads, longest, size] -> [texts, heads, longest, size]
                by_head = grad.view(*padded.shape[:2], *grad.shape[1:])
                piece.put(result, by_head)
        return *results, None, None, None


# ---- bulk draws of dropout ---------------------------------------------------------------------------------------


def keep_draws(
    shape: torch.Size,
    p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, float]:
    """Return dropout's draws for numbers of `dtype`, integers of their size, 1 with probability 1 - p, else 0; and the
    factor for what is kept, 1 / (1 - p).

    `p` is rounded to a multiple of 2^-16.
    """
    # As an array: no value is read from a device.
    seed = torch.empty(1, dtype=torch.int64).random_().numpy()
    count = shape.numel()
    numbers = np.random.SFC64(seed).random_raw((count + 3) // 4)
    draws = torch.from_numpy(numbers.view(np.int16))[:count]
    # Signed 16-bit draws are uniform on [-32768, 32767], so the threshold for "keep" is shifted by DRAW_LEVELS / 2.
    kept_levels = round((1.0 - p) * DRAW_LEVELS)
    draws.lt_(kept_levels - DRAW_LEVELS // 2)
    integers = draws.to(BITS[dtype.itemsize])
    return integers.view(shape), DRAW_LEVELS / kept_levels


def masked_(values: Tensor, mask: Tensor) -> Tensor:
    """Set `values` to 0 where `mask` is 0. Elsewhere all bits of the mask are set."""
    values.view(mask.dtype).bitwise_and_(mask)
    return values


class CpuDropout(nn.Dropout):
    """nn.Dropout with bulk draws on CPUs; unchanged on other devices."""

    def forward(self, values: Tensor) -> Tensor:
        """Apply dropout as nn.Dropout does, with other draws."""
        draws_nothing = not self.training or self.p in (0.0, 1.0)
        if draws_nothing or values.device.type != "cpu":
            return super().forward(values)
        dropped: Tensor = _Dropped.apply(values, self.p)  # type: ignore[no-untyped-call]
        return dropped


class _Dropped(torch.autograd.Function):
    """values * mask * scale, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        p: float,
    ) -> Tensor:
        mask, ctx.scale = keep_draws(values.shape, p, values.dtype)
        mask.neg_()  # the negative of 1 has all bits set
        ctx.save_for_backward(mask)
        return masked_(values * ctx.scale, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return masked_(gradients[0] * ctx.scale, mask), None
