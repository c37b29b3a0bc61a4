"""Towers that see learn from scratch, on one process and on two; a vision-language model trains on mixed rows."""

from pathlib import Path

import numpy as np
import pytest

import vembed
from tests.families.pictures import (
    mixed_rows,
    words_and_pictures,
    words_of_pictures,
)
from tests.families.scratch import small_clip
from tests.harness import run_ranks
from tests.tiny import shared, tiny_qwen3_vl
from tests.training.test_run import metrics


def trained(folder, nproc=1, **options):
    """Train on so many processes; return the folder of the run."""
    settings = {
        "output_dir": str(folder / f"run-{nproc}"),
        "global_batch_size": 12,
        "logging_steps": 1,
        "report_to": "none",
        **options,
    }
    if nproc == 1:
        vembed.train(settings)
    else:
        run_ranks(_train, nproc, settings, timeout=280)
    return Path(settings["output_dir"])


def _train(settings):
    vembed.train(settings)


LEARN = {"weight_decay": 0.0, "temperature": 0.1}


def assert_learned(run, num_words):
    """The right picture is first four times as often as by chance, and more often than before."""
    scores = [score["recall@1"] for score in metrics(run, "eval")]
    assert scores[-1] >= 4 / num_words
    assert scores[-1] > scores[0]


def test_clip_learns_to_find_pictures_of_words_and_two_processes_take_the_same_steps(
    tmp_path,
):
    words = words_of_pictures(10)
    options = {
        "model_name": str(shared(small_clip)),
        "data_path": str(words_and_pictures(tmp_path, words, 12, "train", seed=0)),
        "global_batch_size": 10,
        "no_duplicates": True,
        "epochs": 8,
        "learning_rate": 2e-3,
        "warmup_steps": 12,
        "lr_scheduler_type": "constant",
        "bidirectional": True,
        **LEARN,
    }
    val = words_and_pictures(tmp_path, words, 1, "val", seed=1)
    first = trained(tmp_path, val_data_path=str(val), **options)
    assert_learned(first, len(words))
    two = trained(tmp_path, nproc=2, max_steps=12, **options)
    np.testing.assert_allclose(metrics(two)[:6], metrics(first)[:6], rtol=1e-4)


def test_vision_language_model_on_mixed_rows_sharded_with_lora(tmp_path):
    data = mixed_rows(tmp_path, 24)
    options = {
        "model_name": str(shared(tiny_qwen3_vl)),
        "data_path": str(data),
        "max_steps": 3,
        "learning_rate": 5e-3,
        "use_lora": True,
        "lora_r": 4,
        "lora_dropout": 0.0,
        "use_gradient_cache": True,
        "micro_batch_tokens": 200,
        "gradient_checkpointing": False,
    }
    evaluated = {"strategy": "fsdp", "val_data_path": str(data), "eval_before": False}
    two = trained(tmp_path, nproc=2, **evaluated, **options)
    first = trained(tmp_path, **options)
    np.testing.assert_allclose(metrics(two), metrics(first), rtol=1e-5)
    scores = vembed.evaluate(two / "final", data)
    for name in ("ndcg@10", "recall@1"):
        expected = metrics(two, "eval")[-1][name]
        assert scores[name] == pytest.approx(expected, abs=1e-6)
