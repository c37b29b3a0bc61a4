"""Towers that see learn from scratch, on one process and on two; a vision-language model trains on mixed rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import vembed
from tests.families.pictures import halves, mixed_rows, picture_pairs, words_and_pictures
from tests.families.scratch import small_clip, small_vit
from tests.tiny import shared, tiny_clip, tiny_qwen3_vl


def train_by_command(folder: Path, settings: dict[str, Any], nproc: int) -> dict[str, Any]:
    """`vembed train` on so many processes; the last and the first evaluation and the losses."""
    (folder / "cfg.yaml").write_text(yaml.safe_dump(settings))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vembed", "train", str(folder / "cfg.yaml"), "--nproc", str(nproc)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (Path(settings["output_dir"]) / "metrics.jsonl").read_text().splitlines()]
    scores = [line["eval"] for line in lines if "eval" in line]
    return {"before": scores[0], "after": scores[-1], "losses": [line["loss"] for line in lines if "loss" in line]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nproc", [1, 2])
def test_clip_learns_to_find_pictures_of_words(nproc: int, tmp_path: Path) -> None:
    words, _ = halves()
    words = words[:20]
    found = train_by_command(
        tmp_path,
        {
            "model_name": str(shared(small_clip)),
            "data_path": str(words_and_pictures(tmp_path, words, 24, "train", seed=0)),
            "val_data_path": str(words_and_pictures(tmp_path, words, 1, "val", seed=1)),
            "output_dir": str(tmp_path / "run"),
            "global_batch_size": 20,
            "no_duplicates": True,
            "epochs": 10,
            "learning_rate": 2e-3,
            "weight_decay": 0.0,
            "temperature": 0.1,
            "bidirectional": True,
            "report_to": "none",
        },
        nproc,
    )
    chance = 1 / len(words)
    assert found["after"]["recall@1"] >= 5 * chance
    assert found["after"]["recall@1"] > found["before"]["recall@1"]


@pytest.mark.timeout(300)
def test_vit_learns_which_pictures_show_the_same(tmp_path: Path) -> None:
    words, _ = halves()
    found = train_by_command(
        tmp_path,
        {
            "model_name": str(shared(small_vit)),
            "data_path": str(picture_pairs(tmp_path, words[:20], 28, "train", seed=0)),
            "val_data_path": str(picture_pairs(tmp_path, words[:20], 1, "val", seed=1)),
            "output_dir": str(tmp_path / "run"),
            "batch_size": 12,
            "epochs": 4,
            "learning_rate": 5e-4,
            "weight_decay": 0.0,
            "temperature": 0.1,
            "report_to": "none",
        },
        1,
    )
    assert found["after"]["recall@1"] >= 5 / 20
    assert found["after"]["recall@1"] > found["before"]["recall@1"]


@pytest.mark.timeout(300)
def test_vision_language_model_on_mixed_rows_sharded_with_lora(tmp_path: Path) -> None:
    data = mixed_rows(tmp_path, 24)
    settings = {
        "model_name": str(shared(tiny_qwen3_vl)),
        "data_path": str(data),
        "val_data_path": str(data),
        "output_dir": str(tmp_path / "two"),
        "global_batch_size": 12,
        "max_steps": 4,
        "learning_rate": 5e-3,
        "use_lora": True,
        "lora_r": 4,
        "lora_dropout": 0.0,
        "use_gradient_cache": True,
        "micro_batch_tokens": 200,
        "gradient_checkpointing": False,
        "use_fsdp": True,
        "logging_steps": 1,
        "report_to": "none",
    }
    two = train_by_command(tmp_path, settings, 2)
    one = train_by_command(tmp_path, {**settings, "output_dir": str(tmp_path / "one")}, 1)
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-5)
    scores = vembed.evaluate(tmp_path / "two" / "final", data)
    for name in ("ndcg@10", "recall@1"):
        assert scores[name] == pytest.approx(two["after"][name], abs=1e-6)


def test_a_text_that_looks_like_a_path_is_a_text_and_a_broken_picture_is_named(tmp_path: Path) -> None:
    embedder = vembed.Embedder(shared(tiny_clip))
    vectors = embedder.encode(["cats/dog.jpg", "dog.jpg"])
    assert vectors.shape[0] == 2 and not np.allclose(vectors[0], vectors[1])
    data = words_and_pictures(tmp_path, ["red", "dog", "cat"], 6, "train", seed=0)
    lines = data.read_text().splitlines()
    broken = tmp_path / json.loads(lines[11])["positive"]["image"]
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(vembed.UserError, match=r"train\.jsonl:12"):
        vembed.train(
            {"model_name": str(shared(tiny_clip)), "data_path": str(data), "output_dir": str(tmp_path / "run")}
        )
