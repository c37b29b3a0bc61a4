"""Every tiny model with inputs for each of its modalities, made by Transformers' own tokenizers and image
processors."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from tests import tiny
from tests.built import model_of
from vembed.config.loading import resolve_run
from vembed.config.schema import TrainConfig

TEXT_ENCODERS = [
    tiny.tiny_bert,
    tiny.tiny_distilbert,
    tiny.tiny_roberta,
    tiny.tiny_xlmr,
    tiny.tiny_mpnet,
    tiny.tiny_modernbert,
    tiny.tiny_t5,
]
TEXT_DECODERS = [
    tiny.tiny_qwen3,
    tiny.tiny_qwen2,
    tiny.tiny_llama,
    tiny.tiny_mistral,
    tiny.tiny_gemma,
    tiny.tiny_gpt2,
]
IMAGE_ENCODERS = [
    tiny.tiny_vit,
    tiny.tiny_dinov2,
    tiny.tiny_dinov3,
    tiny.tiny_convnext,
    tiny.tiny_vitmae,
]
TWO_TOWERS = [tiny.tiny_clip, tiny.tiny_siglip, tiny.tiny_siglip2]
VISION_LANGUAGE = [tiny.tiny_qwen3_vl, tiny.tiny_qwen2_vl, tiny.tiny_qwen2_5_vl]
EVERY = [*TEXT_ENCODERS, *TEXT_DECODERS, *IMAGE_ENCODERS, *TWO_TOWERS, *VISION_LANGUAGE]
COMPOSED = "composed"
every_model = pytest.mark.parametrize("make", [*EVERY, COMPOSED])
SENTENCES = [
    "red cat",
    "the list of every old house in this city, first and last",
    "parse",
]
IMAGE_TOKEN = 5


def config_for(make, **options):
    """The config of a run with one of the tiny models; COMPOSED is a BERT with a DINOv2."""
    if make == COMPOSED:
        options.setdefault("image_model_name", str(tiny.shared(tiny.tiny_dinov2)))
        make = tiny.tiny_bert
    assert not isinstance(make, str)
    return TrainConfig(
        **{"model_name": str(tiny.shared(make)), "data_path": "unused", **options}
    )


def built(make, **options):
    """A tiny model as a run with these options would train it."""
    return build_case(config_for(make, **options))


def build_case(config):
    """The model of a config."""
    recompute = resolve_run(config.changed(data_path="unused")).recomputation.value
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    compute_dtype = halves.get(config.model.mixed_precision, torch.float32)
    return model_of(config, recompute=recompute, compute_dtype=compute_dtype)


def pictures(count=3):
    """Different pictures of different shapes."""
    draw = np.random.default_rng(5)
    shapes = [(64, 96), (64, 64), (32, 96), (96, 64)]
    return [
        Image.fromarray(draw.integers(0, 256, (*shapes[index % 4], 3), dtype=np.uint8))
        for index in range(count)
    ]


def text_inputs(description, texts=SENTENCES):
    """Token ids of texts, padded as the description says."""
    tokenizer = AutoTokenizer.from_pretrained(
        description.source, padding_side=description.padding_side
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    padding = "max_length" if description.family == "siglip" else True
    tensors = tokenizer(
        list(texts),
        padding=padding,
        truncation=True,
        return_tensors="pt",
        return_token_type_ids=False,
    )
    return dict(tensors)


def image_inputs(description, images):
    """Pixels of images."""
    processor = AutoImageProcessor.from_pretrained(
        description.image_source or description.source
    )
    return dict(processor(list(images), return_tensors="pt"))


def vision_inputs(description, items):
    """Token ids with images in them."""
    images = [image for _, group in items for image in group]
    pixels = image_inputs(description, images)
    sizes = iter((pixels["image_grid_thw"].prod(dim=1) // 4).tolist())
    texts = []
    for text, group in items:
        marks = ""
        for _ in group:
            pads = "<|image_pad|>" * next(sizes)
            marks += f"<|vision_start|>{pads}<|vision_end|>"
        texts.append(marks + text)
    inputs = text_inputs(description, texts)
    return {
        **inputs,
        **pixels,
        "mm_token_type_ids": (inputs["input_ids"] == IMAGE_TOKEN).int(),
    }


def modality_items(modality):
    """Items of a modality: texts, images, or texts with images."""
    if modality == "text":
        return list(SENTENCES)
    first, second, third = pictures()
    if modality == "image":
        return [first, second, third]
    return [
        ("red", [first]),
        ("the list of every old house", [second, third]),
        ("", [third]),
    ]


def inputs_for(description, modality, items):
    """The tensors of one forward pass over items of a modality."""
    makers = {"text": text_inputs, "image": image_inputs, "multimodal": vision_inputs}
    return makers[modality](description, items)


def parts_for(description):
    """Inputs for every modality of a model."""
    return [
        (modality, inputs_for(description, modality, modality_items(modality)))
        for modality in description.modalities
    ]


def loss_of(outputs):
    """A number that depends on every coordinate of every output differently."""
    total = torch.zeros((), dtype=outputs[0].dtype)
    for output in outputs:
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(
            output.shape
        )
        total = total + (output * weights).sum()
    return total


def gradients_of(model):
    """Gradients by name."""
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
