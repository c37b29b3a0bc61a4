"""UserModel: a plain torch module as a model of Transformers. A copy of this file is saved with every such model.

It imports nothing of vembed, so that a saved model loads in Sentence Transformers and Transformers with
`trust_remote_code=True` where vembed is not installed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

WEIGHTS_FILE = "model.safetensors"
PACKED = "cu_seqlens"
"""Argument of a module that takes texts without padding: all in one row, and where each begins."""
INPUTS = ("input_ids", "attention_mask", "pixel_values", PACKED)
"""Arguments that the forward of a module may have. It gets those that it names."""
OUTPUT_NAMES = ("last_hidden_state", "hidden_states", "embedding", "embeddings")
"""Names of the hidden states, or of the vectors, in a dictionary or dataclass that a module returns."""


class UserModelConfig(PretrainedConfig):  # type: ignore[misc]
    """Settings of an own model: the class, its arguments, and what is known of its inputs and outputs."""

    model_type = "vembed_own"

    def __init__(
        self,
        class_name: str = "",
        model_config: Mapping[str, Any] | None = None,
        hidden_size: int = 1,
        inputs: tuple[str, ...] = ("input_ids",),
        gives_vectors: bool = False,
        reads_causally: bool = False,
        **others: Any,
    ) -> None:
        """`model_config`: keyword arguments of the class. `inputs`: what its forward takes. `gives_vectors`: one vector
        for each input, not one for each token. `reads_causally`: a token sees only those before it."""
        self.class_name = class_name
        self.model_config = dict(model_config or {})
        self.hidden_size = hidden_size
        self.inputs = list(inputs)
        self.gives_vectors = gives_vectors
        self.reads_causally = reads_causally
        super().__init__(**others)


@dataclass
class UserModelOutput(ModelOutput):  # type: ignore[misc]
    """Hidden states of an own model, and its auxiliary losses in training mode."""

    last_hidden_state: Tensor | None = None
    """[n, tokens, hidden_size]. A vector for each input is repeated for every token, so that each pooling gives it."""
    auxiliary: dict[str, Any] | None = None
    """Name -> a scalar, or a pair (sums, counts)."""


class UserModel(PreTrainedModel):  # type: ignore[misc]
    """A module of the user's class behind the interface of Transformers."""

    config_class = UserModelConfig
    base_model_prefix = ""
    backbone_class: ClassVar[type[nn.Module] | None] = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        assert self.backbone_class is not None
        self.own = construct(self.backbone_class, config.model_config)
        self.accepted = accepted_inputs(self.backbone_class)
        self.all_tied_weights_keys: dict[str, str] = {}

    @classmethod
    def of(cls, backbone_class: type[nn.Module]) -> type[UserModel]:
        """Return the model class for one class of the user."""
        accepted = accepted_inputs(backbone_class)
        values = {
            "backbone_class": backbone_class,
            "main_input_name": "input_ids"
            if "input_ids" in accepted
            else "pixel_values",
            "_no_split_modules": list(
                vars(backbone_class).get("_no_split_modules") or ()
            ),
            "__module__": __name__,
        }
        return type(cls.__name__, (cls,), values)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> UserModelOutput:
        """Return what the module gives for texts or images. `cu_seqlens` int32 [n + 1]: input_ids [1, tokens] holds n
        texts one behind the other, each from one of these positions to the next."""
        if attention_mask is None and input_ids is not None:
            attention_mask = torch.ones_like(input_ids)
        values = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "pixel_values": pixel_values,
            PACKED: cu_seqlens,
        }
        arguments = {
            name: values[name] for name in self.accepted if values[name] is not None
        }
        hidden, auxiliary = read_output(self.own(**arguments))
        if hidden.ndim == 2 and cu_seqlens is not None:
            hidden = hidden.repeat_interleave(
                cu_seqlens.diff().long(), dim=0
            ).unsqueeze(0)
        elif hidden.ndim == 2:
            tokens = 1 if input_ids is None else input_ids.shape[1]
            hidden = hidden.unsqueeze(1).expand(-1, tokens, -1)
        elif hidden.ndim == 4:  # convolutional: [n, channels, height, width]
            hidden = hidden.flatten(2).transpose(1, 2)
        return UserModelOutput(last_hidden_state=hidden, auxiliary=auxiliary or None)

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights as the module's own constructor has drawn them."""

    def get_input_embeddings(self) -> nn.Module:
        """Raise NotImplementedError: the module is not asked for its embeddings."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(
        cls,
        folder: Any,
        *_: Any,
        config: Any = None,
        **options: Any,
    ) -> Any:
        """Return the model with its weights. Built as its constructor does, since it may compute buffers there."""
        if not Path(folder).is_dir():
            patterns = ["*.json", "*.safetensors"]
            folder = snapshot_download(
                str(folder), revision=options.get("revision"), allow_patterns=patterns
            )
        config = config or UserModelConfig.from_pretrained(folder)
        model = cls(config)
        info = load_weights(model, Path(folder))
        dtype = options.get("dtype", options.get("torch_dtype"))
        dtype = config.dtype if dtype in (None, "auto") else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        model = (model if dtype is None else model.to(dtype)).eval()
        return (model, info) if options.get("output_loading_info") else model

    def save_pretrained(
        self,
        folder: Any,
        *_: Any,
        state_dict: Any = None,
        **__: Any,
    ) -> None:
        """Write config and weights. A weight that occurs under two names is stored once."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        state = self.state_dict() if state_dict is None else state_dict
        shared = set(tied_names(self))
        weights = {
            name: tensor.contiguous()
            for name, tensor in state.items()
            if name not in shared
        }
        save_file(weights, Path(folder) / WEIGHTS_FILE, metadata={"format": "pt"})


def construct(
    backbone_class: type[nn.Module], arguments: Mapping[str, Any]
) -> nn.Module:
    """Return a module of the class: by its classmethod `from_config(dict)` if it has one, else by its constructor."""
    make = getattr(backbone_class, "from_config", None)
    return make(dict(arguments)) if callable(make) else backbone_class(**arguments)


def accepted_inputs(backbone_class: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the inputs that the class's forward takes."""
    parameters = inspect.signature(backbone_class.forward).parameters
    return tuple(name for name in INPUTS if name in parameters)


def read_output(output: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return (hidden states or vectors, auxiliary losses) of what a module returns.

    It returns a tensor; a tuple whose first entry is one, and whose last may be a dictionary of auxiliary losses; or a
    dictionary or dataclass with one of the names in OUTPUT_NAMES, and perhaps `auxiliary`.
    """
    if isinstance(output, Tensor):
        return output, {}
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        last = output[-1]
        return output[0], dict(last) if isinstance(last, Mapping) else {}
    values: Mapping[str, Any] = {}
    if isinstance(output, Mapping):
        values = output
    elif dataclasses.is_dataclass(output):
        values = vars(output)
    auxiliary = values.get("auxiliary") or values.get("auxiliary_losses") or {}
    for name in OUTPUT_NAMES:
        if isinstance(values.get(name), Tensor):
            return values[name], dict(auxiliary)
    raise TypeError(
        f"the forward of an own model must return a tensor, a tuple that begins with one, or a dictionary with "
        f"{' or '.join(OUTPUT_NAMES)}, and it has returned {type(output).__name__}"
    )


def tied_names(module: nn.Module) -> list[str]:
    """Return the names of parameters that have an earlier name too."""
    first: dict[int, str] = {}
    repeated = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            repeated.append(name)
    return repeated


def load_weights(model: nn.Module, folder: Path) -> dict[str, list[str]]:
    """Fill a model from a folder's files; return names that are missing and names that are not used."""
    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        state.update(load_file(path))
    result = model.load_state_dict(state, strict=False)
    tied = set(tied_names(model))
    return {
        "missing_keys": [name for name in result.missing_keys if name not in tied],
        "unexpected_keys": list(result.unexpected_keys),
    }
