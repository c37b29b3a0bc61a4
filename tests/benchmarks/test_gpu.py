"""`python -m benchmarks.gpu --small` measures its rows on a CPU; a row that fails or has no time leaves the others."""

import sys

import pytest
import torch

from benchmarks.gpu import main
from benchmarks.gpu_record import NotMeasuredError, Record
from tests.tiny import read_json

pytestmark = pytest.mark.filterwarnings("ignore")
"""Other libraries train here as well, and warn."""


def rows(tmp_path, *options):
    code = main(["--small", "--out", str(tmp_path / "gpu.json"), *options])
    actual = read_json(tmp_path / "gpu.json")["rows"]
    assert code == 0, [row for row in actual if row["status"] == "failed"]
    return {row["name"]: row for row in actual}


def test_gradients_are_compared(tmp_path):
    name = "FSDP2 on a mesh of one"
    actual = rows(tmp_path, "--part", "correctness", "--row", name)
    assert actual[f"equal gradients: {name}"]["gradients"] < 1e-3


def test_4_bit_weights_whose_bits_look_like_no_numbers_are_saved(tmp_path):
    # They are stored as 16-bit floats: a run whose packed bits looked like a NaN ended without its model.
    pytest.importorskip("bitsandbytes")
    assert rows(tmp_path, "--row", "QLoRA")["QLoRA"]["status"] == "ok"


MISSING = ("pytrec_eval", "datasets", "bitsandbytes", "flash_attn", "torchao", "bm25s")
"""Packages that a machine may lack on which the benchmark has to run."""


def test_a_missing_package_ended_every_training(tmp_path, monkeypatch):
    for name in MISSING:
        monkeypatch.setitem(sys.modules, name, None)
    actual = rows(tmp_path, "--part", "speed", "--row", "clip")["clip-vit-b16"]
    assert actual["samples_per_second"] > 0
    actual = rows(tmp_path, "--row", "QLoRA")["QLoRA"]
    assert actual["status"] == "skipped"
    assert actual["reason"] == "bitsandbytes is not installed"


def test_a_row_that_fails_or_has_no_time_leaves_the_others(tmp_path):
    record = Record(
        tmp_path / "out.json", torch.device("cpu"), is_small=True, seconds=100
    )

    def fails():
        raise RuntimeError("no kernel image")

    def not_here():
        raise NotMeasuredError("flash-attn is not installed")

    record.row("speed", "fails", fails)
    record.row("speed", "not here", not_here)
    record.row("speed", "works", lambda: {"samples_per_second": 3.0})
    record.seconds = 0.0
    record.row("speed", "late", lambda: {})
    written = read_json(tmp_path / "out.json")
    statuses = [row["status"] for row in written["rows"]]
    assert statuses == ["failed", "skipped", "ok", "skipped"]
    assert (
        record.failed == ["fails"] and "no kernel image" in written["rows"][0]["reason"]
    )


def test_without_a_gpu_the_small_form_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "gpu.json"
    assert main(["--out", str(out), "--row", "matrix product"]) == 0
    (row,) = read_json(out)["rows"]
    assert row["size"] == 512
