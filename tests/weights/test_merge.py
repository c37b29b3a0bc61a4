"""`vembed merge` and `vembed.merge`: folders in, a folder out that loads like any other."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer

import vembed
from tests.commands import invoke
from tests.harness import run_ranks
from tests.tiny import (
    change_json,
    read_json,
    shared,
    tiny_bert,
    tiny_bert_st,
    tiny_qwen3_reranker,
    tiny_qwen3_st,
)
from tests.weights.variants import pairs, variant
from vembed import UserError
from vembed.cli.commands.export import copy_model
from vembed.parallel.session import start_command_session
from vembed.weights import merge as merging
from vembed.weights.merge import merge


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [variant(root / f"m{seed}", seed) for seed in range(3)]


def weights_of(folder):
    weights = {}
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        weights[name] = tensor.astype(np.float64)
    return weights


def assert_mean(folder, inputs):
    """Check that a folder's weights are the mean of several models' weights, by numpy."""
    for name, value in weights_of(folder).items():
        expected = np.mean([weights[name] for weights in inputs], axis=0)
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6)


def test_mean_of_three_models_against_numpy(models, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "PIECE", 100)
    inputs = [weights_of(model) for model in models]
    result = vembed.merge(models, tmp_path / "mean")
    assert weights_of(result.model_dir).keys() == inputs[0].keys()
    assert_mean(result.model_dir, inputs)


@pytest.mark.parametrize(
    ("options", "of_differences"),
    [({}, False), ({"base": 0}, True), ({"base": 0, "of": "weights"}, False)],
)
def test_what_slerp_interpolates(options, of_differences, models, tmp_path):
    if "base" in options:
        options = options | {"base": models[2]}
    result = vembed.merge(models[:2], tmp_path / "out", "slerp", **options)
    assert result.recipe.of_differences == of_differences


def test_the_merged_folder_is_a_model(models, tmp_path):
    out = tmp_path / "out"
    vembed.merge(models, out, dtype="bfloat16")
    texts = ["red cat", "bird"]
    vectors = vembed.Embedder(out, device="cpu", torch_dtype="float32").encode(texts)
    settings = read_json(out / "merge.json")
    assert settings["method"] == "mean" and len(settings["models"]) == 3
    assert read_json(out / "config.json")["dtype"] == "bfloat16"
    assert "Merged by vembed" in (out / "README.md").read_text()
    assert not list(tmp_path.glob(".*"))
    theirs = SentenceTransformer(
        str(out), device="cpu", model_kwargs={"dtype": "float32"}
    )
    np.testing.assert_allclose(vectors, theirs.encode(texts), atol=1e-6)


def test_back_to_a_base_with_other_names(models, tmp_path):
    base = tiny_bert(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    renamed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    renamed["cls.predictions.bias"] = np.zeros(3, np.float32)
    save_file(renamed, base / "model.safetensors")
    vembed.merge(models[0], tmp_path / "out", base=base, interpolate=0.5)
    assert_mean(tmp_path / "out", [weights_of(models[0]), tensors])


def test_the_command_and_a_sweep(models, tmp_path):
    data = pairs(tmp_path / "val.jsonl")
    out = tmp_path / "out"
    words = ("--sweep", "0,0.5,1", "--data", data)
    printed = invoke("merge", *models[:2], "-o", out, *words).stdout
    points = read_json(out / "sweep.json")["points"]
    assert [point["at"] for point in points] == [0, 0.5, 1]
    best = max(points, key=lambda point: point["score"])
    score = vembed.evaluate(out, data)["ndcg@10"]
    assert score == pytest.approx(best["score"])
    of_first = vembed.evaluate(models[0], data)["ndcg@10"]
    assert points[0]["score"] == pytest.approx(of_first)
    assert f"score: {score:.4f}" in printed


def test_a_soup_is_never_below_its_best_member(tmp_path):
    members = []
    for seed, noise in enumerate((0.02, 0.5, 0.03, 0.1)):
        members.append(variant(tmp_path / f"m{seed}", seed, by=noise))
    data = pairs(tmp_path / "val.jsonl", 40)
    result = vembed.merge(members, tmp_path / "soup", "soup", data=data)
    alone = [vembed.evaluate(member, data)["ndcg@10"] for member in members]
    score = vembed.evaluate(tmp_path / "soup", data)["ndcg@10"]
    assert score == pytest.approx(result.score)
    assert score >= max(alone)
    assert str(members[int(np.argmax(alone))]) in result.models


def _soup_on_a_rank(members, data, output):
    with start_command_session() as session:
        return merge(members, output, "soup", data=data, session=session).score


def test_two_processes_make_the_same_soup(models, tmp_path):
    data = str(pairs(tmp_path / "val.jsonl"))
    names = [str(model) for model in models]
    two = str(tmp_path / "two")
    scores = run_ranks(_soup_on_a_rank, 2, names, data, two)
    alone = vembed.merge(names, tmp_path / "one", "soup", data=data)
    assert scores == [alone.score, alone.score]
    np.testing.assert_equal(weights_of(two), weights_of(tmp_path / "one"))


def run_config(data, output, **options):
    """A run of a few steps whose checkpoints are all kept."""
    return {
        "model_name": str(shared(tiny_bert_st)),
        "data_path": str(data),
        "batch_size": 4,
        "report_to": "none",
        "learning_rate": 1e-2,
        "max_steps": 4,
        "save_steps": 1,
        "save_total_limit": 4,
        "strategy": "ddp",
        "output_dir": str(output),
        **options,
    }


# ---- adapters and checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    data = pairs(root / "train.jsonl", 16)
    whole = vembed.train(run_config(data, root / "whole"))
    adapter = {"use_lora": True, "lora_r": 2, "save_merged": False, "save_steps": 4}
    lora = vembed.train(run_config(data, root / "lora", **adapter))
    return whole.output_dir, lora.output_dir


def of_checkpoint(run, step, folder):
    """Weights of a checkpoint, by a merge of it alone."""
    base = shared(tiny_bert_st)
    vembed.merge(run / f"checkpoint-{step}", folder, "task_arithmetic", base=base)
    return weights_of(folder)


def test_mean_of_the_last_checkpoints_of_a_run(runs, tmp_path):
    run, _ = runs
    result = vembed.merge(run, tmp_path / "out", last=3)
    names = [Path(model).name for model in result.models]
    assert names == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    steps = [of_checkpoint(run, step, tmp_path / f"m{step}") for step in (2, 3, 4)]
    assert_mean(tmp_path / "out", steps)
    assert_mean(run / "final", steps[-1:])
    assert any(
        np.abs(steps[0][name] - steps[2][name]).max() > 1e-4 for name in steps[0]
    )


def test_checkpoints_of_a_run_whose_loss_has_learned_weights(tmp_path):
    data = pairs(tmp_path / "train.jsonl", 16)
    options = {
        "max_steps": 2,
        "losses": [{"loss": "infonce"}, {"loss": "embedding"}],
        "teachers": [str(shared(tiny_bert, hidden=16))],
    }
    run = vembed.train(run_config(data, tmp_path / "run", **options)).output_dir
    assert_mean(run / "final", [of_checkpoint(run, 2, tmp_path / "m2")])


def test_checkpoints_of_a_reranker_that_answers(tmp_path):
    data = pairs(tmp_path / "train.jsonl", 16)
    options = {"model_name": str(shared(tiny_qwen3_reranker)), "task": "rerank"}
    options |= {"max_steps": 2, "in_batch_negatives": 1}
    run = vembed.train(run_config(data, tmp_path / "run", **options)).output_dir
    out = tmp_path / "out"
    vembed.merge(run, out, "weighted", last=2, weights=[0, 1])
    asked = [("red", "a red cat"), ("bird", "boat")]
    expected = vembed.Reranker(run / "final").predict(asked)
    assert vembed.Reranker(out).predict(asked) == pytest.approx(expected, abs=1e-5)


def test_an_adapter_counts_as_the_whole_model(runs, tmp_path):
    _, lora = runs
    source = shared(tiny_bert_st)
    out = tmp_path / "out"
    vembed.merge([lora / "final", source], out, "weighted", weights=[1, 3])
    whole = weights_of(copy_model(str(lora / "final"), tmp_path / "whole", merge=True))
    base = weights_of(source)
    assert any(np.abs(whole[name] - base[name]).max() > 1e-3 for name in base)
    assert_mean(out, [whole, base, base, base])


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_saved_by_an_older_transformers_has_position_ids(
    models, tmp_path, is_first
):
    older = tmp_path / "older"
    shutil.copytree(models[0], older)
    values = load_file(older / "model.safetensors")
    positions = {"embeddings.position_ids": np.arange(512)[None]}
    save_file(values | positions, older / "model.safetensors", {"format": "pt"})
    pair = [older, models[1]] if is_first else [models[1], older]
    vembed.merge(pair, tmp_path / "out")
    inputs = [weights_of(model) | positions for model in models[:2]]
    assert_mean(tmp_path / "out", inputs)
    length = np.linalg.norm(vembed.Embedder(tmp_path / "out").encode("red"))
    assert length == pytest.approx(1, abs=1e-5)


# ---- mistakes --------------------------------------------------------------------------------------------------


def refuses(message, models, output, **options):
    with pytest.raises(UserError, match=message):
        vembed.merge(models, output, **options)


def test_what_does_not_fit_is_one_sentence(models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models[0], other)
    values = read_json(other / "tokenizer.json")
    words = values["model"]["vocab"]
    first, second = list(words)[10:12]
    words |= {first: words[second], second: words[first]}
    change_json(other / "tokenizer.json", **values)
    cases = {
        "is a qwen3 and .* is a bert": shared(tiny_qwen3_st),
        "different tokenizers": other,
        "embed in different ways .*pooling": shared(tiny_bert_st, pooling="cls"),
        "only models of one architecture": tiny_bert(tmp_path / "deep", layers=3),
        "has the shape": tiny_bert(tmp_path / "wide", hidden=16),
    }
    for message, folder in cases.items():
        refuses(message, [folder, models[0]], tmp_path / "out")
    deep = [models[0], tmp_path / "deep"]
    refuses(r"has .*layer\.2\..* does not", deep, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "soup"}, "chooses by evaluation data"),
        ({"method": "weighted", "weights": [1.0]}, "weights: 1 given for 3 models"),
        ({"weights": [1.0]}, "weights: .* no effect with method: mean"),
        ({"method": "soup", "interpolate": 0.5}, "interpolate: 0.5 has no effect"),
        ({"of": "differences"}, "of: .* or use method: slerp"),
        ({"density": 0.2}, "density: 0.2 .* or use method: ties or dare"),
        ({"base": "x"}, "base: x has no effect .* interpolate: 1"),
        ({"method": "ties", "seed": 1}, "seed: 1 .* or use method: dare"),
        ({"method": "weighted", "weights": [0, 0, 0]}, "not only zeros"),
        ({"sweep_points": [0, 1], "data": "x"}, "line between two models"),
        (
            {"sweep_points": [0, 1], "data": "x", "method": "slerp", "weights": [1, 1]},
            "sweep: .* weights has no effect",
        ),
        ({"method": "slerp"}, "slerp is between two models, and 3 are given"),
        ({"method": "ties"}, "give it as base"),
        ({"method": "ties", "weights": [1, -1, 1], "base": "x"}, "at least 0"),
        ({"last": 3}, "no run's output folder"),
        ({"method": "ties", "density": 5.0, "base": "x"}, "density: 5 is the share"),
    ],
)
def test_mistakes(models, tmp_path, options, message):
    refuses(message, models, tmp_path / "out", **options)


def test_too_few_checkpoints_and_a_folder_that_exists(runs, models, tmp_path):
    out = tmp_path / "out"
    refuses("has 4 checkpoints, and the last 5", runs[0], out, last=5)
    refuses("exists already", models, tmp_path)
    refuses("nothing to merge", models[0], out)


# ---- memory ----------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from pathlib import Path
from vembed.weights import merge
from vembed.weights.sources import open_source
merge.PIECE = 2**17
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sources = [open_source(name) for name in sys.argv[1:3]]
recipe = merge.Recipe("slerp", (1.0, 1.0))
merge.write_merge(sources, None, None, recipe, Path(sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, before)
"""
BYTES = 32 * 2**20


def test_memory_does_not_grow_with_the_models(tmp_path):
    """Two models of one tensor of 32 MiB each: less than 20 MB is needed on top of the imports, which is less than one
    of them."""
    tensor = {"dtype": "F32", "shape": [BYTES // 4], "data_offsets": [0, BYTES]}
    header = json.dumps({"w": tensor}).encode()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            # Sparse: zeros that take no room on the disk.
            file.truncate(8 + len(header) + BYTES)
    # A process of its own from the start: pages that it shares with another one would count when they are copied.
    folders = [str(tmp_path / name) for name in ("a", "b", "out")]
    words = [sys.executable, "-c", MEASURE, *folders]
    num_bytes = int(subprocess.check_output(words).split()[0]) * 1024
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > BYTES
    assert num_bytes < 20e6
