"""Rows of the table that no room of the house shows by itself: packaging, variables, a run on two processes."""

import re
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import vembed
from benchmarks.strategies import STRATEGIES
from tests import tiny
from tests.commands import command
from tests.config.conftest import assert_options
from tests.docs.pages import ROOT, text_of
from tests.docs.test_links import EXTRAS, PROJECT
from tests.floors import NEWER_THAN_ITS_FLOOR, constraints, lower_bounds
from tests.training.test_run import config_file, log_text, metrics
from vembed.config.loading import load_config
from vembed.models import precision
from vembed.parallel.launch import rank_environments

STEPS = 6
ONE_STEP = {"max_steps": 1, "save_steps": None}


@pytest.mark.promise("A06", "A07")
def test_extras_and_lower_bounds():
    extras = {
        name: {Requirement(entry).name for entry in value}
        for name, value in EXTRAS.items()
    }
    assert extras["fsdp"] == {"bitsandbytes", "torchao"}
    assert {"demo", "gpu", "wandb", "dev", "docs"} <= set(extras)
    floors = {entry.name: entry for entry in map(Requirement, PROJECT["dependencies"])}
    for name, floor in {"accelerate": "1.10.0", "datasets": "4.0.0"}.items():
        assert Version(floor) in floors[name].specifier
    assert Version("0.34.4") not in floors["huggingface-hub"].specifier, (
        "Transformers 5 cannot be had with it"
    )
    for entry in floors.values():
        assert Version(version(entry.name)) in entry.specifier, entry


def test_the_oldest_versions_that_ci_trains_with_are_the_lower_bounds():
    lowest = lower_bounds()
    tried = constraints()
    names = {Requirement(dependency).name for dependency in PROJECT["dependencies"]}
    assert lowest.keys() == tried.keys() == names
    for name in lowest.keys() - {NEWER_THAN_ITS_FLOOR}:
        assert Version(lowest[name]) == Version(tried[name]), name


@pytest.mark.promise("A14", "D35", "E31", "E33")
def test_variables_reach_every_process():
    options = {
        "NCCL_DEBUG": "TRACE",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "PATH": "/bin",
    }
    for environment in rank_environments(3, env=options):
        assert options.items() <= environment.items()


@pytest.mark.promise("C17")
def test_the_fourth_preset_of_document_c_is_a_config_of_three_lines():
    block = {"strategy": "ddp", "num_nodes": 4, "devices": 8, "sync_batchnorm": True}
    config = load_config({"model_name": "m", "data_path": "d", "distributed": block})
    assert_options(
        config, strategy="ddp", num_machines=4, num_processes=8, sync_batchnorm=True
    )


@pytest.mark.promise("A26")
def test_the_claim_about_speed_is_a_measured_table():
    page = text_of(ROOT / "docs" / "benchmarks.md")
    section = page.split("## DDP against FSDP")[1].split("\n## ")[0]
    cells = {
        line.split("|")[1].strip()
        for line in section.splitlines()
        if line.startswith("|")
    }
    assert {"ddp", *STRATEGIES} <= cells
    assert "benchmarks.md#ddp-against-fsdp" in text_of(
        ROOT / "docs" / "other-guides.md"
    )


# ---- runs ----------------------------------------------------------------------------------------------------------


def write_config(folder, **more):
    folder.mkdir()
    return config_file(folder, **{"save_steps": 2, "micro_batch_tokens": 128} | more)


@pytest.mark.promise(
    "A08",
    "A22",
    "D19",
    "D20",
    "D21",
    "D38",
    "D41",
    "D44",
    "E01",
    "E06",
    "E14",
    "E24",
    "E30",
    "E32",
    "E35",
    "E38",
)
def test_one_command_on_two_processes(tmp_path):
    first = tmp_path / "one"
    vembed.train(write_config(first))
    two = tmp_path / "two"
    config = write_config(two, batch_size=8, profile_steps=[5, 6])
    words = ("train", str(config), "--nproc", "2", "use_fsdp=true")
    command(*words, env={"CUDA_VISIBLE_DEVICES": ""}, code=0)

    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        sharded = metrics(two / "run", key)
        assert len(sharded) == STEPS
        assert sharded == pytest.approx(metrics(first / "run", key), rel=tolerance)
    assert max(metrics(two / "run", "learning_rate")) == pytest.approx(2.0e-3)
    memory = metrics(two / "run", "memory")[-1]
    assert [entry["rank"] for entry in memory] == [0, 1]

    log = log_text(two / "run")
    assert "global batch: 16 examples over 2 processes (8 each)" in log
    total = int(re.search(r"Total: ([\d,]+)", log)[1].replace(",", ""))
    held = [
        int(part.replace(",", ""))
        for part in re.search(r"Held by each rank: (.*)", log)[1].split(", ")
    ]
    assert all(number == pytest.approx(total / 2, rel=0.1) for number in held)
    for step in range(1, STEPS + 1):
        assert log.count(f"step {step}/{STEPS}  ") == 1
    assert {path.name for path in (two / "run").glob("checkpoint-*")} == {
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-6",
    }
    for rank in range(2):
        events = tiny.read_json(two / "run" / f"trace-rank{rank}.json")["traceEvents"]
        names = {event["name"] for event in events}
        assert {
            "fsdp::all_gather_copy_in",
            "c10d::_allgather_base_",
            "c10d::_reduce_scatter_base_",
        } <= names
    texts = tiny.texts(5, seed=3)
    vectors = [
        vembed.Embedder(folder / "run" / "final").encode(texts)
        for folder in (first, two)
    ]
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-4)


@pytest.mark.promise("C28")
def test_accumulated_batches_have_only_their_own_negatives(tmp_path):
    losses = []
    for batch_size, accumulated in ((16, 1), (8, 2)):
        config = write_config(
            tmp_path / str(batch_size),
            batch_size=batch_size,
            gradient_accumulation_steps=accumulated,
            **ONE_STEP,
        )
        losses += metrics(vembed.train(config).output_dir)
    # Eight candidates are fewer to tell apart than sixteen.
    assert losses[1] < losses[0] - 0.1


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.promise("C12", "D22", "E16")
def test_a_run_recomputes_layers_and_drops_out(checkpointing, tmp_path, monkeypatch):
    calls = []
    real = precision.checkpoint
    monkeypatch.setattr(
        precision,
        "checkpoint",
        lambda *args, **more: calls.append(args) or real(*args, **more),
    )
    losses = []
    for dropout in (0.0, 0.5):
        folder = tmp_path / f"dropout-{dropout}"
        config = write_config(
            folder,
            model_name=str(tiny.shared(tiny.tiny_bert, dropout=dropout)),
            gradient_checkpointing=checkpointing,
            batch_size=8,
            **ONE_STEP,
        )
        losses += metrics(vembed.train(config).output_dir)
    assert bool(calls) == checkpointing
    assert losses[0] != losses[1]
