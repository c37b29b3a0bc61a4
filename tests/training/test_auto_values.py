"""Values that a config leaves to `auto`: learning rate, length, evaluations, checkpoints, patience."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import yaml

import vembed
from tests import tiny
from tests.data.files import write_jsonl
from tests.training.test_run import log_text, metrics
from vembed.config.decisions import (
    RateFacts,
    RunSize,
    decide_epochs,
    peak_rate,
    run_intervals,
    steps_of_epochs,
)
from vembed.config.loading import load_config, save_config
from vembed.config.schema import TrainConfig
from vembed.config.terms import run_temperature, source_terms
from vembed.training.checkpoint.folders import kept_decisions
from vembed.training.hooks.base import Evaluation
from vembed.training.hooks.evaluations import Patience

BASE = {"model_name": "m", "data_path": "d"}
SCORED = {**BASE, "val_data_path": "v"}
SIZE = RunSize(
    total_steps=1000,
    examples_per_step=32,
    num_training=2.0,
    num_evaluated=400,
    checkpoint_bytes=10**8,
    is_length_given=False,
)


WEIGHTS = RateFacts(
    what="weights", family="text_encoder", width=384, is_tuned=True, is_new=False
)
ADAPTERS = {"what": "adapters"}
FROM_SCRATCH = {"is_new": True}
LONG = {"total_steps": 10_000}
CLIP = {
    "family": "clip",
    "width": 512,
    "has_logit_scale": True,
}


@pytest.mark.parametrize(
    ("facts", "options", "rate"),
    [
        ({}, {}, 8e-5),
        ({"is_tuned": False}, {}, 1e-4),
        ({"family": "text_decoder", "width": 4096}, {}, 7.5e-6),
        (CLIP, {}, 1e-5),
        ({"what": "head"}, {}, 1e-3),
        # Narrow models get more, and less than initial weights.
        ({"width": 192, "is_tuned": False}, {}, 9.6e-4),
        ({**CLIP, "width": 48}, {}, 1.5e-3),
        (FROM_SCRATCH, {}, 6.7e-4),
        (FROM_SCRATCH, {"loss": "cosent"}, 1.7e-4),
        # Long runs of all weights get less.
        (LONG, {}, 5.7e-5),
        ({**LONG, "width": 192}, {}, 6.4e-4),
        (ADAPTERS, {}, 1.2e-3),
        (ADAPTERS, {"lora_alpha": 64}, 6e-4),
        (ADAPTERS, {"lora_variant": "rslora"}, 2.1e-4),
        ({**ADAPTERS, "total_steps": 20}, {}, 1.9e-3),
    ],
)
def test_the_rate_follows_what_is_trained(facts, options, rate):
    config = TrainConfig(**BASE, **options)
    trained = replace(WEIGHTS, **facts)
    assert peak_rate(config.objective, config.adapters, trained).value == rate


@pytest.mark.parametrize("loss", ["infonce", "cosent"])
def test_a_resumed_run_keeps_the_temperature_of_its_checkpoint(loss):
    saved = {
        "loss": loss,
        "temperature": 0.05,
        "val_data_path": None,
    }
    state = {"config": saved, "identity": {}}
    config = TrainConfig(**BASE, loss=loss)
    assert kept_decisions(config, state, 1) == {"temperature": 0.05}
    learned = TrainConfig(**BASE, learn_temperature=True)
    assert kept_decisions(learned, state, 1) == {}, "the weights have it"


@pytest.mark.parametrize(
    ("options", "temperatures"),
    [
        ({}, [0.01]),
        ({"temperature": 0.05}, [0.05]),
        ({"loss": "circle"}, [0.05]),
        ({"losses": [{"loss": "infonce"}, {"loss": "cosent"}]}, [0.01, 0.1]),
        ({"task": "rerank"}, [1.0]),
    ],
)
def test_the_config_of_a_run_repeats_its_temperatures(options, temperatures, tmp_path):
    """config.yaml holds the options of the run. With it a model at temperature 0.01 starts from the same values."""
    facts = {
        "model_temperature": 0.01,
        "is_reranker": "task" in options,
    }

    def started(config):
        (terms,) = source_terms(config.objective, config.data, "m", **facts)
        return [term.temperature for term in terms]

    config = TrainConfig(**BASE, **options)
    assert started(config) == temperatures
    decided = run_temperature(config.objective, config.data, config.model, 0.01)
    if decided is not None:
        config = config.changed(temperature=decided)
    save_config(config, tmp_path / "config.yaml")
    assert started(load_config(tmp_path / "config.yaml")) == temperatures


@pytest.mark.parametrize(
    ("examples", "texts", "towers"),
    [(100, 6, 48), (1_000, 6, 25), (3_000, 4, 15), (10**7, 1, 1)],
)
def test_few_examples_are_seen_more_often(examples, texts, towers):
    def epochs(has_logit_scale, **options):
        config = TrainConfig(**BASE, **options)
        decision = decide_epochs(
            config.optimizer, config.model, examples, has_logit_scale=has_logit_scale
        )
        return decision.value

    assert (epochs(False), epochs(True)) == (texts, towers)
    assert epochs(True, epochs=2.5) == 2.5


@pytest.mark.parametrize(
    ("epochs", "batches", "per_step", "steps"),
    [
        (1.1, 50, 1, 55),
        (1.0, 50, 4, 13),
        (0.001, 3, 1, 1),
    ],
)
def test_a_fraction_of_epochs_has_no_step_too_many(epochs, batches, per_step, steps):
    assert steps_of_epochs(epochs, batches, per_step) == steps


SLOW_TO_EVALUATE = {"num_evaluated": 6_000}


@pytest.mark.parametrize(
    ("options", "size", "eval_steps", "save_steps", "loads_best", "patience"),
    [
        ({}, {}, 100, 100, True, 4),
        ({}, SLOW_TO_EVALUATE, 300, 300, True, 4),
        # Even the fewest evaluations would take longer than the training.
        ({}, {"total_steps": 100, "num_evaluated": 60_000}, None, None, False, None),
        ({"val_data_path": None}, {"num_evaluated": 0}, None, 100, False, None),
        # A checkpoint of 100 GB.
        ({}, {"checkpoint_bytes": 10**11}, 100, None, False, 4),
        # What the config gives stays.
        ({"eval_steps": 7, "save_steps": None}, {}, 7, None, False, 4),
        ({"epochs": 2}, {}, 100, 100, True, None),
        # Every checkpoint has a score.
        ({"save_steps": 206}, {}, 206, 206, True, 4),
        # Two evaluations in place of four, which take over a tenth of the computation.
        ({"save_steps": 500}, SLOW_TO_EVALUATE, 500, 500, True, 4),
        # No checkpoint falls within the run.
        ({"save_steps": 1009}, {}, 100, 1009, False, 4),
        ({"eval_steps": 4, "save_steps": 6}, {}, 4, 6, False, 4),
    ],
)
def test_intervals_suit_the_size_of_the_run(
    options, size, eval_steps, save_steps, loads_best, patience
):
    config = TrainConfig(**{**SCORED, **options})
    is_length_given = config.optimizer.sets_length()
    facts = replace(SIZE, is_length_given=is_length_given, **size)
    intervals, _ = run_intervals(
        config.evaluation, config.run, config.logging.logging_steps, facts
    )
    assert intervals == replace(
        intervals,
        eval_steps=eval_steps,
        save_steps=save_steps,
        load_best_model_at_end=loads_best,
        patience=patience,
    )


def test_patience_counts_evaluations_without_a_better_score():
    def evaluated(hook, step, score):
        scores = {"ndcg@10": score}
        return hook.on_evaluation(Evaluation(step, 0.0, scores, "ndcg@10", False))

    hook = Patience(2, warmup_steps=3)
    for step in (0, 1, 2, 3, 4):  # nothing counts in the warm-up of three steps
        assert evaluated(hook, step, 0.5) is None
    resumed = Patience(2, warmup_steps=3)
    resumed.load_state(json.loads(json.dumps(hook.state())))
    reason = "patience: 2 evaluations since step 1 found no ndcg@10 above 0.5000"
    for entry in (hook, resumed):
        assert evaluated(entry, 5, 0.4) == reason


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of the four lines, on a cheap evaluation."""
    folder = tmp_path_factory.mktemp("four")
    rows = [
        {"query": word, "positive": f"{word} {other}"}
        for word in tiny.WORDS[:20]
        for other in tiny.WORDS[:8]
    ]
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "val.jsonl", rows[::16])
    settings = {
        "model_name": str(tiny.shared(tiny.tiny_bert)),
        "data_path": str(folder / "train.jsonl"),
        "val_data_path": str(folder / "val.jsonl"),
        "output_dir": str(folder / "run"),
    }
    changes = ["patience=null", "epochs=5", "report_to=none"]
    return settings, vembed.train(settings, changes)


DECIDED = ("learning_rate", "eval_steps", "save_steps", "logging_steps")


def decided(result):
    options = yaml.safe_load((result.output_dir / "config.yaml").read_text())
    return {name: options[name] for name in DECIDED}


def test_four_lines_decide_the_rest_and_say_why(run):
    settings, result = run
    log = log_text(result.output_dir)
    for name in (*DECIDED, "load_best_model_at_end"):
        assert re.search(rf"\b{name}: \S+ \(auto; .+\)", log), name
    values = decided(result)
    assert values["learning_rate"] > 2e-5
    assert values["eval_steps"] == values["save_steps"] == 2
    scores = [entry["ndcg@10"] for entry in metrics(result.output_dir, "eval")]
    assert len(scores) >= 11
    best = max(scores[1:])  # the first is of the model before training
    assert result.metrics["ndcg@10"] == best, "final/ holds the best"
    evaluated = vembed.evaluate(result.model_dir, settings["val_data_path"])
    assert evaluated["ndcg@10"] == pytest.approx(best, abs=1e-6)


def test_a_resumed_run_keeps_what_was_decided(run):
    settings, result = run
    before = decided(result)
    changes = ["epochs=6", "resume=true", "report_to=none", "patience=1"]
    vembed.train(settings, changes)
    assert decided(result) == before


def test_a_model_that_learned_without_pairs_counted_as_an_embedding_model(
    run, tmp_path
):
    """Pre-training by the next token saves final/ as every run does, beside the config that tells of it."""
    settings, result = run
    kinds = {"infonce": "an embedding model already", "none": "no embedding model yet"}
    for loss, kind in kinds.items():
        before = tmp_path / loss
        shutil.copytree(result.model_dir, before / "final")
        (before / "config.yaml").write_text(f"loss: {loss}\nlosses: null\n")
        changes = {"model_name": str(before / "final"), "val_data_path": None}
        changes |= {"output_dir": str(before / "next"), "report_to": "none"}
        again = vembed.train({**settings, **changes}, ["max_steps=1"])
        assert f"dimensions, {kind}" in log_text(again.output_dir)
