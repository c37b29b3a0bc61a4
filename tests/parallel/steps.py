"""One training step on tiny models, under any strategy and in one process, for tests that compare the two."""

from __future__ import annotations

import io
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.built import described, model_of
from vembed.config.loading import resolve_run
from vembed.config.schema import TrainConfig
from vembed.data.examples import ImageRef, Item
from vembed.data.features import Featuriser
from vembed.parallel import collectives, parameters
from vembed.parallel.session import start_session

NUM_MICRO_BATCHES = 2


@dataclass
class Result:
    """What one rank saw."""

    norm: float
    clipped_norm: float
    weights: dict[str, Tensor]
    """Of the whole model after a step of SGD with learning rate 1, so that they show the gradient; rank 0 alone."""
    summary: dict[str, int]
    bytes: dict[str, int]
    lines: list[str]
    strategy: str
    facts: dict[str, Any] = field(default_factory=dict)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def listen():
    """From here on, the lines of the vembed log, until somebody listens again: a rank runs several cases."""
    handler = Lines()
    log = logging.getLogger("vembed")
    for earlier in [handler for handler in log.handlers if isinstance(handler, Lines)]:
        log.removeHandler(earlier)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return handler.lines


def config_of(folder, **options):
    return TrainConfig(model_name=str(folder), data_path="unused.jsonl", **options)


def parts_of(featuriser, rank, micro_batch):
    """The inputs of one forward: different on every rank, with different lengths, all modalities together."""
    draw = np.random.default_rng(1000 * rank + micro_batch)
    parts = []
    for modality in featuriser.description.modalities:
        if modality == "image":
            pixels = draw.integers(0, 255, (2, 24, 24, 3), dtype=np.uint8)
            items = [Item(images=(ImageRef(data=_png(pixel)),)) for pixel in pixels]
        else:
            words = ["red", "green", "house", "river", "string", "value"]
            items = [
                Item(text=" ".join(draw.choice(words, 2 + rank + number)))
                for number in range(2 + rank % 2)
            ]
        features = featuriser.features([(item, "document") for item in items])
        parts.append((modality, featuriser.collate(features)))
    return parts


def share_of_loss(outputs):
    """A sum over rows, whose gradient over all ranks is the sum of theirs, as that of L is."""
    terms = [
        (
            output
            * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        ).sum()
        for output in outputs
    ]
    return torch.stack(terms).sum()


def cast(parts, dtype):
    return [
        (
            modality,
            {
                key: text.to(dtype) if text.is_floating_point() else text
                for key, text in inputs.items()
            },
        )
        for modality, inputs in parts
    ]


def build(config, *, dtype, meta=False, edit=None):
    description = described(config)
    recompute = resolve_run(config).recomputation.value
    model = model_of(config, description, recompute=recompute, meta=meta)
    if edit is not None:
        edit(model)
    return model.to(dtype) if dtype == torch.float64 else model, Featuriser(description)


def sharded_step(config, options=None, *, dtype=torch.float64, edit=None):
    """Runs on every rank. `options`: local_world_size, and pattern: "cache" runs all micro-batches without grad before,
    "kept" runs all forwards before the first backward, "gathered" keeps parameters gathered between micro-batches,
    "each" reduces gradients after each micro-batch."""
    options = options or {}
    pattern = options.get("pattern")
    os.environ["LOCAL_WORLD_SIZE"] = str(
        options.get("local_world_size", os.environ["WORLD_SIZE"])
    )
    lines = listen()
    with start_session(config) as session:
        built, featuriser = build(
            config, dtype=dtype, meta=session.builds_empty, edit=edit
        )
        was_meta = sum(parameter.is_meta for parameter in built.parameters())
        model = session.prepare(built, built.description.layer_classes)
        parameters.log_parameter_summary(model)
        summary = {
            "total": parameters.num_parameters(model),
            "trainable": parameters.num_parameters(model, trainable_only=True),
        }
        forward_parts = [
            cast(parts_of(featuriser, session.rank, number), dtype)
            for number in range(NUM_MICRO_BATCHES)
        ]
        if pattern == "cache":
            with torch.no_grad():
                for parts in forward_parts:
                    model(parts)
        parameters.set_gradient_sync(model, False)
        remaining = (
            [model(parts) for parts in forward_parts] if pattern == "kept" else None
        )
        for number, parts in enumerate(forward_parts):
            last = number == NUM_MICRO_BATCHES - 1
            parameters.set_gradient_sync(model, last or pattern == "each")
            if pattern == "gathered":
                parameters.set_keep_gathered(model, not last)
            outputs = remaining[number] if remaining is not None else model(parts)
            (share_of_loss(outputs) * session.world_size).backward()
        collectives.calls.clear()
        if session.strategy == "ddp":
            collectives.GradientSync(model.parameters()).finish()
        norm = float(parameters.global_grad_norm(model))
        optimizer = torch.optim.SGD(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=1.0,
            momentum=0.9,
        )
        optimizer.step()
        parameters.clip_gradients(model.parameters(), 0.25)
        clipped = float(parameters.global_grad_norm(model))
        held = {
            "gradients": [parameter.grad for parameter in model.parameters()],
            "optimizer": [
                state["momentum_buffer"] for state in optimizer.state.values()
            ],
        }
        num_bytes = {"parameters": parameters.local_bytes(model)}
        for kind, tensors in held.items():
            local = [
                parameters.local_tensor(tensor)
                for tensor in tensors
                if tensor is not None
            ]
            num_bytes[kind] = sum(entry.nbytes for entry in local)
        return Result(
            norm=norm,
            clipped_norm=clipped,
            weights=parameters.full_state_dict(model),
            summary=summary,
            bytes=num_bytes,
            lines=lines,
            strategy=session.strategy,
            facts={
                "was_meta": was_meta,
                "dtypes": sorted(
                    {
                        (str(parameter.dtype), parameter.requires_grad)
                        for parameter in model.parameters()
                    }
                ),
                "with_gradient": sorted(
                    parameters.unwrapped_name(name)
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                ),
                "kind": type(model).__name__,
            },
        )


def whole_step(config, num_ranks, *, dtype=torch.float64, edit=None):
    """The same in one process without a session: every rank's micro-batches one after the other."""
    model, featuriser = build(config, dtype=dtype, edit=edit)
    for rank in range(num_ranks):
        for number in range(NUM_MICRO_BATCHES):
            share_of_loss(
                model(cast(parts_of(featuriser, rank, number), dtype))
            ).backward()
    gradients = [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=1.0,
    ).step()
    size = sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if parameter.grad is not None
    )
    return Result(
        norm=norm,
        clipped_norm=norm / 4,
        weights={name: value.clone() for name, value in model.state_dict().items()},
        summary={
            "total": total,
            "trainable": sum(
                parameter.numel()
                for parameter in model.parameters()
                if parameter.requires_grad
            ),
        },
        bytes={"parameters": size, "gradients": trained, "optimizer": trained},
        lines=[],
        strategy="none",
    )


def check_against_one_process(results, whole):
    for result in results:
        assert result.norm == pytest.approx(whole.norm, rel=1e-10)
        assert result.clipped_norm == pytest.approx(whole.norm / 4, rel=1e-10)
        assert result.summary["total"] == whole.summary["total"]
        assert result.summary["trainable"] == whole.summary["trainable"]
    assert set(results[0].weights) == set(whole.weights)
    for name, value in whole.weights.items():
        torch.testing.assert_close(
            results[0].weights[name],
            value,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    assert all(result.weights == {} for result in results[1:])


def _png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
