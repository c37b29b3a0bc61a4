"""Towers that see learn from scratch, on one process and on two; a vision-language model trains on mixed rows."""

import json
from pathlib import Path

import numpy as np
import pytest

import vembed
from tests.families.pictures import (
    halves,
    mixed_rows,
    picture_pairs,
    words_and_pictures,
)
from tests.families.scratch import small_clip, small_vit
from tests.harness import run_ranks
from tests.tiny import shared, tiny_clip, tiny_qwen3_vl


def trained(settings, nproc=1):
    """Train on so many processes; the first and the last evaluation and the losses."""
    if nproc == 1:
        vembed.train(settings)
    else:
        run_ranks(_train, nproc, settings, process_group=False, timeout=280)
    lines = [
        json.loads(line)
        for line in (Path(settings["output_dir"]) / "metrics.jsonl")
        .read_text()
        .splitlines()
    ]
    scores = [line["eval"] for line in lines if "eval" in line]
    losses = [line["loss"] for line in lines if "loss" in line]
    return (
        {"before": scores[0], "after": scores[-1], "losses": losses}
        if scores
        else {"losses": losses}
    )


def _train(settings):
    vembed.train(settings)


def test_clip_learns_to_find_pictures_of_words_and_two_processes_take_the_same_steps(
    tmp_path,
):
    words, _ = halves()
    words = words[:10]
    settings = {
        "model_name": str(shared(small_clip)),
        "data_path": str(words_and_pictures(tmp_path, words, 12, "train", seed=0)),
        "val_data_path": str(words_and_pictures(tmp_path, words, 1, "val", seed=1)),
        "output_dir": str(tmp_path / "one"),
        "global_batch_size": 10,
        "no_duplicates": True,
        "epochs": 8,
        "learning_rate": 2e-3,
        "warmup_steps": 12,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "temperature": 0.1,
        "bidirectional": True,
        "logging_steps": 1,
        "report_to": "none",
    }
    first = trained(settings)
    chance = 1 / len(words)
    assert first["after"]["recall@1"] >= 4 * chance
    assert first["after"]["recall@1"] > first["before"]["recall@1"]
    few = {"val_data_path": None, "max_steps": 12, "output_dir": str(tmp_path / "two")}
    two = trained({**settings, **few}, nproc=2)
    np.testing.assert_allclose(two["losses"][:6], first["losses"][:6], rtol=1e-4)


def test_vit_learns_which_pictures_show_the_same(tmp_path):
    words, _ = halves()
    actual = trained(
        {
            "model_name": str(shared(small_vit)),
            "data_path": str(picture_pairs(tmp_path, words[:10], 20, "train", seed=0)),
            "val_data_path": str(picture_pairs(tmp_path, words[:10], 1, "val", seed=1)),
            "output_dir": str(tmp_path / "run"),
            "batch_size": 12,
            "epochs": 4,
            "learning_rate": 5e-4,
            "weight_decay": 0.0,
            "temperature": 0.1,
            "report_to": "none",
        }
    )
    assert actual["after"]["recall@1"] >= 4 / 10
    assert actual["after"]["recall@1"] > actual["before"]["recall@1"]


def test_vision_language_model_on_mixed_rows_sharded_with_lora(tmp_path):
    data = mixed_rows(tmp_path, 24)
    settings = {
        "model_name": str(shared(tiny_qwen3_vl)),
        "data_path": str(data),
        "val_data_path": str(data),
        "output_dir": str(tmp_path / "two"),
        "global_batch_size": 12,
        "max_steps": 3,
        "learning_rate": 5e-3,
        "use_lora": True,
        "lora_r": 4,
        "lora_dropout": 0.0,
        "use_gradient_cache": True,
        "micro_batch_tokens": 200,
        "gradient_checkpointing": False,
        "strategy": "fsdp",
        "logging_steps": 1,
        "eval_before": False,
        "report_to": "none",
    }
    two = trained(settings, nproc=2)
    first = trained(
        {
            **settings,
            "val_data_path": None,
            "strategy": "ddp",
            "output_dir": str(tmp_path / "one"),
        }
    )
    np.testing.assert_allclose(two["losses"], first["losses"], rtol=1e-5)
    scores = vembed.evaluate(tmp_path / "two" / "final", data)
    for name in ("ndcg@10", "recall@1"):
        assert scores[name] == pytest.approx(two["after"][name], abs=1e-6)


def test_a_text_that_looks_like_a_path_is_a_text_and_a_broken_picture_is_named(
    tmp_path,
):
    embedder = vembed.Embedder(shared(tiny_clip))
    vectors = embedder.encode(["cats/dog.jpg", "dog.jpg"])
    assert vectors.shape[0] == 2 and not np.allclose(vectors[0], vectors[1])
    data = words_and_pictures(tmp_path, ["red", "dog", "cat"], 6, "train", seed=0)
    lines = data.read_text().splitlines()
    broken = tmp_path / json.loads(lines[11])["positive"]["image"]
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(vembed.UserError, match=r"train\.jsonl:12"):
        vembed.train(
            {
                "model_name": str(shared(tiny_clip)),
                "data_path": str(data),
                "output_dir": str(tmp_path / "run"),
            }
        )
