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

import vembed
from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert, tiny_bert_st, tiny_qwen3_st
from tests.weights.variants import pairs, variant
from vembed import UserError
from vembed.cli.commands.export import copy_model
from vembed.cli.main import app
from vembed.config.schema import TrainConfig
from vembed.parallel.session import start_session
from vembed.weights import merge as merging
from vembed.weights.merge import merge


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [variant(root / f"m{seed}", seed) for seed in range(3)]


def weights_of(folder):
    return {
        name: tensor.astype(np.float64)
        for name, tensor in load_file(Path(folder) / "model.safetensors").items()
    }


def test_mean_of_three_models_against_numpy(models, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "PIECE", 100)
    inputs = [weights_of(model) for model in models]
    result = vembed.merge(models, tmp_path / "mean")
    actual = weights_of(result.model_dir)
    assert actual.keys() == inputs[0].keys()
    for name, value in actual.items():
        np.testing.assert_allclose(
            value, np.mean([text[name] for text in inputs], axis=0), rtol=0, atol=1e-6
        )


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
    vembed.merge(models, tmp_path / "out", dtype="bfloat16")
    vectors = vembed.Embedder(
        tmp_path / "out", device="cpu", torch_dtype="float32"
    ).encode(["red cat", "bird"])
    settings = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert settings["method"] == "mean" and len(settings["models"]) == 3
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
        == "bfloat16"
    )
    assert "Merged by vembed" in (tmp_path / "out" / "README.md").read_text()
    assert not list(tmp_path.glob(".*"))
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(
        str(tmp_path / "out"), device="cpu", model_kwargs={"dtype": "float32"}
    )
    np.testing.assert_allclose(vectors, theirs.encode(["red cat", "bird"]), atol=1e-6)


def test_back_to_a_base_with_other_names(models, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(shared(tiny_bert), base)
    tensors = load_file(base / "model.safetensors")
    extra = {"cls.predictions.bias": np.zeros(3, np.float32)}
    save_file(
        {**{f"bert.{name}": tensor for name, tensor in tensors.items()}, **extra},
        base / "model.safetensors",
    )
    vembed.merge(models[0], tmp_path / "out", base=base, interpolate=0.5)
    model_weights = weights_of(models[0])
    actual = weights_of(tmp_path / "out")
    for name in model_weights:
        np.testing.assert_allclose(
            actual[name], (model_weights[name] + tensors[name]) / 2, atol=1e-6
        )


def test_the_command_and_a_sweep(models, tmp_path, capsys):
    data = pairs(tmp_path / "val.jsonl")
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        words = [
            "merge",
            str(models[0]),
            str(models[1]),
            "-o",
            str(out),
            "--sweep",
            "0,0.5,1",
            "--data",
            str(data),
        ]
        app(words)
    assert end.value.code == 0
    swept = json.loads((out / "sweep.json").read_text())
    assert [point["at"] for point in swept["points"]] == [0, 0.5, 1]
    best = max(point["score"] for point in swept["points"])
    assert vembed.evaluate(out, data)["ndcg@10"] == pytest.approx(best)
    assert swept["points"][0]["score"] == pytest.approx(
        vembed.evaluate(models[0], data)["ndcg@10"]
    )
    out_text = capsys.readouterr().out
    assert f"score: {best:.4f}" in out_text
    at = max(swept["points"], key=lambda point: point["score"])["at"]
    best_line = f"best at {at:g} (0: {models[0]}, 1: {models[1]})"
    assert best_line in out_text


def test_a_soup_is_never_below_its_best_member(tmp_path):
    good = shared(tiny_bert_st)
    members = [
        variant(tmp_path / f"m{seed}", seed, of=good, by=by)
        for seed, by in enumerate((0.02, 0.5, 0.03, 0.1))
    ]
    data = pairs(tmp_path / "val.jsonl", 40)
    result = vembed.merge(members, tmp_path / "soup", "soup", data=data)
    alone = [vembed.evaluate(member, data)["ndcg@10"] for member in members]
    score = vembed.evaluate(tmp_path / "soup", data)["ndcg@10"]
    assert score == pytest.approx(result.score)
    assert score >= max(alone)
    assert str(members[int(np.argmax(alone))]) in result.models


def _soup_on_a_rank(members, data, output):
    config = TrainConfig(model_name=members[0], data_path="unused", strategy="ddp")
    with start_session(config) as session:
        return merge(members, output, "soup", data=data, session=session).score


def test_two_processes_make_the_same_soup(models, tmp_path):
    data = str(pairs(tmp_path / "val.jsonl"))
    names = [str(model) for model in models]
    scores = run_ranks(
        _soup_on_a_rank, 2, names, data, str(tmp_path / "two"), process_group=False
    )
    alone = vembed.merge(names, tmp_path / "one", "soup", data=data)
    assert scores == [alone.score, alone.score]
    first, two = (
        load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")
    )
    assert all((first[name] == two[name]).all() for name in first)


# ---- adapters and checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    data = pairs(root / "train.jsonl", 16)
    common = {
        "model_name": str(shared(tiny_bert_st)),
        "data_path": str(data),
        "batch_size": 4,
        "report_to": "none",
        "learning_rate": 1e-2,
        "max_steps": 4,
        "save_steps": 1,
        "save_total_limit": 4,
        "strategy": "ddp",
    }
    whole = vembed.train({**common, "output_dir": str(root / "whole")})
    adapter = {
        **common,
        "use_lora": True,
        "lora_r": 2,
        "save_merged": False,
        "save_steps": 4,
    }
    lora = vembed.train({**adapter, "output_dir": str(root / "lora")})
    return whole.output_dir, lora.output_dir


def test_mean_of_the_last_checkpoints_of_a_run(runs, tmp_path):
    run, _ = runs
    result = vembed.merge(run, tmp_path / "out", last=3)
    assert [Path(model).name for model in result.models] == [
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-4",
    ]
    for step in (2, 3, 4):
        vembed.merge(
            run / f"checkpoint-{step}",
            tmp_path / f"m{step}",
            "task_arithmetic",
            base=shared(tiny_bert_st),
        )
    steps = [weights_of(tmp_path / f"m{step}") for step in (2, 3, 4)]
    final = weights_of(run / "final")
    actual = weights_of(tmp_path / "out")
    for name, value in actual.items():
        np.testing.assert_allclose(steps[-1][name], final[name], atol=1e-6)
        np.testing.assert_allclose(
            value, np.mean([step[name] for step in steps], axis=0), atol=1e-6
        )
    assert any(np.abs(steps[0][name] - steps[2][name]).max() > 1e-4 for name in actual)


def test_checkpoints_of_a_run_whose_loss_has_learned_weights(tmp_path):
    config = {
        "model_name": str(shared(tiny_bert_st)),
        "data_path": str(pairs(tmp_path / "train.jsonl", 16)),
        "batch_size": 4,
        "report_to": "none",
        "max_steps": 2,
        "save_steps": 1,
        "save_total_limit": 2,
        "output_dir": str(tmp_path / "run"),
        "losses": [{"loss": "infonce"}, {"loss": "embedding"}],
        "teachers": [str(shared(tiny_bert, hidden=16))],
    }
    vembed.train(config)
    vembed.merge(
        tmp_path / "run" / "checkpoint-2",
        tmp_path / "m2",
        "task_arithmetic",
        base=shared(tiny_bert_st),
    )
    final = weights_of(tmp_path / "run" / "final")
    actual = weights_of(tmp_path / "m2")
    for name, value in actual.items():
        np.testing.assert_allclose(value, final[name], atol=1e-6)


def test_an_adapter_counts_as_the_whole_model(runs, tmp_path):
    _, lora = runs
    vembed.merge(
        [lora / "final", shared(tiny_bert_st)],
        tmp_path / "out",
        "weighted",
        weights=[1, 3],
    )
    whole = weights_of(copy_model(str(lora / "final"), tmp_path / "whole", merge=True))
    base = weights_of(shared(tiny_bert_st))
    actual = weights_of(tmp_path / "out")
    assert any(np.abs(whole[name] - base[name]).max() > 1e-3 for name in base)
    for name, value in actual.items():
        np.testing.assert_allclose(value, (whole[name] + 3 * base[name]) / 4, atol=1e-6)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_saved_by_an_older_transformers_has_position_ids(
    models, tmp_path, is_first
):
    older = tmp_path / "older"
    shutil.copytree(models[0], older)
    path = next(older.rglob("model.safetensors"))
    values = load_file(path)
    prefix = next(
        iter(name for name in values if "word_embeddings" in name)
    ).rpartition("embeddings.word")[0]
    save_file(
        {**values, f"{prefix}embeddings.position_ids": np.arange(512)[None]},
        path,
        {"format": "pt"},
    )
    pair = [older, models[1]] if is_first else [models[1], older]
    vembed.merge(pair, tmp_path / "out")
    first = weights_of(models[0])
    two = weights_of(models[1])
    for name, value in weights_of(tmp_path / "out").items():
        if not name.endswith("position_ids"):
            np.testing.assert_allclose(value, (first[name] + two[name]) / 2, atol=1e-6)
    np.testing.assert_allclose(
        np.linalg.norm(vembed.Embedder(tmp_path / "out").encode("red")), 1, atol=1e-5
    )


# ---- mistakes --------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_one_sentence(models, tmp_path):
    with pytest.raises(
        UserError, match=r"is a bert and .* is a qwen3: only models of one architecture"
    ):
        vembed.merge([models[0], shared(tiny_qwen3_st)], tmp_path / "out")
    other = tmp_path / "other"
    shutil.copytree(models[0], other)
    values = json.loads((other / "tokenizer.json").read_text())
    words = values["model"]["vocab"]
    first, second = list(words)[10:12]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="different tokenizers"):
        vembed.merge([models[0], other], tmp_path / "out")
    pooled = shared(tiny_bert_st, pooling="cls")
    with pytest.raises(UserError, match=r"embed in different ways .*pooling"):
        vembed.merge([models[0], pooled], tmp_path / "out")
    deep = tiny_bert(tmp_path / "deep", layers=3)
    with pytest.raises(UserError, match="only models of one architecture"):
        vembed.merge([deep, models[0]], tmp_path / "out")
    wide = tiny_bert(tmp_path / "wide", hidden=16)
    with pytest.raises(UserError, match="has the shape"):
        vembed.merge([models[0], wide], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "soup"}, "chooses by evaluation data"),
        ({"method": "weighted"}, "needs weights"),
        (
            {"method": "weighted", "weights": [1.0]},
            "weights: 1 given for 3 models",
        ),
        ({"weights": [1.0]}, "method: mean has no weights"),
        ({"method": "weighted", "weights": [0, 0, 0]}, "not only zeros"),
        ({"sweep_points": [0, 1], "data": "x"}, "line between two models"),
        ({"method": "slerp"}, "slerp is between two models, and 3 are given"),
        ({"method": "ties"}, "give it as base"),
        ({"last": 3}, "no run's output folder"),
        ({"method": "average"}, "is not one of mean"),
        (
            {"method": "dare", "density": 0.0, "base": "x"},
            "density: 0 is the share of each difference that dare keeps",
        ),
        ({"method": "ties", "density": 5.0, "base": "x"}, "density: 5 is the share"),
        (
            {"method": "weighted", "weights": [float("nan"), 1, 1]},
            "weights: nan is not a number to compute with",
        ),
        (
            {"interpolate": float("inf"), "base": "x"},
            "interpolate: inf is not a number",
        ),
    ],
)
def test_mistakes(models, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        vembed.merge(models, tmp_path / "out", **options)


def test_too_few_checkpoints_and_a_folder_that_exists(runs, models, tmp_path):
    with pytest.raises(UserError, match="has 4 checkpoints, and the last 5"):
        vembed.merge(runs[0], tmp_path / "out", last=5)
    with pytest.raises(UserError, match="exists already"):
        vembed.merge(models, tmp_path)
    with pytest.raises(UserError, match="nothing to merge"):
        vembed.merge(models[0], tmp_path / "out")


# ---- memory ----------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from pathlib import Path
from vembed.weights.merge import Recipe, write_merge
from vembed.weights.sources import open_source
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sources = [open_source(name) for name in sys.argv[1:3]]
write_merge(sources, None, None, Recipe("slerp", (1.0, 1.0)), Path(sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, before)
"""
BYTES = 128 * 2**20


def test_memory_does_not_grow_with_the_models(tmp_path):
    """Two models of one tensor of 128 MiB each: less than 100 MB is needed on top of the imports, which is less than
    one of them."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        header = json.dumps(
            {"w": {"dtype": "F32", "shape": [BYTES // 4], "data_offsets": [0, BYTES]}}
        ).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(
                8 + len(header) + BYTES
            )  # sparse: zeros that take no room on the disk
    # A process of its own from the start: pages that it shares with another one would count when they are copied.
    words = [
        sys.executable,
        "-c",
        MEASURE,
        *(str(tmp_path / name) for name in ("a", "b", "out")),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    grown, _ = (int(word) * 1024 for word in done.stdout.split())
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > BYTES
    assert grown < 100e6
