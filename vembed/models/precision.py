"""Precision and memory: dtypes of weights, recomputation, compilation, arithmetic in bfloat16 with float32 weights,
4-bit weights, and training through int8 rounding."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from vembed.errors import UserError
from vembed.models.families.backbones import (
    StateDict,
    linear_names_inside_layers,
    unwrapped_name,
)
from vembed.models.families.description import ModelDescription
from vembed.models.families.model_files import read_header
from vembed.parallel.devices import quieten_bitsandbytes

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "pure_bfloat16": torch.bfloat16,
}
"""Values of torch_dtype. `auto` is not among them: the dtype of the files."""
_NAMES_IN_FILES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def saved_dtype(torch_dtype: str, description: ModelDescription) -> torch.dtype | None:
    """Return the dtype to store the trained model in; None: the dtype that its weights have."""
    if torch_dtype in DTYPES:
        return DTYPES[torch_dtype]
    folders = {description.folder, description.image_folder}
    dtypes = {dtype_in_files(folder) for folder in folders}
    return dtypes.pop() if len(dtypes) == 1 and torch.float32 not in dtypes else None


def dtype_in_files(folder: Path) -> torch.dtype:
    """Return the most frequent weight dtype in a folder's files, whatever its config.json says."""
    sizes: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        for tensor in read_header(path)[0].values():
            if tensor.dtype in _NAMES_IN_FILES:
                sizes[tensor.dtype] += tensor.size
    return _NAMES_IN_FILES[sizes.most_common(1)[0][0]] if sizes else torch.float32


def at_least_float32(values: Tensor) -> Tensor:
    """Return values in float32, or float64 as they are."""
    return values if values.dtype == torch.float64 else values.float()


def enable_checkpointing(layers: list[nn.Module]) -> None:
    """Recompute each layer in the backward pass of training mode, also layers without trainable parameters."""
    for layer in layers:
        layer.forward = partial(_recomputed, layer, layer.forward)


def _recomputed(
    layer: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not layer.training:
        return forward(*args, **kwargs)
    # Reentrant checkpointing gives no gradient if no input requires grad, as below frozen embeddings with adapters.
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def compile_layers(layers: list[nn.Module], backend: Any = "inductor") -> None:
    """Compile the forward of each layer, with dynamic numbers of rows and tokens.

    Before `enable_checkpointing`: the compiler gives up on a checkpoint with a call outside of its graphs, such as
    attention of packed texts.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


# ---- arithmetic in bfloat16 with float32 weights -------------------------------------
#
# Linear layers use copies of their weights, and norms and embeddings give bfloat16. For training without shards, and
# for use with and without; in training FSDP2 does the same by its policy.
#
# Autocast converts every weight in every forward pass and leaves the hidden states between the layers in float32. Here
# weights are converted once while they stay the same (`WeightCopies.held`), and hidden states are bfloat16 throughout.
# Weights, their gradients, the statistics of norms, softmax, pooling and loss stay float32. Autocast stays on for the
# parts of a model that are not listed here.


_RMS_NORMS = frozenset(
    {
        "LlamaRMSNorm",
        "MistralRMSNorm",
        "Qwen2RMSNorm",
        "Qwen3RMSNorm",
        "Qwen2VLRMSNorm",
        "Qwen2_5_VLRMSNorm",
        "Qwen3VLTextRMSNorm",
        "EuroBertRMSNorm",
    }
)
"""Classes with the formula weight * x / sqrt(mean(x ** 2) + variance_epsilon)."""


class WeightCopies:
    """bfloat16 copies of a model's weights, each made on first use. On GPUs the first use makes all of them."""

    def __init__(self) -> None:
        self.by_weight: dict[tuple[int, int, int], Tensor] = {}
        """By the weight, its memory and its version, which torch counts up with every change of it."""
        self.layers: list[nn.Module] = []
        """Layers that compute with copies of their weights."""
        self.num_holders = 0
        self.may_keep = True
        """False for a sharded model, which gathers weights for a layer alone: kept copies would be all of it."""
        self.waiting: dict[nn.Parameter, Tensor] | None = None
        """bfloat16 gradients of this backward pass, which are converted together. None: each is converted at once."""

    def of(self, weight: Tensor) -> Tensor:
        """Return the copy of a weight."""
        copy = self.by_weight.get(_version_of(weight))
        if copy is not None:
            return copy
        # Outside `held` weights may change at any time, and old copies would pile up.
        if not self.num_holders or not self.may_keep:
            return weight.detach().to(torch.bfloat16)
        # This weight first, and on a GPU all others of `layers` that have no copy yet: one kernel converts many weights.
        missing = {_version_of(weight): weight}
        if weight.is_cuda:
            for layer in self.layers:
                for other in layer.parameters(recurse=False):
                    version = _version_of(other)
                    if other.device == weight.device and version not in self.by_weight:
                        missing[version] = other
        weights = list(missing.values())
        copies = [torch.empty_like(each, dtype=torch.bfloat16) for each in weights]
        with torch.no_grad():
            torch._foreach_copy_(copies, weights)
        self.by_weight.update(zip(missing, copies, strict=True))
        return copies[0]

    def trained(self, weight: Tensor | None) -> Tensor | None:
        """Return the copy of a weight, through which the weight gets its gradient."""
        if weight is None:
            return None
        copy: Tensor = _Copied.apply(weight, self.of(weight), self)  # type: ignore[no-untyped-call]
        return copy

    @contextmanager
    def held(self) -> Iterator[None]:
        """Convert each weight once inside the with-block, in which weights must not change."""
        self.num_holders += 1
        try:
            yield
        finally:
            self.num_holders -= 1
            if not self.num_holders:
                self.by_weight.clear()

    @contextmanager
    def grouped_gradients(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Convert and add the gradients of the backward pass inside the with-block together.

        A GPU takes one kernel for many tensors, where autograd starts one for each. Inside, `.grad` of the parameters
        is that of this backward pass alone, so they take the memory of their gradients twice.
        """
        earlier = {}
        for parameter in parameters:
            if parameter.grad is not None:
                earlier[parameter] = parameter.grad
                parameter.grad = None
        waiting: dict[nn.Parameter, Tensor] = {}
        self.waiting = waiting
        try:
            yield
        finally:
            self.waiting = None
        with torch.no_grad():
            converted = [torch.empty_like(weight) for weight in waiting]
            if waiting:
                torch._foreach_copy_(converted, list(waiting.values()))
            _add_gradients(dict(zip(waiting, converted, strict=True)))
            _add_gradients(earlier)


def _add_gradients(gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Add gradients to those that the parameters have."""
    sums = []
    summands = []
    for parameter, gradient in gradients.items():
        if parameter.grad is not None:
            sums.append(gradient)
            summands.append(parameter.grad)
        parameter.grad = gradient
    if sums:
        torch._foreach_add_(sums, summands)


def _version_of(weight: Tensor) -> tuple[int, int, int]:
    # An id may be reused, `.data =` changes the memory alone, and an optimizer step the version alone.
    return id(weight), weight.data_ptr(), weight._version


class _Copied(torch.autograd.Function):
    """The bfloat16 copy of a float32 weight, which gets the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        copy: Tensor,
        copies: WeightCopies,
    ) -> Tensor:
        ctx.weight = weight
        ctx.copies = copies
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        waiting = ctx.copies.waiting
        # A layer that runs twice has two gradients, which autograd adds.
        if waiting is None or ctx.weight in waiting:
            return gradients[0].float(), None, None
        waiting[ctx.weight] = gradients[0]
        return None, None, None


class Bf16Linear(nn.Linear):
    """nn.Linear with float32 weights that computes in bfloat16, whatever its input is."""

    copies: WeightCopies

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to `input`, converted to bfloat16."""
        bias = None if self.bias is None else self.copies.of(self.bias)
        output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            input.to(torch.bfloat16),
            self.weight,
            self.bias,
            self.copies.of(self.weight),
            bias,
        )
        return output


class _Linear(torch.autograd.Function):
    """A linear layer in bfloat16 whose weight and bias get float32 gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        _, _, weight_copy, bias_copy = (
            parameters  # weight and bias are given for their gradients
        )
        assert weight_copy is not None
        ctx.save_for_backward(values, weight_copy)
        return functional.linear(values, weight_copy, bias_copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)  # [all tokens, out_features]
        # What adds up over micro-batches and ranks is float32. Kernels of GPUs write it themselves. On CPUs each product
        # is rounded to bfloat16 once.
        of_values, of_weight, of_bias, *_ = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * 5
        if of_values:
            grads[0] = torch.mm(gradient, weight).view_as(values)
        if of_weight:
            inputs = values.flatten(0, -2)
            if gradient.is_cuda:
                grads[1] = torch.mm(gradient.t(), inputs, out_dtype=torch.float32)
            else:
                grads[1] = torch.mm(gradient.t(), inputs).float()
        if of_bias and gradient.is_cuda:
            grads[2] = gradient.sum(0, dtype=torch.float32)
        elif of_bias:
            # torch sums each few columns over all rows, from memory page to memory page. A product reads the rows in
            # order. Both accumulate in float32.
            ones = gradient.new_ones(1, len(gradient))
            grads[2] = torch.mm(ones, gradient)[0].float()
        return tuple(grads)


class Bf16LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with float32 weights and statistics, and output in bfloat16."""

    copies: WeightCopies

    def forward(self, input: Tensor) -> Tensor:
        """Apply the norm to float32 or bfloat16."""
        if not input.is_cuda:
            return super().forward(input).to(torch.bfloat16)
        # Kernels of GPUs take one dtype, and autocast makes that float32: the input would be widened, kept so for the
        # backward pass, and the output narrowed again. The statistics are float32 in any case.
        weight = self.copies.trained(self.weight)
        bias = self.copies.trained(self.bias)
        with torch.autocast(input.device.type, enabled=False):
            return functional.layer_norm(
                input.to(torch.bfloat16), self.normalized_shape, weight, bias, self.eps
            )


class FusedRMSNorm(nn.Module):
    """The RMSNorm of Llama, Qwen and Mistral, in one kernel of a GPU instead of seven, in the dtype of input and weight.

    With `copies` its output is bfloat16. Transformers multiplies the 16-bit result by the float32 weight, so that every
    norm widens what follows it.
    """

    weight: nn.Parameter
    variance_epsilon: float
    copies: WeightCopies | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return weight * x / sqrt(mean(x ** 2) + epsilon)."""
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        weight: Any = self.weight
        if self.copies is not None:
            dtype = torch.bfloat16
            weight = self.copies.trained(self.weight)
        values = hidden_states.to(dtype)
        # The kernel takes one dtype, which autocast would change.
        with torch.autocast(values.device.type, enabled=False):
            return functional.rms_norm(
                values, weight.shape, weight.to(dtype), float(self.variance_epsilon)
            )


class Bf16Embedding(nn.Embedding):
    """nn.Embedding with float32 weights and output in bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up rows."""
        return super().forward(input).to(torch.bfloat16)


def fuse_norms(backbone: nn.Module) -> None:
    """Let the RMS norms of decoders take one kernel of a GPU each, in any dtype."""
    for module in backbone.modules():
        if type(module).__name__ in _RMS_NORMS:
            module.__class__ = FusedRMSNorm


def use_bf16(backbone: nn.Module) -> None:
    """Let linear layers and norms with float32 weights compute in bfloat16."""
    copies = WeightCopies()
    for name, module in backbone.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype != torch.float32:
            continue
        kind = type(module)
        # The class is changed in place, so that parameters, names and hooks stay. Of exactly these classes: a subclass
        # may compute something else.
        if kind is nn.Embedding and name.endswith("embed_tokens"):
            # Of a decoder, which hands it on from layer to layer.
            module.__class__ = Bf16Embedding
            continue
        if kind is nn.Linear:
            module.__class__ = Bf16Linear
        elif kind is nn.LayerNorm:
            module.__class__ = Bf16LayerNorm
        elif kind is FusedRMSNorm or kind.__name__ in _RMS_NORMS:
            module.__class__ = FusedRMSNorm
        else:
            continue
        vars(module)["copies"] = copies
        copies.layers.append(module)


def weight_in_use(layer: Any) -> Tensor:
    """Return the weight that a linear layer computes with: the bfloat16 copy, if it has one."""
    weight = layer.weight
    return layer.copies.of(weight) if isinstance(layer, Bf16Linear) else weight


def bf16_weights_of(model: nn.Module) -> WeightCopies:
    """Return the copies of a model's weights, which all layers of its backbone share; new ones for other models."""
    for module in model.modules():
        if isinstance(module, Bf16Linear):
            return module.copies
    return WeightCopies()


# ---- gradients of token embeddings ---------------------------------------------------


MIN_TABLE_ROWS = 8192
"""Smaller tables are about as large as the rows of a micro-batch."""


def use_row_gradients(backbone: nn.Module) -> None:
    """Let large trained nn.Embedding modules give gradients by rows. `.grad` stays dense.

    For models that are not sharded, on CPUs.
    """
    for module in backbone.modules():
        # Exactly this class: a subclass may compute something else.
        if (
            type(module) is nn.Embedding
            and module.weight.requires_grad
            and module.num_embeddings >= MIN_TABLE_ROWS
            and not module.scale_grad_by_freq
        ):
            module.sparse = True
            module.weight.register_post_accumulate_grad_hook(_make_dense)  # type: ignore[no-untyped-call]


def _make_dense(weight: torch.Tensor) -> None:
    """Convert the first gradient of a step. torch adds later ones to it in place, row by row."""
    if weight.grad is not None and weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()


# ---- 4-bit weights -------------------------------------------------------------------------------------------------


def four_bit(backbone: nn.Module, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the config to load the linear layers inside the transformer layers in 4 bits (nf4, double quantisation). All
    other layers keep their dtype. `backbone`: the model without weights.

    The 4-bit values are packed into a tensor of the compute dtype. FSDP gathers parameters in the compute dtype, and would
    convert, and so corrupt, a packed tensor of another one.
    """
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "use_qlora: true needs the package bitsandbytes; install it, or set use_qlora: false"
        )
    inside = linear_names_inside_layers(backbone)
    skip = []
    for name, module in backbone.named_modules():
        if name in inside and isinstance(module, Conv1D):
            raise UserError(
                f"use_qlora: {type(backbone).__name__} stores its layers transposed, which 4 bits cannot; use use_lora"
            )
        if isinstance(module, nn.Linear) and name not in inside:
            skip.append(name)
    quieten_bitsandbytes()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
        llm_int8_skip_modules=skip,
    )


def keep_trainable_layout(model: nn.Module) -> None:
    """Keep the layout of 4-bit weights on CPUs: evaluation would repack them into a layout that cannot be trained."""
    for module in model.modules():
        if is_quantized(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def is_quantized(module: nn.Module) -> bool:
    """Return True for a linear layer in 4 bits."""
    return isinstance(module, nn.Linear) and "quant_state" in vars(module)


def dequantized(module: Any, packed: Tensor) -> Tensor:
    """Return the dequantised weight [out, in] of a 4-bit layer in float32."""
    from bitsandbytes.functional import dequantize_4bit

    state = module.quant_state
    whole: Tensor = dequantize_4bit(packed.to(state.absmax.device), state)
    return whole.float().cpu()


def rounded_to_four_bits(weight: Tensor) -> Tensor:
    """Return the weight quantised to 4 bits and dequantised again, in its own dtype."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    rounded: Tensor = dequantize_4bit(packed, state)
    return rounded.to(weight.dtype)


# ---- linear layers that are trained through int8 rounding ----------------------------


INT8_MAX = 127
"""Largest absolute value of the integers, which are symmetric about 0."""


class RoundedLinear(nn.Linear):
    """nn.Linear that computes with its weight in int8. The weight itself stays as it is, and so do its names."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer with the rounded weight."""
        weight: Tensor = _StraightThrough.apply(self.weight)  # type: ignore[no-untyped-call]
        return functional.linear(input, weight, self.bias)


class _StraightThrough(torch.autograd.Function):
    """Rounding whose derivative is taken for that of the identity."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        del ctx
        return rounded_to_int8(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


def rounded_to_int8(weight: Tensor) -> Tensor:
    """Return a weight [out, in] as whole multiples, from -127 to 127, of a scale for each row, in its own dtype."""
    # Scales of 16-bit weights are computed in float32: their quotients decide the rounding.
    values = at_least_float32(weight.detach())
    scale = values.abs().amax(dim=1, keepdim=True) / INT8_MAX
    # A row of zeros would be 0 / 0.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (torch.round(values / scale) * scale).to(weight.dtype)


def round_weights(backbone: nn.Module) -> None:
    """Let the linear layers inside the transformer layers compute with rounded weights."""
    count = 0
    for name in linear_names_inside_layers(backbone):
        layer = backbone.get_submodule(name)
        if type(layer) is nn.Linear:
            layer.__class__ = RoundedLinear
            count += 1
    if not count:
        raise UserError(
            "quantize_weights: int8 rounds linear layers inside transformer layers, and the model has none"
        )
    log.info("quantize_weights: %d linear layers are rounded to int8", count)


def store_rounded(model: nn.Module, weights: StateDict) -> None:
    """Replace the weights of rounded layers in a whole state dict by what the layers compute with."""
    for name, module in model.named_modules():
        if isinstance(module, RoundedLinear):
            key = unwrapped_name(f"{name}.weight")
            weights[key] = rounded_to_int8(weights[key])
