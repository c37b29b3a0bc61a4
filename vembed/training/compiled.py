"""Compiled layers: whether they pay in a run, and a check at its start that they give what plain layers give."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from vembed.config.resolved import Decision
from vembed.data.batching.rank_batch import Feeder, ModelInputs, indices_by_modality
from vembed.data.features import BaseFeaturiser
from vembed.errors import UserError
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import layers_of
from vembed.parallel import collectives
from vembed.parallel.parameters import (
    CAN_RESET_FSDP2,
    discard_passes,
    set_gradient_sync,
)
from vembed.parallel.session import Session
from vembed.parallel.step_memory import measure

log = logging.getLogger("vembed")

FLOPS_PER_PARAMETER_AND_TOKEN = 6.0
"""Forward and backward pass."""
NUM_COMPARED_EXAMPLES = 8
"""Examples whose inputs are counted, and compared."""
MAX_COSINE_DISTANCE_HALF = 1e-2
"""Largest 1 - cosine of an embedding by compiled and by plain layers, in 16 bits."""
MAX_COSINE_DISTANCE_FLOAT32 = 1e-4


def decide_compilation(
    units: Sequence[Any],
    repeats: float,
    featuriser: BaseFeaturiser[Any],
    session: Session,
) -> None:
    """Decide `torch_compile: auto` on a GPU, by the arithmetic of the run.

    `units`: a sample of the inputs. `repeats`: how many such samples the run passes through the model.
    """
    placement = session.placement
    config = placement.run.config
    if config.model.torch_compile != "auto" or session.device.type != "cuda":
        return
    features = featuriser.features(units)
    num_tokens = repeats * sum(feature.length for feature in features)
    size = placement.size or measure(config)
    session.placement = placement.for_work(
        FLOPS_PER_PARAMETER_AND_TOKEN * size.total * num_tokens
    )


def check_compiled(
    model: nn.Module,
    embedder: EmbeddingModel,
    featuriser: BaseFeaturiser[Any],
    units: Sequence[Any],
    session: Session,
) -> None:
    """Log whether the layers of the model are compiled, where there is a choice. Collective.

    Those that `auto` has compiled are compared with plain ones. Where they differ, or do not compile, plain layers are
    used, with a warning.
    """
    asked = session.placement.run.config.model.torch_compile
    layers = layers_of(embedder.backbone)
    is_compiled = any(layer._compiled_call_impl for layer in layers)
    if session.placement.compilation.value and not is_compiled:
        option = "auto" if asked == "auto" else "torch_compile: true has no effect"
        reason = f"{option}: layers with gradient checkpointing and packed texts cannot be compiled"
        decision = Decision(False, reason)
        session.placement = replace(session.placement, compilation=decision)
    if asked != "auto" or session.device.type == "cuda":
        log.info(f"compiled layers: {session.placement.compilation}")
    if asked != "auto" or not session.placement.compilation.value:
        return
    features = featuriser.features(units)
    indices = indices_by_modality(features, featuriser.modalities)
    feeder = Feeder(featuriser, session.device)
    (inputs,) = feeder.feed([list(indices.items())], features)
    problem = difference(model, layers, inputs, session)
    # All processes decide alike: compiled and plain layers round differently.
    if not collectives.max_ints([int(problem is not None)])[0]:
        return
    reason = f"auto: {problem or 'another process could not compile them'}"
    log.warning(f"compiled layers: false ({reason})")
    for layer in layers:
        layer._compiled_call_impl = None
    session.placement = replace(session.placement, compilation=Decision(False, reason))


def difference(
    model: nn.Module, layers: Sequence[nn.Module], inputs: ModelInputs, session: Session
) -> str | None:
    """Return what is wrong with the compiled layers. Leaves no gradients. Collective under FSDP.

    None: they give the embeddings of plain layers, and compile in the backward pass too.
    """
    from torch._dynamo.exc import TorchDynamoException  # imports the compiler

    was_training = model.training
    compiled_calls = [layer._compiled_call_impl for layer in layers]
    # The gradients of this check are dropped, so FSDP need not sum them over the processes.
    set_gradient_sync(model, False)
    try:
        # Dropout would make the two differ.
        model.eval()
        with torch.no_grad():
            compiled = [output.float() for output in model(inputs)]
            for layer in layers:
                layer._compiled_call_impl = None
            plain = [output.float() for output in model(inputs)]
            for layer, call in zip(layers, compiled_calls, strict=True):
                layer._compiled_call_impl = call
        model.train()
        outputs = [output for output in model(inputs) if output.requires_grad]
        if outputs:
            torch.autograd.backward([output.float().sum() for output in outputs])
    except TorchDynamoException as error:
        if isinstance(model, FSDPModule) and not CAN_RESET_FSDP2:
            raise UserError(
                "layers cannot be compiled, and this FSDP2 cannot go on after a failed pass: set torch_compile: false, "
                "or install torch 2.13"
            ) from error
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.200}"
    finally:
        for layer, call in zip(layers, compiled_calls, strict=True):
            layer._compiled_call_impl = call
        discard_passes(model)
        model.train(was_training)
    distance = 0.0
    for left, right in zip(compiled, plain, strict=True):
        cosines = functional.cosine_similarity(left, right, dim=1)
        distance = max(distance, float((1 - cosines).max()))
    limit = MAX_COSINE_DISTANCE_FLOAT32
    if session.placement.computes_in_half:
        limit = MAX_COSINE_DISTANCE_HALF
    if distance <= limit:
        return None
    return f"compiled layers give other embeddings (1 - cosine is {distance:.1e})"
