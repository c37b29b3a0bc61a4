"""`python -m benchmarks.gpu --small` measures its rows on a CPU; a row that fails or has no time leaves the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_correctness
from benchmarks.gpu import main
from benchmarks.gpu_models import small
from benchmarks.gpu_record import NotMeasuredError, Record

pytestmark = pytest.mark.filterwarnings("ignore")
"""Other libraries train here as well, and warn."""


def rows(tmp_path: Path, *options: str) -> dict[str, dict[str, Any]]:
    code = main(["--small", "--out", str(tmp_path / "gpu.json"), *options])
    found = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert code == 0, [row for row in found if row["status"] == "failed"]
    return {row["name"]: row for row in found}


def test_packed_attention_is_compared_with_plain_attention(tmp_path: Path) -> None:
    found = rows(tmp_path, "--part", "correctness", "--row", "attention")
    assert len(found) == 16 and all(row["status"] == "ok" for row in found.values())


def test_4_bit_weights_whose_bits_look_like_no_numbers_are_saved(tmp_path: Path) -> None:
    # They are stored as 16-bit floats: a run whose packed bits looked like a NaN ended without its model.
    pytest.importorskip("bitsandbytes")
    assert rows(tmp_path, "--row", "QLoRA")["QLoRA"]["status"] == "ok"


def test_compiled_layers_give_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling takes seconds for each layer.
    monkeypatch.setattr(gpu_correctness, "small", lambda shape: replace(small(shape), layers=1))
    assert rows(tmp_path, "--row", "compiled")["equal gradients: compiled"]["gradients"] < 1e-3


def test_speed_and_memory_on_tiny_models(tmp_path: Path) -> None:
    found = rows(tmp_path, "--row", "clip")
    assert found["clip-vit-b16"]["status"] == "ok"
    spoken = rows(tmp_path, "--part", "memory", "--row", "qwen3-vl")["qwen3-vl-2b"]
    assert spoken["predicted_gb"] > 0


def test_a_row_that_fails_or_has_no_time_leaves_the_others(tmp_path: Path) -> None:
    record = Record(tmp_path / "out.json", torch.device("cpu"), is_small=True, seconds=100)

    def fails() -> dict[str, Any]:
        raise RuntimeError("no kernel image")

    def not_here() -> dict[str, Any]:
        raise NotMeasuredError("flash-attn is not installed")

    record.row("speed", "fails", fails)
    record.row("speed", "not here", not_here)
    record.row("speed", "works", lambda: {"samples_per_second": 3.0})
    record.seconds = 0.0
    record.row("speed", "late", lambda: {})
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["status"] for row in written["rows"]] == ["failed", "skipped", "ok", "skipped"]
    assert record.failed == ["fails"] and "no kernel image" in written["rows"][0]["reason"]


def test_without_a_gpu_it_names_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "--small" in capsys.readouterr().err
