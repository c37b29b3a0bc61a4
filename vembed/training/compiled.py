"""Compiled layers: whether they pay in a run, and a check at its start that they give what plain layers give."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from vembed.config.resolved import Decision
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item, Kind
from vembed.data.features import Featuriser
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import layers_of
from vembed.models.families.table import Modality
from vembed.parallel import collectives
from vembed.parallel.estimate import measure
from vembed.parallel.parameters import discard_passes, set_gradient_sync
from vembed.parallel.session import Session
from vembed.training.parts import RunData

log = logging.getLogger("vembed")

OPERATIONS = 6.0
"""Floating-point operations of a parameter for each token, forward and backward."""
SAMPLED = 8
"""Examples whose inputs are counted, and compared."""
FARTHEST = {True: 1e-2, False: 1e-4}
"""Largest 1 - cosine of an embedding by compiled and by plain layers: in 16 bits, and in float32."""

Inputs = list[tuple[Modality, dict[str, Tensor]]]


def some_inputs(data: RunData) -> list[tuple[Item, Kind]]:
    """Return the inputs of the first examples, the same on every rank."""
    found: list[tuple[Item, Kind]] = []
    for number in range(min(SAMPLED, len(data.examples))):
        example = data.examples[number]
        found.append((example.query, "query"))
        found += [(one, "document") for one in (*example.positives, *example.negatives)]
    return found


def decide_compilation(
    config: TrainConfig, data: RunData, featuriser: Featuriser, session: Session
) -> None:
    """Decide `torch_compile: auto` by the arithmetic of the run, and log it where there is a choice."""
    placement = session.placement
    if config.model.torch_compile == "auto" and session.device.type == "cuda":
        features = featuriser.features(some_inputs(data))
        tokens = sum(one.length for one in features) / max(
            min(SAMPLED, len(data.examples)), 1
        )
        num_examples = data.total_steps * data.examples_per_step
        size = placement.size or measure(config)
        session.placement = placement.for_work(
            OPERATIONS * size.total * tokens * num_examples
        )
    if config.model.torch_compile == "auto" and session.device.type != "cuda":
        return
    log.info("compiled layers: %s", session.placement.compilation)


def check_compiled(
    model: nn.Module,
    embedder: EmbeddingModel,
    featuriser: Featuriser,
    items: Sequence[tuple[Item, Kind]],
    session: Session,
) -> None:
    """Compare compiled with plain layers, where `auto` has compiled them; where they differ, or do not compile, plain
    layers are used, with a warning. Collective."""
    if (
        session.config.model.torch_compile != "auto"
        or not session.placement.compilation.value
    ):
        return
    layers = layers_of(embedder.backbone)
    problem = difference(
        model, layers, inputs_of(featuriser, items, session.device), session
    )
    # All processes decide alike: compiled and plain layers round differently.
    if not collectives.max_ints([int(problem is not None)])[0]:
        return
    reason = f"auto: {problem or 'another process could not compile them'}"
    log.warning("compiled layers: false (%s)", reason)
    for layer in layers:
        layer._compiled_call_impl = None
    session.placement = replace(session.placement, compilation=Decision(False, reason))


def inputs_of(
    featuriser: Featuriser, items: Sequence[tuple[Item, Kind]], device: torch.device
) -> Inputs:
    """Return the tensors of one micro-batch with all modalities among the items."""
    features = featuriser.features(items)
    found: Inputs = []
    for modality in featuriser.description.modalities:
        chosen = [one for one in features if one.modality == modality] or [
            featuriser.dummy(modality)
        ]
        batch = {
            name: tensor.to(device)
            for name, tensor in featuriser.joined(chosen).items()
        }
        found.append((modality, featuriser.finished(batch)))
    return found


def difference(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Inputs, session: Session
) -> str | None:
    """Return what is wrong with the compiled layers; None: they give the embeddings of plain layers, and compile in
    the backward pass too. Leaves no gradients. Collective under FSDP."""
    from torch._dynamo.exc import TorchDynamoException  # imports the compiler

    was_training = model.training
    compiled = [layer._compiled_call_impl for layer in layers]
    # The gradients of this check are dropped, so FSDP need not sum them over the processes.
    set_gradient_sync(model, False)
    try:
        # Dropout would make the two differ.
        model.eval()
        with torch.no_grad():
            found = [one.float() for one in model(inputs)]
            for layer in layers:
                layer._compiled_call_impl = None
            plain = [one.float() for one in model(inputs)]
            for layer, call in zip(layers, compiled, strict=True):
                layer._compiled_call_impl = call
        model.train()
        outputs = [one for one in model(inputs) if one.requires_grad]
        if outputs:
            torch.autograd.backward([one.float().sum() for one in outputs])
    except TorchDynamoException as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.200}"
    finally:
        for layer, call in zip(layers, compiled, strict=True):
            layer._compiled_call_impl = call
        discard_passes(model)
        model.train(was_training)
    cosines = [
        functional.cosine_similarity(*pair, dim=1)
        for pair in zip(found, plain, strict=True)
    ]
    farthest = max(float((1 - one).max()) for one in cosines)
    if farthest <= FARTHEST[session.placement.computes_in_half]:
        return None
    return f"compiled layers give other embeddings (1 - cosine is {farthest:.1e})"
