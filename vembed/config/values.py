"""Types of option values: numbers with limits, choices that the config, the library and the commands share, and the base class
of config models."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_bool(value: Any) -> Any:
    """Refuse booleans, which pydantic would otherwise accept as the numbers 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


# Whole numbers end at 2**63, since they become int64 in tensors and in TOML.
RefusesBool = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(gt=0, lt=2**63), RefusesBool]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63), RefusesBool]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False), RefusesBool]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False), RefusesBool]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False), RefusesBool]
ProperFraction = Annotated[
    float, Field(gt=0.0, lt=1.0, allow_inf_nan=False), RefusesBool
]
Momentum = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), RefusesBool]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False), RefusesBool]
Dtype = Literal["float32", "bfloat16", "float16"]
ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]
Auto = Literal["auto"]
Task = Literal["embed", "rerank"]
RetrievalMode = Literal["auto", "t2t", "t2i", "i2t", "i2i", "m2i", "m2t"]
Environment = Mapping[str, str]
"""Environment variables."""
OnBadRecord = Literal["stop", "skip"]
EvaluationTask = Literal["auto", "retrieval", "similarity"]
EmbeddingPrecision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
FormatName = Literal["safetensors", "onnx", "static", "openvino", "gguf"]
WeightPrecision = Literal["float32", "float16", "bfloat16", "int8"]
ServerName = Literal["tei", "vllm", "llama.cpp", "infinity", "fastembed"]
EditPlace = Literal["layers", "embedding", "both"]
EditDirection = Literal["mean_difference", "principal", "erase"]


class FileReference(str):
    """Mark of an option that names files or folders, in the metadata of its type: model, data or code."""

    __slots__ = ()


class ValueSyntax(str):
    """Words for the values that a text may have, in the metadata of its type."""

    __slots__ = ()


Percentage = Annotated[
    str, Field(pattern=r"^-?\d+(\.\d+)?%$"), ValueSyntax("a share such as 5%")
]
CodeName = Annotated[
    str,
    Field(pattern=r".:\w+$"),
    ValueSyntax("path/to/file.py:name"),
]
"""A function or class in a file of the user's."""


class ConfigModel(BaseModel):
    """Base class of config models: immutable; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # run_name: 2024 is a name
    )


RESULT_SEPARATOR = ", result of "
"""Between a file and a stage, in the origin of a model_name that is the result of that stage."""
