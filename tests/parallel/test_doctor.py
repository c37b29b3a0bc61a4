"""`vembed doctor`: facts in the documents' order, a self-test with pass or fail, and the checklist of a config."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import command
from tests.harness import rank_outcomes
from tests.tiny import shared, tiny_bert
from vembed.cli import machine_checks, selftest
from vembed.cli.commands import doctor
from vembed.parallel.environment import GROUP
from vembed.pipelines import prediction

FACTS = [
    r"vembed doctor",
    r"={50}",
    r"flash-attn: ",
    r"bitsandbytes: ",
    r"Found \d+ GPU\(s\)",
    r"CUDA available: (True|False)",
    r"CUDA devices: \d+",
    r"NCCL available: (True|False)",
    r"NCCL version: (\d+\.\d+\S*|not available)",
    r"bf16: ",
    r"\* FSDP initialized with 2 processes .*: pass",
    r"Loading model with FSDP\.\.\.",
    r"\* Model loaded successfully with FSDP .*: pass",
    r"Testing basic operations\.\.\.",
    r"\* forward: .*: pass",
    r"\* backward: .*: pass",
    r"\* gather: .*: pass",
    r"\* weight edit: .*: pass",
    r"Testing FSDP-aware memory management\.\.\.",
    r"Rank 0, (GPU \d+: Allocated|CPU: RSS): ",
    r"Rank 1, (GPU \d+: Allocated|CPU: RSS): ",
    r"Total across 2 processes: ",
    r"\* memory: .*: pass",
    r"Self-test: pass",
    r"1\. GPUs visible: .*: pass",
    r"2\. strategy: fsdp, FSDP2 FULL_SHARD, TRANSFORMER_BASED_WRAP .*: pass",
    r"3\. batch: 64 per process, .*: pass",
    r"4\. gradient checkpointing: on .*: pass",
    r"5\. memory: 34,688 parameters need .*: pass",
    r"6\. dtypes: masters float32, .*: pass",
    r"7\. (gloo|NCCL): .*: pass",
]


def config_file(folder, options):
    path = folder / "run.yaml"
    named = f"model_name: {shared(tiny_bert)}\ndata_path: train.jsonl\n"
    path.write_text(named + options)
    return str(path)


@pytest.mark.promise("A02", "A04", "A05", "A20", "A21", "B23", "D45")
def test_facts_self_test_and_checklist_in_order(tmp_path):
    config = config_file(tmp_path, "use_fsdp: true\nbatch_size: 64\n")
    done = command("doctor", config, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert "torchao" not in done.stderr and "pytree" not in done.stderr
    lines = iter(done.stdout.splitlines())
    for fact in FACTS:
        assert any(re.match(fact, line) for line in lines), fact


def self_test_with_a_fault():
    selftest.TOLERANCE = -1.0
    sys.stdout = io.StringIO()
    with pytest.raises(SystemExit) as caught:
        selftest.main()
    assert caught.value.code == 1
    return sys.stdout.getvalue()


@pytest.mark.promise("A20")
def test_a_fault_is_named_with_its_rank_and_ends_the_self_test():
    first, second = rank_outcomes(self_test_with_a_fault, 2)
    for rank, outcome in enumerate((first, second)):
        assert outcome.error is None
        last = outcome.result.splitlines()[-1]
        assert last.startswith(f"* forward: FAIL on rank {rank}: RuntimeError: ")


@pytest.mark.promise("A20")
def test_one_process_is_enough(monkeypatch, capsys):
    for name in GROUP:
        monkeypatch.delenv(name, raising=False)
    assert selftest.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("* Started with 1 process, so nothing is sharded")
    assert lines[-1].startswith("* memory: ") and lines[-1].endswith(": pass")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("mixed_precision: fp16\n", "1. GPUs visible: none, "),
        (
            "strategy: single\n",
            "2. strategy, batch, memory: strategy: single, but 2 processes ",
        ),
        ("batch_size: 64\nuse_gradient_cache: false\n", "3. batch: 64 "),
        (
            "use_fsdp: true\ngradient_checkpointing: false\n",
            "4. gradient checkpointing: off ",
        ),
    ],
)
@pytest.mark.promise("D45")
def test_a_point_that_fails_makes_exit_code_1(
    options, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(machine_checks, "run_ranks", lambda *_: 0)
    monkeypatch.setattr(machine_checks.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_checks.torch.cuda, "device_count", lambda: 0)
    assert doctor.doctor(config_file(tmp_path, options), 2)[1] == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(named)]
    assert ": FAIL" in line


def test_a_model_that_needs_shards_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine_checks, "run_ranks", lambda *_: 0)
    monkeypatch.setattr(prediction, "memory_of_a_process", lambda *_: 400_000)
    config = config_file(tmp_path, "strategy: ddp\n")
    assert doctor.doctor(config, 2)[1] == 1
    printed = capsys.readouterr().out
    assert re.search(r"^2\. .*a whole copy takes.*: FAIL$", printed, re.MULTILINE)


def test_a_failed_self_test_makes_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(machine_checks, "run_ranks", lambda *_: 1)
    assert doctor.doctor(None, 2)[1] == 1
    assert "Self-test: FAIL" in capsys.readouterr().out


def test_a_broken_torch_is_reported_beside_the_versions(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: wrong build')")
    done = subprocess.run(
        [sys.executable, "-m", "vembed", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"},
    )
    assert done.returncode == 1
    assert "vembed 0." in done.stdout
    assert "torch cannot be imported (OSError: libtorch.so: wrong build)" in done.stdout
