"""`vembed plan --gpu 2xA100-80GB` and `--memory 80`: hardware that is not here, with an estimate of the hours."""

import re
from pathlib import Path

import pytest

from tests.tiny import shared, tiny_qwen3
from vembed.errors import UserError
from vembed.parallel.devices import read_hardware


@pytest.fixture
def plan(vembed):
    """A config with 1,000 pairs of two short texts."""
    Path("train.jsonl").write_text('{"query": "red", "positive": "green"}\n' * 1000)
    Path("cfg.yaml").write_text(
        f"model_name: {shared(tiny_qwen3)}\ndata_path: train.jsonl\nbatch_size: 10\n"
    )
    return "cfg.yaml"


def hours(text):
    (actual,) = re.findall(r"hours: about (\S+) ", text)
    return float(actual)


def test_hours_on_gpus_that_are_not_here(vembed, plan):
    done = vembed(
        "plan", plan, "--gpu", "2xA100-80GB", "epochs=2", "use_gradient_cache=false"
    )
    assert done.code == 0, done.err
    assert "GB of the 77.6 GB of a process (A100-80GB): fits" in done.out
    assert "mixed precision: bf16 (auto: A100-80GB computes in bfloat16)" in done.out
    assert "off by a factor of two: 100 steps x 20 examples x " in done.out
    peak = "at an assumed 35% of the 312 TFLOPS of A100-80GB's data sheet, on 2 process"
    assert peak in done.out
    first = vembed(
        "plan", plan, "--gpu=A100-80GB", "epochs=2", "use_gradient_cache=false"
    ).out
    assert hours(first) == pytest.approx(2 * hours(done.out), rel=0.06), (
        "as many examples on half the GPUs"
    )
    again = vembed(
        "plan", plan, "--gpu", "2xA100-80GB", "epochs=2", "gradient_checkpointing=true"
    ).out
    assert hours(again) == pytest.approx(4 / 3 * hours(done.out), rel=0.1), (
        "one more forward pass"
    )


def test_memory_alone(vembed, plan):
    done = vembed("plan", plan, "--memory", "80", "--nproc", "4")
    assert (
        "of the 77.6 GB of a process (a GPU of 80 GB): fits" in done.out
        and "processes, shards       4" in done.out
    )
    assert "hours: not estimated (--gpu" in done.out
    assert vembed("plan", plan, "--memory", "0.01").code == 1
    done = vembed("plan", plan, "--gpu", "V100-32GB", "data_path=elsewhere.jsonl")
    assert (
        "hours: not estimated (data_path must be files of texts that are here)"
        in done.out
    )
    assert "auto: V100-32GB has no bfloat16" in done.out


def test_a_beir_folder_has_no_estimate(vembed, plan, tmp_path):
    folder = tmp_path / "beir"
    folder.mkdir()
    (folder / "corpus.jsonl").write_text('{"_id": "a", "text": "a document"}\n')
    done = vembed("plan", plan, "--gpu", "V100-32GB", f"data_path={folder}")
    assert done.code == 0, done.err
    assert "hours: not estimated" in done.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpu", "A100"), "--gpu A100: give one of A100-40GB, A100-80GB"),
        (
            ("--memory", "much"),
            "--memory 'much': give the memory of one GPU in GB, as 80",
        ),
        (
            ("--gpu", "2xL4", "--nproc", "4"),
            "4 processes (num_processes) do not fit on --gpu with 2 GPU(s)",
        ),
    ],
)
def test_mistakes(vembed, plan, words, sentence):
    done = vembed("plan", plan, *words)
    assert done.code == 2 and sentence in done.err


@pytest.mark.parametrize("name", ["A100-80GB", "8x a100-80gb"])
def test_names_as_people_write_them(name):
    actual = read_hardware(name, None)
    assert (
        actual is not None
        and actual.gpu.name == "A100-80GB"
        and actual.gpu.memory == int(80 * 0.97 * 2**30)
    )
    more = read_hardware("2xA100-80GB", "40")
    assert more is not None and more.count == 2 and more.gpu.gigabytes == 40
    with pytest.raises(UserError):
        read_hardware("GTX 100", None)
