"""Image processors in two halves: the same bits as the published processor, in bytes until the device."""

import json
import threading

import pytest
import torch

from benchmarks import decoding
from tests import tiny
from tests.built import described
from tests.features.test_image_features import image, of_images
from tests.features.test_text_features import featuriser
from tests.files.saving import config_of
from vembed.data.batching import rank_batch
from vembed.data.batching.rank_batch import Feeder
from vembed.data.images import decoders
from vembed.data.images.decoders import PIXELS_KEY, Patching, ProcessorCode, Resizing
from vembed.data.images.files import load_image
from vembed.data.images.pixels import find_recipe
from vembed.models.processors import load_image_processor

SIZES = ((24, 16), (300, 40), (33, 200), (32, 32), (5, 7))


def processor_of(make):
    return load_image_processor(described(config_of(make)))


def assert_same_pixels(processor, picture):
    """Compare the pixels of a processor's recipe with its own."""
    recipe = find_recipe(processor)
    actual = recipe.finished(recipe.halfway(picture))[PIXELS_KEY]
    expected = processor(images=[picture], return_tensors="pt")[PIXELS_KEY]
    assert torch.equal(actual, expected)
    return recipe


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (tiny.tiny_vit, Resizing),
        (tiny.tiny_clip, Resizing),
        (tiny.tiny_siglip, Resizing),
        (tiny.tiny_dinov2, Resizing),
        (tiny.tiny_qwen3_vl, Patching),
    ],
)
def test_both_halves_give_the_processors_bits(make, kind):
    processor = processor_of(make)
    recipe = find_recipe(processor)
    assert type(recipe.first) is kind
    for size in SIZES:
        picture = load_image(image(*size, seed=sum(size)))
        halfway = recipe.halfway(picture)
        assert halfway[PIXELS_KEY].dtype == torch.uint8
        expected = dict(processor(images=[picture], return_tensors="pt"))
        assert expected[PIXELS_KEY].nbytes >= 4 * halfway[PIXELS_KEY].nbytes
        actual = recipe.finished(halfway)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(actual[name], value)


@pytest.mark.parametrize("size", [(20, 40), (33, 15), (7, 7)])
def test_a_crop_beyond_the_image_has_the_processors_border(size):
    processor = processor_of(tiny.tiny_clip)
    processor.do_resize = False
    recipe = assert_same_pixels(processor, load_image(image(*size)))
    assert isinstance(recipe.first, Resizing)


class Changed:
    """A processor with an arithmetic of its own."""

    def __init__(self, processor):
        self.processor = processor

    def to_dict(self):
        return dict(self.processor.to_dict())


class Inverted(Changed):
    """Other colours before the scale."""

    def __call__(self, images, **options):
        images = [image.point(lambda value: 255 - value) for image in images]
        return self.processor(images=images, **options)


class Squared(Changed):
    """Other numbers after the scale."""

    def __call__(self, images, **options):
        pixels = self.processor(images=images, **options)[PIXELS_KEY]
        return {PIXELS_KEY: pixels**2}


def test_a_processor_of_another_kind_keeps_its_own_code():
    processor = processor_of(tiny.tiny_vit)
    recipe = assert_same_pixels(Inverted(processor), load_image(image(50, 20)))
    # The first half by the processor, the numbers on the device.
    assert isinstance(recipe.first, ProcessorCode)
    assert find_recipe(Squared(processor)).scale is None


class AsTorchvision(Changed):
    """A processor with the arithmetic of the processors that use torchvision: one step for scale and mean."""

    def __call__(self, images, *, do_rescale=True, **_):
        plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
        pixels = self.processor(images=images, **plain)[PIXELS_KEY]
        if do_rescale:
            factor = 1.0 / self.processor.rescale_factor
            mean = torch.tensor(self.processor.image_mean) * factor
            deviation = torch.tensor(self.processor.image_std) * factor
            pixels = pixels.to(torch.float32).sub_(mean[:, None, None])
            pixels = pixels.div_(deviation[:, None, None])
        return {PIXELS_KEY: pixels}


def test_the_arithmetic_of_torchvision_has_a_recipe_too():
    processor = processor_of(tiny.tiny_clip)
    processor.image_mean = [0.48145466, 0.4578275, 0.40821073]
    processor.image_std = [0.26862954, 0.26130258, 0.27577711]
    recipe = assert_same_pixels(AsTorchvision(processor), load_image(image(77, 50)))
    assert recipe.scale is not None


def test_pixels_stay_bytes_until_they_are_on_the_device(monkeypatch):
    mine = featuriser(tiny.tiny_vit)
    features = mine.features([of_images(image(seed=seed)) for seed in range(4)])
    moved = []

    class Gpu(Feeder):
        def _to_device(self, inputs):
            (modality, batch) = inputs[0]
            moved.append(batch[PIXELS_KEY].dtype)
            return [(modality, self.featuriser.finished(batch))]

    threads = set()

    def pinned(tensor, _):
        threads.add(threading.current_thread().name.partition("_")[0])
        return tensor

    monkeypatch.setattr(rank_batch, "pinned", pinned)
    micro_batches = [[("image", [0, 1])], [("image", [2, 3])]]
    fed = [
        inputs[0][1][PIXELS_KEY]
        for inputs in Gpu(mine, torch.device("cuda")).feed(micro_batches, features)
    ]
    assert moved == [torch.uint8] * 2
    assert threads == {"vembed-collate"}
    assert torch.equal(torch.cat(fed), mine.collate(features)[PIXELS_KEY])


def test_the_benchmark_of_decoding_runs(capsys, monkeypatch):
    monkeypatch.setattr(
        decoding, "in_processes", lambda *_: 1.0
    )  # which start interpreters
    monkeypatch.setattr(decoders, "DECODED_BY_THREADS", 1)
    words = "--images 16 --batch-size 4 --rounds 1 --cores 2"
    assert decoding.main(words.split()) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["processes_with_cache"] == row["processes_without_cache"] == 2
    assert row["share_with_cache"] > 0 and row["share_without_cache"] > 0
