"""Options of a sharded run, each seen on what two processes have built with it."""

import os
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tests import tiny
from tests.built import described, model_of
from tests.harness import run_ranks
from vembed.config.loading import resolve_run
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.models.families.backbones import layers_of
from vembed.parallel.session import start_session

FSDP1 = {"strategy": "fsdp", "fsdp_version": 1}
SIZED = {
    "strategy": "fsdp",
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 900,
}
MANY_OF_FSDP2 = {
    "strategy": "fsdp",
    "fsdp_offload_params": True,
    "fsdp_transformer_layer_cls_to_wrap": "BertSelfOutput",
    "fsdp_forward_prefetch": True,
    "gradient_checkpointing": False,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
CASES = {  # as few as there can be: each starts a session
    "auto": {},
    "ddp": {"strategy": "ddp", "mixed_precision": "bf16"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp2": {"strategy": "fsdp"},
    "fsdp1": FSDP1,
    "hsdp_file": {"accelerate_config": "accelerate_fsdp_offload", "num_processes": 2},
    "sized": SIZED,
    "large": {**SIZED, "fsdp_min_num_params": 6000},
    "many_of_fsdp2": MANY_OF_FSDP2,
    "all_of_fsdp1": {
        **FSDP1,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    },
    "bf16": {"strategy": "fsdp", "mixed_precision": "bf16"},
    "param": {
        "strategy": "fsdp",
        "mixed_precision": "bf16",
        "dist_timeout_minutes": 7,
    },
    "reduce": {
        "strategy": "fsdp",
        "mixed_precision": "bf16",
        "fsdp_reduce_dtype": "bfloat16",
    },
}

ROWS = {
    # option: (case, what is seen, what it is, case without it)
    "strategy": ("fsdp", "kind", "FSDP2", "auto"),
    "accelerate_config": ("hsdp_file", "offload", True, "fsdp2"),
    "mixed_precision": ("ddp", "layer dtype", "torch.bfloat16", "auto"),
    "fsdp_version": ("fsdp1", "kind", "FSDP1", "fsdp2"),
    "fsdp_sharding_strategy": (
        "all_of_fsdp1",
        "unit strategies",
        ["SHARD_GRAD_OP"],
        "fsdp1",
    ),
    "fsdp_offload_params": ("many_of_fsdp2", "offload", True, "fsdp2"),
    "fsdp_auto_wrap_policy": ("sized", "has layers as units", False, "fsdp2"),
    "fsdp_min_num_params": ("sized", "more than 5 units", True, "large"),
    "fsdp_transformer_layer_cls_to_wrap": (
        "many_of_fsdp2",
        "has layers as units",
        False,
        "fsdp2",
    ),
    "fsdp_forward_prefetch": ("many_of_fsdp2", "forward prefetch", True, "fsdp2"),
    "gradient_checkpointing": ("many_of_fsdp2", "recomputes", False, "fsdp2"),
    "fsdp_state_dict_type": ("many_of_fsdp2", "writes whole models", True, "fsdp2"),
    "fsdp_reduce_dtype": ("reduce", "reduce dtype", "torch.bfloat16", "param"),
    "dist_timeout_minutes": ("param", "timeout", 7 * 60.0, "fsdp2"),
}


@cache
def facts():
    """Return what rank 1 of two saw in each case."""
    cases = {
        name: {"model_name": tiny.tiny_bert, "data_path": "unused", **options}
        for name, options in CASES.items()
    }
    cases = {
        name: {**case, "model_name": str(tiny.shared(case["model_name"]))}
        for name, case in cases.items()
    }
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
    run = session.placement.run
    placement = session.placement
    description = described(run.config)
    embedder = model_of(
        run.config,
        description,
        compute_dtype=placement.compute_dtype,
        recompute=run.recomputation.value,
        meta=session.builds_empty,
    )
    model = session.prepare(embedder, description.layer_classes)
    featuriser = Featuriser(description)
    inputs = featuriser.collate(
        featuriser.features([(Item(text="red green"), "query")])
    )
    dtypes = []
    linear = next(
        module
        for name, module in model.named_modules()
        if name.endswith(("attention.self.query", "q_proj"))
    )
    linear.register_forward_hook(lambda _, __, output: dtypes.append(str(output.dtype)))
    (output,) = model([("text", inputs)])
    output.float().sum().backward()
    old = FullyShardedDataParallel.fsdp_modules(model)
    new = [module for module in model.modules() if isinstance(module, FSDPModule)]
    units = (
        [unit.module for unit in old]
        if old
        else [unit for unit in new if unit is not model]
    )
    group = dist.group.WORLD
    assert group is not None
    policy = new[0]._get_fsdp_state()._fsdp_param_group if new else None
    return {
        "kind": "FSDP1" if old else "FSDP2" if new else "copies",
        "unit strategies": sorted({unit.sharding_strategy.name for unit in old}),
        "offload": bool(
            policy and type(policy.offload_policy).__name__ == "CPUOffloadPolicy"
        ),
        "has layers as units": any(
            "BertLayer" in type(unit).__name__ for unit in units
        ),
        "more than 5 units": len(units) > 5,
        "forward prefetch": bool(
            units
            and new
            and any(u._get_fsdp_state()._states_to_forward_prefetch for u in new)
        ),
        "recomputes": all(
            isinstance(layer.forward, partial) for layer in layers_of(model)
        ),
        "writes whole models": session.fsdp is not None
        and session.fsdp.state_dict_type == "FULL_STATE_DICT",
        "layer dtype": dtypes[0],
        "reduce dtype": str(policy.mp_policy.reduce_dtype) if policy else None,
        "timeout": group._get_backend(
            torch.device("cpu")
        ).options._timeout.total_seconds(),
    }
