"""ONNX files of traced modules: saved by torch's exporter in float32, float16 or int8, and run in onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vembed.export.formats import WeightPrecision
from vembed.export.graph import OUTPUT

LARGEST_FILE = 1_800_000_000
"""Bytes of weights in one file. ONNX files end at 2 GiB; larger weights go into a file beside."""


def save_graph(
    graph: nn.Module,
    example: tuple[Tensor, ...],
    names: Sequence[str],
    shapes: Mapping[str, Mapping[int, Any]],
    target: Path,
) -> None:
    """Trace a module and save it. `names`: its inputs; `shapes`: their dimensions that vary."""
    exporter = logging.getLogger("torch.onnx")
    before = exporter.level
    exporter.setLevel(
        logging.ERROR
    )  # it names every operator library that is not installed
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecations inside torch and onnxscript
            program: Any = torch.onnx.export(
                graph.eval(),
                example,
                dynamo=True,
                input_names=list(names),
                output_names=[OUTPUT],
                dynamic_shapes={name: dict(shapes[name]) for name in names},
                verbose=False,
            )
            size = sum(one.nbytes for one in graph.parameters())
            program.save(str(target), external_data=size > LARGEST_FILE)
    finally:
        exporter.setLevel(before)


def open_session(path: Path) -> Any:
    """Return a graph in onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Waiting threads would take the cores from those of run_batches.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(
        path,
        options,
        providers=["CPUExecutionProvider"],
        # Its kernel took 9 times as long as an addition and a LayerNormalization, which it replaces (1.31).
        disabled_optimizers=["SkipLayerNormFusion"],
    )


def run_batches(
    session: Any, batches: Sequence[Mapping[str, np.ndarray]]
) -> list[np.ndarray]:
    """Return the output of each batch. As many are computed at a time as there are threads: a single one shares its
    operators among them, which is slower where these are small."""
    with ThreadPoolExecutor(
        torch.get_num_threads(), thread_name_prefix="vembed-onnx"
    ) as pool:
        return list(pool.map(lambda given: session.run([OUTPUT], given)[0], batches))


def write_in(
    precision: WeightPrecision,
    trace: Callable[[Path], None],
    target: Path,
    operators: Sequence[str] | None = None,
) -> None:
    """Write a graph in a precision. `trace` saves it in float32. `operators`: those whose weights int8 takes; None: all
    that onnxruntime's quantisation knows."""
    if precision == "float32":
        trace(target)
        return
    whole = target.with_name("whole.onnx")
    trace(whole)
    if precision == "int8":
        _to_int8(whole, target, operators)
    else:
        _to_float16(whole, target)
    # Also whole.onnx.data, which large models have.
    for path in target.parent.glob("whole.onnx*"):
        path.unlink()


def _to_int8(whole: Path, target: Path, operators: Sequence[str] | None) -> None:
    """Quantise the weights of matrix products to int8; activations are quantised as they are computed."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = _without_shapes(whole)
    root = logging.getLogger()
    before = root.level
    root.setLevel(
        logging.ERROR
    )  # a hint about pre-processing, which changes nothing here
    try:
        quantize_dynamic(
            model,
            target,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=None if operators is None else list(operators),
            use_external_data_format=model.ByteSize() > LARGEST_FILE,
        )
    finally:
        root.setLevel(before)


def _to_float16(whole: Path, target: Path) -> None:
    """Store and compute in float16; inputs and the output keep their types."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model: Any = convert_float_to_float16(_without_shapes(whole), keep_io_types=True)
    onnx.save(model, target, save_as_external_data=model.ByteSize() > LARGEST_FILE)


def _without_shapes(path: Path) -> Any:
    """Return a graph without the shapes of its inner values: of folded transposes they are those before folding, which
    the converters refuse. They infer all shapes anew."""
    import onnx

    model: Any = onnx.load(path)
    del model.graph.value_info[:]
    return model
