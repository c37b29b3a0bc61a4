"""`vembed plan --gpu 2xA100-80GB` and `--memory 80`: hardware that is not here, with an estimate of the hours."""

import json
from pathlib import Path

import pytest

from tests.tiny import shared, tiny_qwen3
from vembed.parallel.devices import read_hardware


@pytest.fixture
def plan(vembed):
    """A config with 1,000 pairs of two short texts."""
    Path("train.jsonl").write_text('{"query": "red", "positive": "green"}\n' * 1000)
    Path("cfg.yaml").write_text(
        f"model_name: {shared(tiny_qwen3)}\ndata_path: train.jsonl\nbatch_size: 10\n"
    )
    return "cfg.yaml"


def seconds_of(done):
    return json.loads(done.out)["seconds"]


def test_hours_on_gpus_that_are_not_here(vembed, plan):
    words = f"plan {plan} epochs=2 use_gradient_cache=false --gpu"
    done = vembed(words, "2xA100-80GB")
    words = words.replace("plan", "plan --json", 1)
    for part in (
        "GB of the 77.6 GB of a process (A100-80GB): fits",
        "mixed precision: bf16 (auto: A100-80GB computes in bfloat16)",
        "off by a factor of two: 100 steps x 20 examples x ",
        "hours: about 0 (under 1 s), often",
        "35% of the 312 TFLOPS of A100-80GB's data sheet, on 2 process",
    ):
        assert part in done.out
    expected = seconds_of(vembed(words, "2xA100-80GB"))
    single = seconds_of(vembed(words, "A100-80GB"))
    assert single == pytest.approx(2 * expected, rel=0.06), "half the GPUs"
    again = seconds_of(vembed(words, "2xA100-80GB", "gradient_checkpointing=true"))
    assert again == pytest.approx(4 / 3 * expected, rel=0.1), "one more forward pass"


def test_memory_alone(vembed, plan):
    done = vembed("plan", plan, "--memory", "80", "--nproc", "4")
    assert "of the 77.6 GB of a process (a GPU of 80 GB): fits" in done.out
    assert "processes, shards       4" in done.out
    assert "hours: not estimated (--gpu" in done.out
    vembed("plan", plan, "--memory", "0.01", code=1)


@pytest.mark.parametrize("data_path", ["elsewhere.jsonl", "beir"])
def test_data_without_an_estimate(vembed, plan, data_path):
    Path("beir").mkdir()
    Path("beir/corpus.jsonl").write_text('{"_id": "a", "text": "a document"}\n')
    done = vembed("plan", plan, "--gpu", "V100-32GB", f"data_path={data_path}")
    assert "hours: not estimated (data_path must be files of texts" in done.out
    assert "auto: V100-32GB has no bfloat16" in done.out


@pytest.mark.parametrize(
    ("words", "parts"),
    {
        "--gpu A100": ["--gpu A100", "A100-40GB, A100-80GB"],
        "--gpu GTX": ["--gpu GTX", "A100-80GB"],
        "--memory much": ["--memory 'much'", "as 80"],
        "--gpu 2xL4 --nproc 4": ["4 processes (num_processes)", "2 GPU(s)"],
    }.items(),
)
def test_mistakes(refused, plan, words, parts):
    refused(f"plan {plan} {words}", *parts)


@pytest.mark.parametrize("name", ["A100-80GB", "8x a100-80gb"])
def test_names_as_people_write_them(name):
    gpu, _ = read_hardware(name, None)
    assert gpu.name == "A100-80GB"
    assert gpu.memory == int(80 * 0.97 * 2**30)
    gpu, count = read_hardware("2xA100-80GB", "40")
    assert count == 2
    assert gpu.gigabytes == 40
