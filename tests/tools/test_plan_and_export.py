"""`vembed plan` predicts from shapes alone; `vembed export` copies a model, or merges its adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vembed
from tests.tiny import shared, tiny_bert, tiny_qwen3
from tests.training.test_run import settings
from vembed.config.arguments import parse_train_arguments
from vembed.config.loading import load_config
from vembed.errors import UserError
from vembed.families.decisions import describe
from vembed.models.embedding_model import build_model
from vembed.tools.export import run_export
from vembed.tools.plan import measure, predict, run_plan


def test_plan_counts_parameters_and_divides_them_D01(tmp_path: Path) -> None:
    config = load_config(settings(tmp_path, model_name=str(shared(tiny_qwen3))))
    description = describe(config)
    real = build_model(config, description)
    model = measure(config, description)
    assert model.total == sum(one.numel() for one in real.parameters())
    assert model.weight_bytes == sum(one.numel() * 4 for one in real.parameters())
    alone = predict(config, model, None, 1, checkpointing=False, budget=1000)
    assert alone["optimizer"] == 2 * alone["gradients"] == 8 * model.trained
    recomputed = predict(config, model, None, 1, checkpointing=True, budget=1000)
    assert recomputed["activations"] < alone["activations"]


def test_plan_says_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(settings(tmp_path)))  # JSON is YAML too
    words = [str(config)]
    assert run_plan(parse_train_arguments(words)) == 0
    said = capsys.readouterr().out
    assert "fits" in said and "optimizer" in said
    assert run_plan(parse_train_arguments([*words, "micro_batch_tokens=1000000000000"])) == 1
    assert "fits with micro_batch_tokens: 32768" in capsys.readouterr().out


def test_export_merges_an_adapter(tmp_path: Path) -> None:
    more: dict[str, Any] = {"use_lora": True, "save_merged": False, "max_steps": 2, "val_data_path": None}
    result = vembed.train(settings(tmp_path, **more))
    merged = run_export(str(result.model_dir), str(tmp_path / "merged"), merge=True)
    texts = ["red green", "a small bird in the garden"]
    one, two = (vembed.Embedder(folder).encode(texts) for folder in (result.model_dir, merged))
    np.testing.assert_allclose(one, two, atol=1e-6)
    assert not (merged / "adapter_config.json").exists()
    with pytest.raises(UserError, match="no adapter to merge"):
        run_export(str(shared(tiny_bert)), str(tmp_path / "other"), merge=True)
    with pytest.raises(UserError, match="exists already"):
        run_export(str(merged), str(merged))
