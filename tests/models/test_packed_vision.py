"""Image towers of vision-language models: attention over all images, and positions from collation, change nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from tests import tiny
from tests.built import described, model_of
from tests.features.test_image_features import image, of_images
from tests.models.families import config_for
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.models import attention
from vembed.models.vision import (
    LONGEST_IMAGE,
    POSITIONS,
    VISION_PREFIX,
    token_positions,
)

SIZES = ((64, 64), (96, 64), (64, 128), (160, 64))
MAKES = [tiny.tiny_qwen3_vl, tiny.tiny_qwen2_5_vl, tiny.tiny_qwen2_vl]


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
    (
        output
        * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    ).sum().backward()
    return output.detach(), {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("make", MAKES)
def test_embeddings_and_gradients_are_those_of_the_published_model(make):
    model, batch = made(make)
    tower = model.backbone.visual
    assert tower.config._attn_implementation == attention.IMAGE_ATTENTION
    plain, packed = made(make, attn_implementation="sdpa")
    assert plain.backbone.visual.config._attn_implementation == "sdpa"
    expected, gradients = results(plain, published(packed))
    actual, others = results(model, batch)
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-9)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(
            others[name],
            gradient,
            rtol=1e-7,
            atol=1e-7 * float(gradient.abs().max() + 1e-9),
        ), name


@pytest.mark.parametrize("make", MAKES)
def test_positions_are_those_of_the_published_model(make):
    model, batch = made(make)
    expected, _ = model.backbone.get_rope_index(
        batch["input_ids"],
        image_grid_thw=batch["image_grid_thw"],
        attention_mask=batch["attention_mask"],
        mm_token_type_ids=batch["mm_token_type_ids"],
    )
    real = batch["attention_mask"].bool()
    assert torch.equal(batch[POSITIONS][:, real], expected[:, real])
    whole = token_positions(
        batch["mm_token_type_ids"][:1], None, batch["image_grid_thw"][:1], 2
    )
    assert whole.shape == (3, *batch["mm_token_type_ids"][:1].shape)


class Reads(TorchDispatchMode):
    """Operations that would wait for a GPU: values that are read, and sizes that depend on values."""

    def __init__(self):
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = ("_local_scalar_dense", "nonzero", "repeat_interleave.Tensor")
        self.num_reads += any(name in str(func) for name in names)
        return func(*args, **(kwargs or {}))


def reads_of(model, batch):
    with Reads() as reads, torch.no_grad():
        model([("multimodal", batch)])
    return reads.num_reads


def test_each_image_was_waited_for_in_every_layer(
    monkeypatch,
):
    model, batch = made(tiny.tiny_qwen3_vl)
    assert batch[LONGEST_IMAGE].shape[0] == max(
        (height // 16) * (width // 16) for width, height in SIZES
    )

    def by_kernel(module, query, *_, **__):
        return (
            query.transpose(1, 2),
            None,
        )  # a GPU's kernel reads nothing; that of CPUs cuts the row by the lengths

    monkeypatch.setitem(
        AttentionInterface._global_mapping, attention.IMAGE_ATTENTION, by_kernel
    )
    reads = reads_of(model, batch)
    assert reads < reads_of(model, published(batch)) / 3
    # What is left is in the language model: the check of placeholders, and the layers that images are added to.
    assert reads <= 4 + 2 * len(
        model.backbone.config.vision_config.deepstack_visual_indexes
    )


def test_texts_alone_need_no_images():
    config = config_for(tiny.tiny_qwen3_vl)
    featuriser = Featuriser(described(config))
    batch = featuriser.collate(featuriser.features([(Item(text="red"), "query")]))
    assert POSITIONS not in batch
