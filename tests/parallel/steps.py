"""One training step on tiny models, under any strategy and in one process, for tests that compare the two."""

import logging
import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from tests.built import described, model_of
from vembed.config.loading import resolve_run
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.inference.embedder import to_item
from vembed.parallel import collectives, parameters
from vembed.parallel.session import start_session

NUM_MICRO_BATCHES = 2
# The name in torch's namespace, where FSDP finds it.
REDUCE_SCATTER = "reduce_scatter_single"
if not hasattr(dist, REDUCE_SCATTER):
    REDUCE_SCATTER = "reduce_scatter_tensor"


@dataclass
class Result:
    """What one rank saw."""

    norm: float
    clipped_norm: float
    weights: dict[str, Tensor]
    """Of the whole model after a step of SGD with learning rate 1, so that they show the gradient; rank 0 alone."""
    summary: dict[str, int]
    bytes: dict[str, int]
    lines: list[str] = field(default_factory=list)
    strategy: str = "none"
    dtypes: set[tuple[torch.dtype, bool]] = field(default_factory=set)
    """Of the parameters, with whether they are trained."""
    with_gradient: list[str] = field(default_factory=list)


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


def parts_of(featuriser, rank, micro_batch, dtype=torch.float32):
    """The inputs of one forward: different on every rank, with different lengths, all modalities together."""
    draw = np.random.default_rng(1000 * rank + micro_batch)
    words = ["red", "green", "house", "river", "string", "value"]
    parts = []
    for modality in featuriser.description.modalities:
        items = []
        for number in range(2 if modality == "image" else 2 + rank % 2):
            if modality == "image":
                pixels = draw.integers(0, 255, (24, 24, 3), dtype=np.uint8)
                items.append(to_item(Image.fromarray(pixels)))
            else:
                text = " ".join(draw.choice(words, 2 + rank + number))
                items.append(Item(text=text))
        features = featuriser.features([(item, "document") for item in items])
        inputs = featuriser.collate(features)
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                inputs[name] = tensor.to(dtype)
        parts.append((modality, inputs))
    return parts


def share_of_loss(outputs):
    """A sum over rows, whose gradient over all ranks is the sum of theirs, as that of L is."""
    total = 0.0
    for output in outputs:
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
        total = total + (output * weights.view_as(output)).sum()
    return total


def build(config, *, dtype, meta=False, edit=None):
    description = described(config)
    recompute = resolve_run(config).recomputation.value
    model = model_of(config, description, recompute=recompute, meta=meta)
    if edit is not None:
        edit(model)
    if dtype == torch.float64:
        model = model.to(dtype)
    return model, Featuriser(description)


def prepared(session, config, **options):
    """The model of a session, sharded where the config says so, and its featuriser. `options`: of `build`."""
    built, featuriser = build(config, meta=session.builds_empty, **options)
    return session.prepare(built, built.description.layer_classes), featuriser


def summary_of(model):
    return {
        "total": parameters.num_parameters(model),
        "trainable": parameters.num_parameters(model, trainable_only=True),
    }


def sharded_step(
    config,
    *,
    local_world_size=None,
    pattern=None,
    dtype=torch.float64,
    edit=None,
):
    """Runs on every rank. `pattern`: "kept" runs all forwards before the first backward, "gathered" keeps
    parameters gathered between micro-batches, "each" reduces gradients after each micro-batch."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size or os.environ["WORLD_SIZE"])
    lines = listen()
    with start_session(config) as session:
        model, featuriser = prepared(session, config, dtype=dtype, edit=edit)
        parameters.log_parameter_summary(model)
        summary = summary_of(model)
        forward_parts = [
            parts_of(featuriser, session.rank, number, dtype)
            for number in range(NUM_MICRO_BATCHES)
        ]
        parameters.set_fsdp_reduction(model, False)
        kept_outputs = []
        if pattern == "kept":
            kept_outputs = [model(parts) for parts in forward_parts]
        for number, parts in enumerate(forward_parts):
            last = number == NUM_MICRO_BATCHES - 1
            parameters.set_fsdp_reduction(model, last or pattern == "each")
            if pattern == "gathered":
                session.keeps_gathered = True
                session.keep_gathered(model, on=not last)
            outputs = kept_outputs[number] if kept_outputs else model(parts)
            (share_of_loss(outputs) * session.world_size).backward()
        if session.strategy == "ddp":
            collectives.GradientSync(model.parameters()).finish()
        norm = float(parameters.global_grad_norm(model))
        trained = [entry for entry in model.parameters() if entry.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1.0, momentum=0.9)
        optimizer.step()
        parameters.clip_gradients(model.parameters(), 0.25)
        num_bytes = {
            "parameters": parameters.local_bytes(model),
            "gradients": 0,
            "optimizer": 0,
        }
        dtypes = set()
        with_gradient = []
        for name, parameter in model.named_parameters():
            dtypes.add((parameter.dtype, parameter.requires_grad))
            if parameter.grad is not None:
                with_gradient.append(parameters.unwrapped_name(name))
                gradient = parameters.local_tensor(parameter.grad)
                num_bytes["gradients"] += gradient.nbytes
        for state in optimizer.state.values():
            momentum = parameters.local_tensor(state["momentum_buffer"])
            num_bytes["optimizer"] += momentum.nbytes
        return Result(
            norm=norm,
            clipped_norm=float(parameters.global_grad_norm(model)),
            weights=parameters.full_state_dict(model),
            summary=summary,
            bytes=num_bytes,
            lines=lines,
            strategy=session.strategy,
            dtypes=dtypes,
            with_gradient=with_gradient,
        )


def whole_step(config, num_ranks, *, dtype=torch.float64, edit=None):
    """The same in one process without a session: every rank's micro-batches one after the other."""
    model, featuriser = build(config, dtype=dtype, edit=edit)
    for rank in range(num_ranks):
        for number in range(NUM_MICRO_BATCHES):
            outputs = model(parts_of(featuriser, rank, number, dtype))
            share_of_loss(outputs).backward()
    trained = [entry for entry in model.parameters() if entry.grad is not None]
    norm = float(torch.nn.utils.get_total_norm([entry.grad for entry in trained]))
    torch.optim.SGD(trained, lr=1.0).step()
    gradient_bytes = sum(entry.grad.nbytes for entry in trained)
    return Result(
        norm=norm,
        clipped_norm=norm / 4,
        weights={name: value.clone() for name, value in model.state_dict().items()},
        summary=summary_of(model),
        bytes={
            "parameters": sum(entry.nbytes for entry in model.parameters()),
            "gradients": gradient_bytes,
            "optimizer": gradient_bytes,
        },
    )


def check_against_one_process(results, whole):
    for result in results:
        assert result.norm == pytest.approx(whole.norm, rel=1e-10)
        assert result.clipped_norm == pytest.approx(whole.norm / 4, rel=1e-10)
        assert result.summary == whole.summary
    torch.testing.assert_close(results[0].weights, whole.weights, rtol=1e-9, atol=1e-9)
    assert all(result.weights == {} for result in results[1:])
