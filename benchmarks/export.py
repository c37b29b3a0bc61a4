"""python -m benchmarks.export: texts per second of the int8 ONNX export, beside PyTorch in float32, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from vembed.cli.commands.demo import demo_model, standard_library_pairs
from vembed.export.exporting import export_model
from vembed.export.onnx_format import OnnxReader
from vembed.inference.embedder import Embedder

Encode = Callable[[list[str]], np.ndarray]


def sides(model: str, folder: Path) -> dict[str, Encode]:
    """Return what encodes: vembed and Sentence Transformers in float32, and the export, which is made and checked."""
    exported = export_model(model, folder / "int8", "onnx", "int8")
    assert exported.check is not None
    print(*exported.check.lines(), sep="\n", flush=True)
    embedder = Embedder(
        model, device="cpu", torch_dtype="float32", mixed_precision="no"
    )
    peer = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": "float32"})
    reader = OnnxReader(exported.path)

    def encode_by_peer(texts: list[str]) -> np.ndarray:
        return np.asarray(peer.encode_document(texts, show_progress_bar=False))

    return {
        "export": lambda texts: reader.encode(texts, "document"),
        "vembed": embedder.encode,
        "sentence-transformers": encode_by_peer,
    }


def main() -> None:
    """Time all sides in turns and print a line per round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the model of `vembed demo`")
    parser.add_argument(
        "--texts", type=int, default=256, help="functions of Python's standard library"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    pairs = standard_library_pairs()
    texts = [pair.positive for pair in pairs[:: max(len(pairs) // arguments.texts, 1)]][
        : arguments.texts
    ]
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        encoders = sides(arguments.model or str(demo_model()), Path(folder))
        for encode in encoders.values():
            encode(texts[:16])
        for _ in range(arguments.rounds):
            for name, encode in encoders.items():
                began = time.perf_counter()
                encode(texts)
                seconds.setdefault(name, []).append(time.perf_counter() - began)
            print(
                json.dumps(
                    {
                        name: round(len(texts) / times[-1], 1)
                        for name, times in seconds.items()
                    }
                ),
                flush=True,
            )
    median = {name: statistics.median(times) for name, times in seconds.items()}
    all_rates = ", ".join(
        f"{median[name] / median['export']:.2f} x {name}"
        for name in median
        if name != "export"
    )
    print(
        f"{len(texts)} texts, {torch.get_num_threads()} threads, median of {arguments.rounds}: "
        f"{len(texts) / median['export']:.1f} texts per second, {all_rates}"
    )


if __name__ == "__main__":
    main()
