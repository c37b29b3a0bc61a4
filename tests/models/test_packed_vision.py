"""Image towers of vision-language models: attention over all images, and positions from collation, change nothing."""

import pytest
import torch

from tests.built import described, model_of
from tests.features.test_image_features import image, of_images
from tests.models.families import VISION_LANGUAGE, config_for, gradients_of, loss_of
from vembed.data.features import Featuriser
from vembed.models import attention
from vembed.models.vision import (
    POSITIONS,
    VISION_PREFIX,
)

SIZES = ((64, 64), (96, 64), (64, 128), (160, 64))


def made(make, **options):
    """A model in float64, and the inputs of items with one image or two, of different sizes."""
    config = config_for(make, mixed_precision="no", **options)
    description = described(config)
    model = model_of(config, description).double().train()
    images = [image(*size, seed=number) for number, size in enumerate(SIZES)]
    items = [
        of_images(images[0]),
        of_images(images[1], text="red house"),
        of_images(images[2], images[3]),
    ]
    featuriser = Featuriser(description)
    batch = featuriser.collate(featuriser.features(items))
    return model, {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch.items()
    }


def published(batch):
    """The inputs from which the model computes everything by itself."""
    return {
        name: value
        for name, value in batch.items()
        if name != POSITIONS and not name.startswith(VISION_PREFIX)
    }


def results(model, batch):
    (output,) = model([("multimodal", batch)])
    loss_of([output]).backward()
    return output.detach(), gradients_of(model)


@pytest.mark.parametrize("make", VISION_LANGUAGE)
def test_embeddings_and_gradients_are_those_of_the_published_model(make):
    model, batch = made(make)
    tower = model.backbone.visual
    assert tower.config._attn_implementation == attention.IMAGE_ATTENTION
    plain, packed = made(make, attn_implementation="sdpa")
    assert plain.backbone.visual.config._attn_implementation == "sdpa"
    expected, expected_gradients = results(plain, published(packed))
    actual, gradients = results(model, batch)
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-9)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        tolerance = 1e-7 * float(gradient.abs().max() + 1e-9)
        assert torch.allclose(gradients[name], gradient, rtol=1e-7, atol=tolerance)
