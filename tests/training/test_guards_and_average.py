"""`ema` and `guards` in whole runs: the average against float64, the checkpoint that held as final/."""

from pathlib import Path

import numpy as np
import pytest

import vembed
from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert_st
from tests.training.test_run import final_weights, metrics
from tests.training.tiny_run import assert_same
from tests.weights.variants import pairs
from vembed.errors import RunError, UserError
from vembed.training.checkpoint.checkpointer import Checkpointer
from vembed.training.hooks.base import Hook
from vembed.weights.sources import whole_model


@pytest.fixture
def config(tmp_path):
    return {
        "model_name": str(shared(tiny_bert_st)),
        "data_path": str(pairs(tmp_path / "train.jsonl", 24)),
        "val_data_path": str(pairs(tmp_path / "val.jsonl", 30)),
        "output_dir": str(tmp_path / "run"),
        "batch_size": 4,
        "max_steps": 4,
        "report_to": "none",
        "strategy": "single",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
    }


def trained_weights(output):
    weights = final_weights(output)
    return {name: weights[name] for name in weights if "pooler" not in name}


class Collected(Hook):
    """Copies of the trained weights after each step."""

    def on_build(self, run):
        self.model = run.components.model
        self.steps = [self.copy()]

    def on_step(self, report):
        self.steps.append(self.copy())

    def copy(self):
        named = self.model.backbone.named_parameters()
        return {name: tensor.detach().double().numpy().copy() for name, tensor in named}


def test_final_and_a_model_made_of_a_checkpoint_hold_the_average(config, tmp_path):
    collected = Collected()
    result = vembed.train(
        {
            **config,
            "ema": 0.2,
            "eval_steps": 2,
            "save_steps": 2,
        },
        hooks=[collected],
    )
    expected = collected.steps[0]
    for number, weights in enumerate(collected.steps[1:], start=1):
        decay = min(0.2, (1 + number) / (10 + number))
        expected = {
            name: decay * old + (1 - decay) * weights[name]
            for name, old in expected.items()
        }
    last = collected.steps[-1]
    distances = []
    for name, value in trained_weights(result.output_dir).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5)
        distances.append(np.abs(value - last[name]).max())
    assert max(distances) > 1e-4, "the average is not the last step"
    # The evaluation is that of the average, and training went on from the trained weights.
    scores = vembed.evaluate(result.model_dir, config["val_data_path"])
    assert scores["ndcg@10"] == pytest.approx(result.metrics["ndcg@10"])
    scores = metrics(result.output_dir, "eval")
    for number, step in enumerate((2, 4), start=1):
        checkpoint = result.output_dir / f"checkpoint-{step}"
        model = whole_model(str(checkpoint), tmp_path / str(step))
        evaluated = vembed.evaluate(model, config["val_data_path"])
        assert evaluated["ndcg@10"] == pytest.approx(scores[number]["ndcg@10"])


def test_shards_have_the_same_average_also_after_a_resume(config, tmp_path):
    # Adam would enlarge the rounding of gradients that are zero.
    config |= {
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
    }
    config |= {
        "ema": 0.5,
        "eval_steps": 2,
        "save_steps": 2,
    }
    alone = vembed.train(config)
    output = tmp_path / "two"
    sharded = {
        "strategy": "fsdp",
        "batch_size": 2,
        "output_dir": str(output),
    }
    for max_steps in (2, 4):
        part = {
            **config,
            **sharded,
            "max_steps": max_steps,
            "resume": "auto",
        }
        run_ranks(vembed.train, 2, part)
    weights = trained_weights(output)
    for name, value in trained_weights(alone.output_dir).items():
        np.testing.assert_allclose(weights[name], value, atol=2e-5)


# ---- guards ----------------------------------------------------------------------------------------------------


@pytest.fixture
def guard(tmp_path):
    return str(pairs(tmp_path / "general.jsonl", 40))


@pytest.fixture
def falling(config, guard):
    """A run at a rate at which its guard falls after some steps."""
    return {
        **config,
        "guards": [{"path": guard, "max_drop": 0.1}],
        "eval_steps": 1,
        "save_steps": 1,
        "max_steps": 40,
        "learning_rate": 0.2,
        "warmup_steps": 10,
    }


def test_a_guard_that_falls_ends_the_run_with_the_checkpoint_that_held(
    falling, guard, tmp_path
):
    result = vembed.train({**falling, "save_total_limit": 1})
    assert 1 < result.steps < 40
    evaluations = metrics(result.output_dir, "eval")  # after each step
    *scores, last = [scores["guard/general/ndcg@10"] for scores in evaluations]
    assert last < scores[0] - 0.1 <= min(scores)
    assert result.metrics["guard/general/ndcg@10"] == pytest.approx(scores[-1])
    assert result.metrics["before/guard/general/ndcg@10"] == pytest.approx(scores[0])
    evaluated = vembed.evaluate(result.model_dir, guard)
    assert evaluated["ndcg@10"] == pytest.approx(scores[-1], abs=1e-6)
    held_step = len(scores) - 1
    assert (result.output_dir / f"evaluations/step-{held_step}.json").exists()
    checkpoint = result.output_dir / f"checkpoint-{held_step}"
    whole_model(str(checkpoint), tmp_path / "held" / "final")
    held = trained_weights(tmp_path / "held")
    assert_same(trained_weights(result.output_dir), held)
    assert "guard general: nDCG@10" in (result.output_dir / "report.md").read_text()


def test_no_weights_are_saved_where_the_checkpoint_that_held_is_damaged(
    falling, monkeypatch
):
    monkeypatch.setattr(Checkpointer, "verify", lambda *_: ["a file is cut"])
    with pytest.raises(RunError, match="no weights are left for final/"):
        vembed.train(falling)
    assert not (Path(falling["output_dir"]) / "final").exists()


@pytest.mark.parametrize("max_drop", [1.0, None])
def test_a_run_that_a_guard_ended_goes_on_with_weaker_guards_or_none(
    falling, guard, max_drop
):
    ended = vembed.train(falling).steps
    falling["guards"] = [{"path": guard, "max_drop": max_drop}] if max_drop else None
    result = vembed.train(
        {
            **falling,
            "resume": True,
            "patience": 1,
        }
    )
    assert result.steps > ended
    report = (result.output_dir / "report.md").read_text()
    assert "final/ is the checkpoint of step" not in report


def test_other_guards_of_a_resumed_run_are_measured_at_its_step(
    falling, guard, tmp_path
):
    falling |= {"eval_steps": 4, "save_steps": 4, "warmup_steps": 4}
    kept = [{"path": guard, "max_drop": 1.0}]
    vembed.train({**falling, "max_steps": 4, "guards": kept})
    other = pairs(tmp_path / "other.jsonl", 40)
    falling["guards"] = [{"path": str(other), "max_drop": 0.0}]
    result = vembed.train({**falling, "resume": True})
    report = (result.output_dir / "report.md").read_text()
    assert "final/ is the checkpoint of step 4" in report
    evaluated = vembed.evaluate(result.model_dir, other)["ndcg@10"]
    assert result.metrics["guard/other/ndcg@10"] == pytest.approx(evaluated)


def test_a_guard_that_falls_at_once_leaves_nothing_to_save(falling):
    with pytest.raises(RunError, match="no checkpoint held before"):
        vembed.train(
            {
                **falling,
                "learning_rate": 5.0,
                "warmup_steps": 0,
            }
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"guards": ["g.jsonl"], "eval_steps": None, "save_steps": None},
            "give eval_steps and save_steps too",
        ),
        (
            {"guards": ["a/g.jsonl", "b/g.jsonl"], "eval_steps": 2, "save_steps": 2},
            "guards: g is named twice",
        ),
        ({"ema": 1.0}, "ema"),
    ],
)
def test_mistakes(config, options, message):
    with pytest.raises(UserError, match=message):
        vembed.train({**config, **options})
