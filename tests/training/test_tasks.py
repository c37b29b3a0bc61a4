"""Several tasks in one run: sources with losses of their own, in batches of their own, on any number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vembed
from tests.harness import run_ranks
from tests.losses.batches import check, config_of, make_batch
from tests.tiny import shared, texts, tiny_bert
from vembed.config.entries import DataSource
from vembed.config.loading import resolve_run
from vembed.config.terms import source_configs
from vembed.data.batches import BatchSchedule
from vembed.losses.build import build_loss
from vembed.training.setup import source_weights


def files(folder: Path) -> list[dict[str, Any]]:
    """Retrieval rows with negatives, scored sentence pairs, rows with a teacher's scores, and labelled texts."""
    words = texts(200, seed=4, longest=14)
    rows = {
        "retrieval": [
            {"query": words[4 * n], "positive": words[4 * n + 1], "negatives": words[4 * n + 2 : 4 * n + 4]}
            for n in range(16)
        ],
        "sts": [{"sentence1": words[64 + n], "sentence2": words[100 + n], "score": n % 5 / 5} for n in range(16)],
        "scored": [
            {
                "query": words[120 + n], "positive": words[140 + n], "negatives": [words[160 + n]],
                "positive_scores": [2.0], "negative_scores": [n / 16],
            }
            for n in range(16)
        ],
        "topics": [{"text": words[180 + n], "label": f"class {n % 5}"} for n in range(16)],
    }  # fmt: skip
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    cosent = {"losses": [{"loss": "cosent", "learn_temperature": True}], "temperature": 0.1}
    scored = {"losses": [{"loss": "kl", "teacher": "scores", "temperature": 1.0}, {"loss": "infonce", "weight": 0.1}]}
    return [
        {"path": str(folder / "retrieval.jsonl"), "name": "retrieval", "max_negatives": 1},
        {"path": str(folder / "sts.jsonl"), "name": "sts", **cosent},
        {"path": str(folder / "scored.jsonl"), "name": "scored", **scored},
        {"path": str(folder / "topics.jsonl"), "name": "topics"},
    ]


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_name": str(shared(tiny_bert)), "data_path": files(folder), "homogeneous_batches": True,
        "global_batch_size": 4, "max_steps": 8, "logging_steps": 1, "report_to": [], "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "warmup_ratio": 0.0,
        "output_dir": str(folder / "out"), **more,
    }  # fmt: skip


def train(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Called on every rank: the logged steps."""
    vembed.train(settings)
    lines = (Path(settings["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def test_tasks_train_together_and_the_ranks_make_no_difference(tmp_path: Path) -> None:
    one = train(options(tmp_path))
    tasks = [next(name for name in step if name.startswith("loss/")) for step in one]
    assert set(tasks) == {"loss/retrieval", "loss/sts", "loss/scored", "loss/topics"}
    for step, task in zip(one, tasks, strict=True):
        assert step[task] == pytest.approx(step["loss"], rel=1e-6)
    terms = [name for step in one for name in step if name.count("/") == 2]
    assert set(terms) == {"loss/sts/cosent", "loss/scored/kl", "loss/scored/infonce"}
    scored = next(step for step in one if "loss/scored" in step)
    assert scored["loss"] == pytest.approx(scored["loss/scored/kl"] + 0.1 * scored["loss/scored/infonce"], rel=1e-6)
    sharded = options(tmp_path, output_dir=str(tmp_path / "two"), strategy="fsdp", use_fsdp=True, save_steps=3)
    run_ranks(train, 2, {**sharded, "max_steps": 3}, timeout=90, process_group=False)
    two = run_ranks(train, 2, {**sharded, "resume": True}, timeout=90, process_group=False)[0]
    assert [step["step"] for step in two] == list(range(1, 9))
    losses = [[step["loss"] for step in steps] for steps in (one, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)


def test_an_anchor_holds_the_embeddings_near_the_start_model(tmp_path: Path) -> None:
    sources = files(tmp_path)[:1]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts(16, seed=9)))
    anchor = {"path": str(tmp_path / "texts.jsonl"), "name": "texts", "losses": [{"loss": "anchor", "weight": 5.0}]}
    last = {}
    for weight in (1e-9, 5.0):
        name = str(tmp_path / str(weight))
        one = train(options(tmp_path, data_path=sources[0]["path"], homogeneous_batches=False, anchor_weight=weight,
                            output_dir=name))  # fmt: skip
        assert one[0]["loss/anchor"] == pytest.approx(0.0, abs=1e-5)
        last[weight] = one[-1]["loss/anchor"]
    assert last[5.0] < 0.5 * last[1e-9]
    both = train(options(tmp_path, data_path=[*sources, anchor], output_dir=str(tmp_path / "both")))
    assert {name for step in both for name in step if name.startswith("loss/")} == {
        "loss/retrieval", "loss/texts", "loss/texts/anchor",
    }  # fmt: skip


def test_a_task_needs_batches_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(vembed.UserError, match="a source with losses or a temperature of its own needs batches of"):
        resolve_run(options(tmp_path, homogeneous_batches=False))


def test_the_loss_is_that_of_the_source() -> None:
    sources = [DataSource(path="a"), DataSource(path="b", temperature=0.5, losses=None)]
    config = config_of(homogeneous_batches=True).model_copy(update={"data_path": sources})
    loss = build_loss(config)
    batch = make_batch(5)
    for number, wanted in enumerate(source_configs(config)):
        of_source = replace(batch, source=number)
        check(of_source, wanted, build_loss(wanted))
        assert torch.equal(loss.double()(of_source), build_loss(wanted).double()(of_source))


def test_sampling_alpha_tempers_the_sizes() -> None:
    sizes, weights = (1000, 10), (1.0, 1.0)
    assert source_weights(sizes, weights, 1.0) == [1.0, 1.0]
    equal = source_weights(sizes, weights, 0.0)
    assert [size * weight for size, weight in zip(sizes, equal, strict=True)] == pytest.approx([505, 505])
    half = source_weights(sizes, weights, 0.5)
    assert sizes[0] * half[0] / (sizes[1] * half[1]) == pytest.approx(10)


def test_the_schedule_knows_the_source() -> None:
    schedule = BatchSchedule([7, 5], 2, 1, homogeneous=True)
    for step in range(schedule.steps_per_epoch):
        assert len({schedule.source_of(int(index)) for index in schedule.batch(0, step)}) == 1
    assert [schedule.source_of(index) for index in (0, 6, 7, 11)] == [0, 0, 1, 1]
