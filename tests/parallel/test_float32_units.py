"""Projections and heads compute in float32 under every strategy, although the units beside them compute in bf16."""

import pytest
import torch
from torch import nn

from tests.harness import STRATEGIES, run_ranks
from tests.parallel.steps import config_of, parts_of, prepared, share_of_loss
from tests.tiny import shared, tiny_bert, tiny_clip
from vembed.parallel import parameters
from vembed.parallel.session import start_session

MODELS = {
    "head": (tiny_bert, {"mrl_dims": [16, 8], "mrl_projection": True}),
    "projections": (tiny_clip, {}),
    "frozen": (
        tiny_clip,
        {"use_lora": True, "torch_dtype": "bfloat16", "freeze": ["vision"]},
    ),
}


def seen(strategy):
    """On every rank, for each model: dtypes inside of heads and projections and of all gradients, and the norm."""
    actual = {}
    configs = {}
    common = {"mixed_precision": "bf16", **STRATEGIES[strategy]}
    for name, (make, options) in MODELS.items():
        configs[name] = config_of(shared(make), **common, **options)
    with start_session(configs["head"]) as session:
        for name, config in configs.items():
            model, featuriser = prepared(session, config, dtype=torch.float32)
            dtypes = set()

            def note(module, inputs, output, dtypes=dtypes):
                for tensor in (*inputs, output, *module.parameters(recurse=False)):
                    dtypes.add(tensor.dtype)

            for part in model.modules_behind_towers().values():
                for module in part.modules():
                    if isinstance(module, nn.Linear):
                        module.register_forward_hook(note)
            share_of_loss(model(parts_of(featuriser, session.rank, 0))).backward()
            gradients = [weight.grad for weight in model.parameters()]
            dtypes.update(grad.dtype for grad in gradients if grad is not None)
            norm = 1.0
            if strategy != "ddp":
                norm = float(parameters.global_grad_norm(model))
            actual[name] = dtypes, norm
    return actual


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_heads_were_computed_in_bfloat16_where_the_model_is_sharded(strategy):
    for result in run_ranks(seen, 2, strategy):
        for name, (dtypes, norm) in result.items():
            assert dtypes == {torch.float32}, name
            assert norm > 0.0, name
