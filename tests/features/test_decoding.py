"""Images are decoded by one task each, on as many threads as asked for, ahead of the step and not twice."""

import threading

import pytest
import torch

from tests import tiny
from tests.features.test_image_features import image, of_images
from tests.features.test_text_features import featuriser
from vembed.data.batching.rank_batch import Feeder
from vembed.data.features import Featuriser
from vembed.data.images import decoders

COUNT = 24


@pytest.fixture
def decoded(monkeypatch):
    """Images as they are decoded, with the thread."""
    actual = []
    load = decoders.load_image

    def noting(ref):
        actual.append((ref, threading.current_thread().name))
        return load(ref)

    monkeypatch.setattr(decoders, "load_image", noting)
    return actual


def features_of(mine, count=COUNT):
    return mine.features([of_images(image(seed=seed)) for seed in range(count)])


def test_both_phases_of_a_step_decode_each_image_once_and_in_threads_of_their_own(
    decoded,
):
    mine = Featuriser(featuriser(tiny.tiny_vit).description, decoders=3)
    features = features_of(mine)
    decoded.clear()
    micro_batches = []
    for start in range(0, COUNT, 6):
        micro_batches.append([("image", list(range(start, start + 6)))])
    feeder = Feeder(mine, torch.device("cpu"))
    first = list(feeder.feed(micro_batches, features))
    second = list(feeder.feed(micro_batches, features))
    assert len(decoded) == COUNT, "with Gradient Cache nothing is decoded twice"
    assert all(name.startswith("vembed-images") for _, name in decoded)
    for entry, other in zip(first, second, strict=True):
        assert torch.equal(entry[0][1]["pixel_values"], other[0][1]["pixel_values"])


def test_as_many_images_are_decoded_at_once_as_there_are_threads(monkeypatch):
    mine = Featuriser(featuriser(tiny.tiny_vit).description, decoders=4)
    features = features_of(mine, 4)
    together = threading.Barrier(4, timeout=200)
    load = decoders.load_image

    def waiting(ref):
        together.wait()  # breaks unless four threads are here at once, although all are of one micro-batch
        return load(ref)

    monkeypatch.setattr(decoders, "load_image", waiting)
    assert len(mine.collate(features)["pixel_values"]) == 4
