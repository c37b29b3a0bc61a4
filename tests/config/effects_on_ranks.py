"""Options of FSDP's units, each seen on what two processes have built with it."""

import os
from functools import cache

from torch.distributed.fsdp import FSDPModule

from tests import tiny
from tests.built import described, model_of
from tests.harness import run_ranks
from vembed.config.loading import resolve_run
from vembed.parallel.session import start_session

SIZED = {
    "strategy": "fsdp",
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 900,
}
CASES = {  # as few as there can be: each starts a session
    "plain": {"strategy": "fsdp"},
    "sized": SIZED,
    "large": {**SIZED, "fsdp_min_num_params": 6000},
    "inner": {
        "strategy": "fsdp",
        "fsdp_transformer_layer_cls_to_wrap": "BertSelfOutput",
        "fsdp_forward_prefetch": True,
    },
}

ROWS = {
    # option: (case, what is seen, what it is, case without it)
    "fsdp_auto_wrap_policy": ("sized", "has layers as units", False, "plain"),
    "fsdp_min_num_params": ("sized", "more than 5 units", True, "large"),
    "fsdp_transformer_layer_cls_to_wrap": (
        "inner",
        "has layers as units",
        False,
        "plain",
    ),
    "fsdp_forward_prefetch": ("inner", "forward prefetch", True, "plain"),
}


@cache
def facts():
    """Return what rank 1 of two saw in each case."""
    base = {"model_name": str(tiny.shared(tiny.tiny_bert)), "data_path": "unused"}
    cases = {name: {**base, **options} for name, options in CASES.items()}
    return run_ranks(_observe, 2, cases, process_group=False, timeout=300)[1]


def _observe(cases):
    recorded = {}
    for name, options in cases.items():
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        run = resolve_run(options, env={})
        with start_session(run) as session:
            recorded[name] = _facts(session)
    return recorded


def _facts(session):
    config = session.placement.run.config
    description = described(config)
    embedder = model_of(config, description, meta=session.builds_empty)
    model = session.prepare(embedder, description.layer_classes)
    units = [
        module
        for module in model.modules()
        if isinstance(module, FSDPModule) and module is not model
    ]
    return {
        "has layers as units": any(
            "BertLayer" in type(unit).__name__ for unit in units
        ),
        "more than 5 units": len(units) > 5,
        "forward prefetch": any(
            unit._get_fsdp_state()._states_to_forward_prefetch for unit in units
        ),
    }
