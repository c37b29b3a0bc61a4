"""What `--dry-run`, `plan` and `doctor` say of a config is what its run says and does."""

import os
import re
from functools import cache, partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tests import tiny
from tests.built import described, model_of
from tests.harness import run_ranks
from tests.parallel.steps import listen
from vembed.cli.arguments import TrainArguments
from vembed.cli.machine_checks import checklist
from vembed.cli.run_train import Launch, describe_run, resolve_launch
from vembed.config.loading import resolve_run
from vembed.models.families.backbones import layers_of
from vembed.parallel.devices import bf16_instructions
from vembed.parallel.environment import RankInfo
from vembed.parallel.parameters import local_bytes
from vembed.parallel.placement import PRECISION_DTYPES, memory_of_a_process, place
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import GIB, MemoryEstimate, measure

LORA = {"use_lora": True, "lora_r": 2}
QLORA = {**LORA, "quantize_weights": "nf4", "model_name": tiny.tiny_qwen3}
FSDP = {"strategy": "fsdp"}
FSDP1 = {**FSDP, "fsdp_version": 1}
GRAD_OP = {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}
ONE = {
    "single": {},
    "single_bf16": {"mixed_precision": "bf16"},
    "single_though_fsdp": {"strategy": "fsdp", "fsdp_min_num_params": 3},
    "single_lora": LORA,
    "single_qlora": QLORA,
}
TWO = {
    "auto": {"fsdp_forward_prefetch": True},
    "ddp": {"strategy": "ddp"},
    "ddp_bf16": {
        "strategy": "ddp",
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
    },
    "ddp_lora": {"strategy": "ddp", **LORA},
    "no_shard": {**FSDP, "fsdp_sharding_strategy": "NO_SHARD"},
    "fsdp2": FSDP,
    "fsdp2_grad_op": FSDP | GRAD_OP,
    "fsdp2_kept": {**FSDP, "gradient_checkpointing": False},
    "fsdp2_param": {**FSDP, "mixed_precision": "bf16", "fsdp_forward_prefetch": True},
    "fsdp2_offload": {**FSDP, "fsdp_offload_params": True},
    "fsdp2_lora": FSDP | LORA,
    "fsdp2_qlora": FSDP | QLORA,
    "fsdp1": FSDP1,
    "fsdp1_grad_op": FSDP1 | GRAD_OP,
    **{
        name: {"accelerate_config": name, "num_processes": 2, "num_machines": 1}
        for name in (
            "accelerate_ddp",
            "accelerate_fsdp1",
            "accelerate_fsdp_offload",
            "large_scale_fsdp",
        )
    },
}
FOUR = {
    "hsdp": {
        "strategy": "fsdp",
        "fsdp_sharding_strategy": "HYBRID_SHARD",
        "num_processes": 2,
        "num_machines": 2,
    },
    "accelerate_hsdp": {"accelerate_config": "accelerate_hsdp", "num_processes": 2},
}
CASES = {**ONE, **TWO, **FOUR}


def full(options):
    values = {"model_name": tiny.tiny_bert, "data_path": "unused", **options}
    return {**values, "model_name": str(tiny.shared(values["model_name"]))}


@cache
def ran():
    """What each run said and did on rank 0: all runs of one size share their processes."""
    actual = {}
    for num_ranks, cases in ((1, ONE), (2, TWO), (4, FOUR)):
        every = {name: full(options) for name, options in cases.items()}
        actual |= run_ranks(run_all, num_ranks, every, timeout=300)[0]
    return actual


def run_all(cases):
    actual = {}
    world = int(os.environ["WORLD_SIZE"])
    for name, options in cases.items():
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        if world == 4:  # two "machines" of two
            os.environ |= {
                "LOCAL_WORLD_SIZE": "2",
                "LOCAL_RANK": str(int(os.environ["RANK"]) % 2),
            }
        if world == 1:
            for variable in (
                "RANK",
                "WORLD_SIZE",
                "LOCAL_RANK",
                "LOCAL_WORLD_SIZE",
                "MASTER_ADDR",
            ):
                os.environ.pop(variable, None)
            port = os.environ.pop("MASTER_PORT")
        lines = listen()
        run = resolve_run(options, env={})
        with start_session(run) as session:
            description = described(run.config)
            model = model_of(
                run.config,
                description,
                device=session.model_device,
                computes_on=session.device,
                compute_dtype=PRECISION_DTYPES[session.mixed_precision],
                recompute=run.recomputation.value,
                meta=session.builds_empty,
            )
            model = session.prepare(model, description.layer_classes)
            old = FullyShardedDataParallel.fsdp_modules(model)
            is_new = isinstance(model, FSDPModule)
            actual[name] = {
                "lines": list(lines),
                "version": 1 if old else 2 if is_new else None,
                "units": sorted({unit.sharding_strategy.name for unit in old}),
                "recomputes": all(
                    isinstance(layer.forward, partial) for layer in layers_of(model)
                ),
                "parameters": local_bytes(model),
                "offload": is_new
                and "CPU"
                in type(
                    model._get_fsdp_state()._fsdp_param_group.offload_policy
                ).__name__,
                "prefetches": any(
                    unit._get_fsdp_state()._states_to_forward_prefetch
                    for unit in model.modules()
                    if isinstance(unit, FSDPModule)
                ),
                "world": session.world_size,
            }
        if world == 1:
            os.environ["MASTER_PORT"] = port
    return actual


def said(options, num_ranks):
    """What the tools that start nothing decide, for as many processes."""
    run = resolve_run(full(options), env={})
    launch = Launch(num_ranks, "--nproc")
    if run.processes.value != "auto":
        launch = resolve_launch(run, env={"CUDA_VISIBLE_DEVICES": ""})
    device = torch.device("cpu")
    ranks = RankInfo(0, launch.world_size, 0, launch.num_processes)
    memory = memory_of_a_process(ranks, device)
    placement = place(run, ranks, device, memory, instructions=bf16_instructions())
    return run, launch, placement


def one(lines, start):
    (line,) = [line for line in lines if line.startswith(start)]
    return line


@pytest.mark.parametrize("name", CASES)
def test_all_say_what_the_run_says_and_does(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    num_ranks = 1 if name in ONE else 2 if name in TWO else 4
    done = ran()[name]
    run, launch, placement = said(CASES[name], num_ranks)
    assert done["world"] == launch.world_size == num_ranks
    text = describe_run(run, launch, TrainArguments(is_dry_run=True))
    first = "\n\nnote: " if "\n\nnote: " in text else "\n\nstrategy: "
    dry = text[text.index(first) :].splitlines()
    lines = [line for _, line in checklist(run, launch, self_test_passed=True)]
    points = dict(enumerate(lines, start=1))

    # the strategy, and what the model has become
    strategy = one(done["lines"], "strategy: ")
    assert (
        strategy
        == f"strategy: {placement.strategy.value} ({placement.strategy.reason})"
    )
    assert f"({placement.strategy.reason})" in points[2]
    asked = one(dry, "strategy: ").split()[1]
    assert asked in (placement.strategy.value, "auto")
    fsdp = placement.fsdp
    assert done["version"] == (None if fsdp is None else fsdp.version)
    assert done["prefetches"] is (done["version"] == 2 and fsdp.forward_prefetch)
    if fsdp is not None:
        assert f"fsdp: version {fsdp.version}, {fsdp.sharding_strategy}" in one(
            dry, "fsdp: "
        )
        assert f"FSDP{fsdp.version} {fsdp.sharding_strategy}" in points[2]
        assert done["units"] == ([fsdp.sharding_strategy] if fsdp.version == 1 else [])
        is_said = "offloaded" in one(dry, "fsdp: ")
        assert done["offload"] is fsdp.offload is is_said

    # recomputation
    recomputation = one(done["lines"], "gradient checkpointing: ")
    assert recomputation == one(dry, "gradient checkpointing: ")
    assert done["recomputes"] is recomputation.startswith(
        "gradient checkpointing: true"
    )
    assert points[4].startswith(
        f"gradient checkpointing: {'on' if done['recomputes'] else 'off'}"
    )

    # precision
    precision = one(done["lines"], "device: ").partition("mixed precision: ")[2]
    assert precision == f"{placement.precision.value} ({placement.precision.reason})"
    assert placement.precision.reason in points[6]
    assert one(dry, "mixed precision: ").split()[2] in (
        "auto",
        placement.precision.value,
    )

    # memory: what a process holds is what is predicted, and doctor gives the figures of plan
    size = measure(run.config)
    held = size.weight_bytes / placement.num_shards
    if (
        "quantize_weights" not in CASES[name]
    ):  # whose tables of 4-bit blocks are small models' largest part
        assert done["parameters"] == pytest.approx(held, rel=0.1)
    need = MemoryEstimate(placement, size).in_step()
    assert need.weights == pytest.approx(held)
    assert f"need {need.total / GIB:.2f}GB" in points[5]

    # options without effect are named by the log
    for note in placement.notes:
        assert note in done["lines"]
    if name in ("auto", "single_though_fsdp"):
        without_effect = r"fsdp_\w+: \w+ .* has no effect: the strategy is (ddp|single)"
        assert any(re.search(without_effect, note) for note in placement.notes)
