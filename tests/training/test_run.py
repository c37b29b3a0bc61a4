"""The spine through `vembed.train`: what a run writes, and that it is the same run however it is cut up."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import vembed
from tests.data.files import read_jsonl, write_jsonl
from tests.tiny import WORDS, shared, tiny_bert
from vembed.errors import RunError
from vembed.training.hooks.metrics import mean_cosine

NUM_TRAIN = 96
NUM_VAL = 40


def write_pairs(folder, *, seed=0):
    """Queries that share rare word pairs with their positives; a hard negative shares one of the two words."""
    draw = random.Random(seed)
    paths = folder / "train.jsonl", folder / "val.jsonl"
    for path, num_rows in zip(paths, (NUM_TRAIN, NUM_VAL), strict=True):
        rows = []
        for _ in range(num_rows):
            first, second, third = draw.sample(WORDS, 3)
            filler = draw.choices(WORDS, k=draw.randint(1, 25))
            row = {
                "query": f"{first} {second}",
                "positive": " ".join([first, *filler, second]),
                "negatives": [" ".join([first, *draw.choices(WORDS, k=4), third])],
            }
            rows.append(row)
        write_jsonl(path, rows)
    return paths


def settings(folder, **more):
    train, val = write_pairs(folder)
    return {
        "model_name": str(shared(tiny_bert)),
        "data_path": str(train),
        "val_data_path": str(val),
        "output_dir": str(folder / "run"),
        "batch_size": 16,
        "max_steps": 6,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "report_to": [],
        **more,
    }


def settings_without_validation(folder, **more):
    return settings(folder, val_data_path=None, **more)


def config_file(folder, **more):
    """Write the settings into a file for the command."""
    path = folder / "cfg.json"
    path.write_text(json.dumps(settings(folder, **more)))
    return path


def metric_lines(folder):
    return read_jsonl(Path(folder) / "metrics.jsonl")


def metrics(folder, key="loss"):
    return [line[key] for line in metric_lines(folder) if key in line]


def losses_and_norms(folder):
    """The loss and the gradient norm of each step."""
    return list(zip(metrics(folder), metrics(folder, "grad_norm"), strict=True))


def log_text(folder):
    return (Path(folder) / "training_log.txt").read_text()


def final_weights(folder):
    return load_file(Path(folder) / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    more = {"report_to": ["tensorboard"], "mrl_dims": [32, 16], "overwrite": True}
    return vembed.train(settings(folder, **more))


def test_output_directory_has_all_that_is_promised(plain):
    output = plain.output_dir
    for name in ("config.yaml", "report.html", "report.md", "final"):
        assert (output / name).exists(), name
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    assert "train/loss" in events.Tags()["scalars"]
    assert "train/memory/rank0/rank" not in events.Tags()["scalars"]
    lines = metric_lines(output)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    keys = "epoch learning_rate grad_norm samples_per_second tokens_per_second"
    assert {*keys.split(), "padding_fraction", "memory"} <= steps[0].keys()
    assert [line["step"] for line in lines if "eval" in line] == [0, 6]
    assert plain.metrics["ndcg@10"] == lines[-1]["eval"]["ndcg@10"]
    assert plain.metrics["before/dim16/ndcg@10"] == lines[0]["eval"]["dim16/ndcg@10"]
    assert "step 6/6" in log_text(output)


def test_the_saved_config_repeats_the_run_bit_for_bit(plain, tmp_path):
    again = tmp_path / "again"
    saved = plain.output_dir / "config.yaml"
    assert not vembed.load_config(saved).run.overwrite
    vembed.train(saved, [f"output_dir={again}"])
    assert losses_and_norms(again) == losses_and_norms(plain.output_dir)


def test_the_loss_of_scored_pairs_falls_and_the_order_gets_better(tmp_path):
    draw = random.Random(1)
    rows = []
    for _ in range(64):
        words = draw.sample(WORDS, 6)
        num_equal = draw.randint(0, 6)
        other = words[:num_equal] + draw.sample(WORDS, 6 - num_equal)
        pair = {"sentence1": " ".join(words), "sentence2": " ".join(other)}
        rows.append({**pair, "score": num_equal / 6})
    options = settings(tmp_path, loss="cosent", max_steps=24)
    write_jsonl(Path(options["data_path"]), rows)
    options["val_data_path"] = options["data_path"]
    result = vembed.train(options)
    losses = metrics(result.output_dir)
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    assert result.metrics["spearman"] > result.metrics["before/spearman"]


def test_a_training_that_makes_the_model_worse_says_so(tmp_path, capfd):
    result = vembed.train(settings(tmp_path, learning_rate=3.0, max_grad_norm=0))
    before = result.metrics["before/ndcg@10"]
    after = result.metrics["ndcg@10"]
    assert after < before, "nothing to say"
    said = f"ndcg@10 is {after:.4f} in final/ and was {before:.4f} before training"
    assert f"warning: {said}" in capfd.readouterr().out
    assert said in (result.output_dir / "report.html").read_text()


@pytest.mark.promise("E32")
def test_non_finite_loss_stops_and_names_the_examples(tmp_path):
    options = settings(
        tmp_path,
        learning_rate=1e30,
        max_grad_norm=0,
        warmup_steps=0.0,
    )
    options["val_data_path"] = None
    with pytest.raises(RunError, match=r"step \d+: .*learning_rate: 1e\+30 broke them"):
        vembed.train(options)


def test_texts_that_are_cut_are_counted(tmp_path):
    rows = [
        {"query": f"red {word}", "positive": f"{word} " * 100} for word in WORDS[:16]
    ]
    lines = lines_of_log(tmp_path, rows, batch_size=4, max_length=40)
    assert "max_length: 16 of the first 32 texts fill 40 tokens" in "".join(lines)


def test_a_loss_of_nothing_is_noticed(tmp_path):
    rows = [
        {"query": f"red {word}", "positive": "the only document"} for word in WORDS[:32]
    ]
    lines = lines_of_log(tmp_path, rows)
    (warning,) = [line for line in lines if "WARNING" in line]
    assert "the loss of step 1 is exactly 0" in warning


def lines_of_log(folder, rows, **options):
    """Train on these rows; return the lines of the log."""
    config = settings_without_validation(folder, max_steps=2) | options
    write_jsonl(Path(config["data_path"]), rows)
    return log_text(vembed.train(config).output_dir).splitlines()


def test_mean_cosine_is_that_of_all_pairs():
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(rows, dim=1)
    cosines = unit @ unit.T
    mean = (cosines.sum() - 7) / (7 * 6)  # without the diagonal
    assert mean_cosine(rows) == pytest.approx(float(mean), abs=1e-6)
