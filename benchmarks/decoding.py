"""python -m benchmarks.decoding: images per second through a model that does nothing, with and without Gradient Cache.

JPEGs are decoded, resized and normalised for training steps whose model returns a parameter. The figure is a share of
what all cores could do: (images per second of one core) x cores, one core being a plain loop over the same images in
this process. It is taken once the processes that decode have started, which they do beside the first steps; the figure
with "cold" in its name is that of the first steps. For comparison the loop runs in one process per core, which share no
interpreter, and with the processor of Transformers.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tests.tiny import save_image_processor, tiny_vit
from vembed.config.schema import ModelSection, TrainConfig
from vembed.data.batching.rank_batch import Feeder
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.batching.stream import RankBatchStream
from vembed.data.examples import Example, ImageRef, Item
from vembed.data.features import Featuriser
from vembed.data.images.files import load_image
from vembed.data.images.pixels import Pixels, num_cores
from vembed.losses.build import build_loss
from vembed.models.families.description import ModelDescription, describe
from vembed.models.processors import load_image_processor
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import Budget
from vembed.training.frozen import InputBuilder
from vembed.training.step import TrainingStep

SIDE = 224
MICRO_BATCH = 25
"""Images of a micro-batch."""
WIDTH = 64
"""Size of the embeddings that the model returns."""
PASSES = 5
SECONDS_TO_START = 5.0
"""Time in which the processes that decode start, if they are needed."""


def forget(pixels: Pixels) -> None:
    """Empty the cache of decoded images."""
    with pixels._lock:
        pixels._kept.clear()
        pixels._num_bytes = 0


class Nothing(nn.Module):
    """A model that returns one parameter for every image."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, parts: list[tuple[str, dict[str, Tensor]]]) -> list[Tensor]:
        """Return [n, WIDTH] for each part."""
        return [
            self.vector.expand(len(inputs["pixel_values"]), -1).clone()
            for _, inputs in parts
        ]


def write_images(folder: Path, count: int) -> list[Path]:
    """Write JPEGs of smooth noise, which have about the size of photographs."""
    paths = []
    for number in range(count):
        draw = np.random.default_rng(number)
        coarse = Image.fromarray(
            draw.integers(0, 256, (28, 28, 3), dtype=np.uint8)
        ).resize((SIDE, SIDE), 3)
        fine = draw.integers(-12, 13, (SIDE, SIDE, 3))
        buffer = io.BytesIO()
        Image.fromarray(
            np.clip(np.asarray(coarse) + fine, 0, 255).astype(np.uint8)
        ).save(buffer, "JPEG", quality=85)
        paths.append(folder / f"{number}.jpg")
        paths[-1].write_bytes(buffer.getvalue())
    return paths


def description_of(folder: Path) -> ModelDescription:
    """Return a tiny model that takes images of SIDE pixels as CLIP does: the shorter edge, then the middle."""
    if not (folder / "config.json").exists():
        tiny_vit(folder)
        size = {"do_center_crop": True, "crop_size": {"height": SIDE, "width": SIDE}}
        save_image_processor(
            folder, "CLIPImageProcessor", {"shortest_edge": SIDE}, **size
        )
    return describe(ModelSection(model_name=str(folder)))


def one_by_one(folder: Path, paths: list[Path]) -> float:
    """Return the images per second of a plain loop on one core."""
    pixels = Pixels(description_of(folder), cache_bytes=0, decoders=1)
    references = [ImageRef(path=str(path)) for path in paths]
    pixels.alone(references[0])
    start = time.perf_counter()
    for reference in references:
        pixels.alone(reference)
    return len(paths) / (time.perf_counter() - start)


def by_published_processor(folder: Path, paths: list[Path]) -> float:
    """Return the images per second of the processor of Transformers on one core."""
    processor = load_image_processor(description_of(folder))
    start = time.perf_counter()
    for path in paths:
        processor(images=[load_image(ImageRef(path=str(path)))], return_tensors="pt")
    return len(paths) / (time.perf_counter() - start)


def in_processes(folder: Path, paths: list[Path], cores: int) -> float:
    """Return the images per second of plain loops in one process per core, at the same time."""
    with ProcessPoolExecutor(
        cores, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        futures = [pool.submit(one_by_one, folder, paths) for _ in range(cores)]
        return sum(future.result() for future in futures)


@dataclass
class Speeds:
    """Distinct images per second of training steps."""

    cold: float
    """Before the processes that decode are ready."""
    warm: float
    """The median of PASSES passes over the images."""
    num_processes: int
    """Processes that were ready when `warm` was measured."""


def in_steps(
    folder: Path, paths: list[Path], cores: int, *, cache: bool, batch_size: int
) -> Speeds:
    """Run training steps over the images, first with threads, then with processes, if there are any."""
    description = description_of(folder)
    featuriser = Featuriser(description, decoders=cores)
    items = [Item(images=(ImageRef(path=str(path)),)) for path in paths]
    pairs = [
        Example(query, (positive,), (), None)
        for query, positive in zip(items[::2], items[1::2], strict=True)
    ]
    config = TrainConfig(model_name=str(folder), data_path="-", mixed_precision="no")
    schedule = BatchSchedule([len(pairs)], batch_size, 0)
    with start_session(config) as session:
        model = Nothing()
        budget = Budget(
            MICRO_BATCH * featuriser_length(featuriser, items[0]), 2**40, cache
        )
        builder = InputBuilder(model, Feeder(featuriser, session.device), session)
        loss = build_loss(config, mrl_dims=None, embedding_dim=WIDTH)
        step = TrainingStep(model, loss, builder, session, budget, 0)
        stream = RankBatchStream(pairs, schedule, featuriser, 0, 1, 1)

        def speed() -> float:
            start = time.perf_counter()
            for number, batch in enumerate(
                stream.from_batch(0, len(pairs) // batch_size)
            ):
                step.accumulate(batch, number, weight=1.0, is_last_batch=True)
            return (
                2
                * batch_size
                * (len(pairs) // batch_size)
                / (time.perf_counter() - start)
            )

        pixels = featuriser.pixels
        assert pixels is not None
        decoders = pixels.decoders
        try:
            cold = speed()
            until = time.perf_counter() + SECONDS_TO_START
            while len(decoders.pids) < cores and time.perf_counter() < until:
                forget(pixels)
                speed()
            passes = []
            for _ in range(PASSES):
                forget(pixels)
                passes.append(speed())
            return Speeds(cold, median(passes), len(decoders.pids))
        finally:
            decoders.close()


def featuriser_length(featuriser: Featuriser, item: Item) -> int:
    """Return the tokens that an image counts."""
    return featuriser.features([(item, "document")])[0].length


def rows(
    count: int, cores: int, batch_size: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield one row for each round."""
    with tempfile.TemporaryDirectory(prefix="vembed-decoding-") as name:
        folder = Path(name)
        paths = write_images(folder, count)
        model = folder / "model"
        model.mkdir()
        for number in range(rounds):
            alone = one_by_one(model, paths)
            measured = {
                "round": number,
                "images": count,
                "cores": cores,
                "one_core": alone,
            }
            for cache in (False, True):
                speeds = in_steps(
                    model, paths, cores, cache=cache, batch_size=batch_size
                )
                key = "with_cache" if cache else "without_cache"
                measured |= {
                    f"cold_{key}": speeds.cold,
                    key: speeds.warm,
                    f"share_{key}": speeds.warm / (alone * cores),
                }
                measured[f"processes_{key}"] = speeds.num_processes
            measured["processes"] = in_processes(model, paths, cores)
            measured["share_processes"] = measured["processes"] / (alone * cores)
            measured["published_processor"] = by_published_processor(
                model, paths[: max(count // 4, 1)]
            )
            yield measured


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON object for each round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=num_cores())
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for row in rows(options.images, options.cores, options.batch_size, options.rounds):
        print(
            json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
