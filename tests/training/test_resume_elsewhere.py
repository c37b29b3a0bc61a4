"""Runs that are resumed, or joined, on a machine that differs in what no option says: its processor, its images."""

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import vembed
from tests.data.pictures import write
from tests.harness import run_ranks
from tests.training.test_run import settings, settings_without_validation
from vembed.data.examples import Example, ImageRef, Item
from vembed.errors import UserError
from vembed.evaluation.dataset import ScoredPairs
from vembed.parallel import placement, session
from vembed.training import trainer
from vembed.training.checkpoint.checkpointer import read_state
from vembed.training.checkpoint.folders import of_images
from vembed.training.optimizer import Update
from vembed.training.setup import require_same_data
from vembed.weights.sources import whole_model


def test_a_resumed_run_is_refused_in_another_precision(tmp_path, monkeypatch):
    options = settings_without_validation(tmp_path, save_steps=1, max_steps=1)
    with monkeypatch.context() as patched:  # a CPU with instructions for bfloat16
        patched.setattr(session, "bf16_instructions", lambda: "amx_bf16")
        patched.setattr(placement, "MIN_BF16_HIDDEN_DIM", 1)
        output = vembed.train(options).output_dir
    state = read_state(output / "checkpoint-1")
    assert state["precision"] == "bf16" and state["config"]["mixed_precision"] == "auto"
    options |= {"resume": True, "max_steps": 2}
    for precision in ("auto", "no"):
        with pytest.raises(UserError, match="mixed_precision bf16 -> no"):
            vembed.train({**options, "mixed_precision": precision})
    vembed.train({**options, "mixed_precision": "bf16"})  # what `auto` came to
    assert read_state(output / "checkpoint-2")["precision"] == "bf16"


def examples(folder):
    pairs = []
    for number in range(3):
        image = ImageRef(path=str(folder / f"{number}.jpg"))
        pairs.append(Example(Item(text=str(number)), (Item(images=(image,)),)))
    return pairs


@pytest.fixture
def two_copies(tmp_path):
    """The folders `a` and `b` with equal images."""
    for name in ("a", "b"):
        for number in range(3):
            write(tmp_path / name / f"{number}.jpg", seed=number)


@pytest.mark.usefixtures("two_copies")
def test_image_files_are_compared_by_content_and_not_by_name(tmp_path):
    before = of_images(examples(tmp_path / "a"))
    assert before is not None and before == of_images(examples(tmp_path / "b"))
    write(tmp_path / "b" / "1.jpg", seed=7)
    assert of_images(examples(tmp_path / "b")) != before
    (tmp_path / "a" / "2.jpg").unlink()
    assert of_images(examples(tmp_path / "a")) != before


def on_two_machines(folder):
    """Each rank has its own copy of the images; those of validation data are equal."""
    rank_rows = examples(Path(folder) / "ab"[int(os.environ["RANK"])])
    pair = examples(Path(folder) / "a")[0]
    evaluation = ScoredPairs("pairs", (pair.query,), (pair.positives[0],), (1.0,))
    data = SimpleNamespace(
        examples=SimpleNamespace(fingerprint="same"), evaluation=evaluation
    )
    try:
        require_same_data({"image_files": of_images(rank_rows)}, data)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("two_copies")
def test_ranks_with_other_images_are_refused(tmp_path):
    assert run_ranks(on_two_machines, 2, str(tmp_path), process_group=True) == ["", ""]
    write(tmp_path / "b" / "2.jpg", seed=7)
    for said in run_ranks(on_two_machines, 2, str(tmp_path), process_group=True):
        assert re.search(r"content is .* on rank 0 \(.* on rank 1 \(", said)


# ---- the best checkpoint of a run that goes on in another folder ---------------------------------------------------


BEST = {
    "max_steps": 8,
    "eval_steps": 2,
    "save_steps": 2,
    "load_best_model_at_end": True,
}


def train_with_scores(options, scores, **callbacks):
    """Train with these scores of the evaluations."""
    remaining = iter(scores)

    def evaluate_model(*_, **__):
        return {"ndcg@10": next(remaining)}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "evaluate_model", evaluate_model)
        return vembed.train(options, **callbacks)


def assert_is_checkpoint(result, step, folder):
    """The saved model has the weights of this checkpoint of its run."""
    model = whole_model(str(result.output_dir / f"checkpoint-{step}"), folder)
    name = "model.safetensors"
    assert (result.model_dir / name).read_bytes() == (model / name).read_bytes()


def test_the_best_checkpoint_of_another_folder_is_no_candidate(tmp_path, capsys):
    """Step 2 is the best one of the first run; in the second one, which goes on from step 4, nothing gets better."""
    options = settings(tmp_path, **BEST)

    def stop(info):
        return "stop" if info.step == 4 else None

    first = train_with_scores(options, [0.1, 0.9, 0.5, 0.4], on_step=stop)
    options["output_dir"] = str(tmp_path / "other")
    options["resume"] = str(first.output_dir / "checkpoint-4")
    result = train_with_scores(options, [0.2, 0.1])
    assert "its checkpoint is not in " in capsys.readouterr().out
    assert result.metrics["ndcg@10"] == 0.2
    assert_is_checkpoint(result, 6, tmp_path / "whole")


def test_a_metric_that_was_not_scored_yet_has_no_best_step(tmp_path):
    options = settings(tmp_path, **BEST)
    vembed.train(options, on_step=lambda info: "stop" if info.step == 4 else None)
    result = vembed.train({**options, "resume": True, "eval_metric": "mrr@20"})
    assert result.steps == 8
    assert "mrr@20" in result.metrics


def test_a_step_whose_checkpoint_is_in_another_folder_is_not_the_best_one(tmp_path):
    """Step 2 has no score in the first run. The second one evaluates it, and has no checkpoint of it."""
    options = settings(tmp_path, **BEST)
    others = {"load_best_model_at_end": False, "save_total_limit": 4}
    scores = [0.1, 0.5, 0.5]
    first = train_with_scores({**options, **others, "eval_steps": 4}, scores)
    options["output_dir"] = str(tmp_path / "other")
    options["resume"] = str(first.output_dir / "checkpoint-2")
    result = train_with_scores(options, [0.9, 0.5, 0.4, 0.3])
    assert result.metrics["ndcg@10"] == 0.5
    assert_is_checkpoint(result, 4, tmp_path / "whole")


def test_a_skipped_step_without_a_checkpoint_is_not_the_best_one(
    tmp_path, monkeypatch, capsys
):
    apply = Update.apply
    factors = iter([1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0])

    def broken(self, share):
        return apply(self, share * next(factors))

    monkeypatch.setattr(Update, "apply", broken)
    options = settings(tmp_path, on_nonfinite="skip", **BEST)
    result = train_with_scores(options, [0.1, 0.5, 0.9, 0.4, 0.3])
    assert not (result.output_dir / "checkpoint-4").exists()
    assert result.metrics["ndcg@10"] == 0.5
    assert_is_checkpoint(result, 2, tmp_path / "whole")
    assert "cannot load the weights" not in capsys.readouterr().out
