"""Whole runs with teachers, through the function that the command calls."""

import json

import pytest

import vembed
from tests.data.pictures import write
from tests.tiny import shared, texts, tiny_bert, tiny_clip
from vembed.files import cache_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "vembed"


def train(tmp_path, records, **options):
    """The logged steps of a run."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {
        "model_name": str(shared(tiny_bert)),
        "data_path": str(path),
        "output_dir": str(tmp_path / "out"),
        "batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        **options,
    }
    vembed.train(settings)
    return [
        json.loads(line)
        for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]


def records(count=12):
    words = texts(4 * count, seed=1, longest=12)
    return [
        {
            "query": words[4 * number],
            "positive": words[4 * number + 1],
            "negatives": words[4 * number + 2 : 4 * number + 4],
        }
        for number in range(count)
    ]


def test_a_run_with_several_losses_and_a_teacher(tmp_path):
    losses = [
        {"loss": "infonce", "guide": "teacher", "mix_negatives": 1},
        {"loss": "embedding"},
        {"loss": "spread_out"},
    ]
    teacher = {"model": str(shared(tiny_bert, layers=1, hidden=24)), "name": "teacher"}
    steps = train(
        tmp_path,
        records(),
        losses=losses,
        teachers=[teacher],
        mrl_dims=[8, 32],
    )
    assert len([step for step in steps if "loss" in step]) == 3
    weights = (tmp_path / "out" / "final").rglob("*.safetensors")
    assert all("projection" not in path.name for path in weights)


def test_a_teacher_of_texts_and_images(tmp_path):
    pictures = [
        write(tmp_path / f"{number}.jpg", seed=number).name for number in range(8)
    ]
    rows = [
        {"query": text, "positive": {"image": name}}
        for text, name in zip(texts(8, seed=2), pictures, strict=True)
    ]
    clip = str(shared(tiny_clip))
    steps = train(
        tmp_path,
        rows,
        model_name=clip,
        losses=[{"loss": "embedding"}, {"loss": "relational"}],
        teachers=[clip],
    )
    assert len([step for step in steps if "loss" in step]) == 3


def test_texts_without_pairs_follow_a_teacher(tmp_path):
    alone = [{"text": text} for text in texts(24, seed=5)]
    teacher = str(shared(tiny_bert, layers=1, hidden=24))
    losses = [{"loss": "embedding"}, {"loss": "relational"}]
    steps = train(
        tmp_path,
        alone,
        losses=losses,
        teachers=[teacher],
        max_steps=12,
        learning_rate=1e-2,
    )
    said = [step["loss/embedding"] for step in steps if "loss/embedding" in step]
    assert len(said) == 12 and sum(said[-4:]) < sum(said[:4])
    pairs = [{"loss": "infonce"}, *losses]
    with pytest.raises(vembed.UserError, match="no query and no positive"):
        train(
            tmp_path,
            alone,
            losses=pairs,
            teachers=[teacher],
            output_dir=str(tmp_path / "out2"),
        )


def test_scores_in_the_data(tmp_path):
    scored = [{**record, "scores": [2.0, 0.5, -1.0]} for record in records()]
    train(tmp_path, scored, loss="kl", teacher="scores", temperature=1.0)
    apart = [
        {**record, "positive_scores": [2.0], "negative_scores": [0.5, -1.0]}
        for record in records()
    ]
    train(
        tmp_path,
        apart,
        loss="margin_mse",
        teacher="scores",
        resume=False,
        output_dir=str(tmp_path / "out2"),
    )


@pytest.mark.parametrize("loss", ["margin_mse", "score_mse", "kl"])
def test_losses_that_compare_with_hard_negatives_alone_need_some(loss, tmp_path):
    pairs = [
        {"query": record["query"], "positive": record["positive"]}
        for record in records()
    ]
    teacher = str(shared(tiny_bert))
    with pytest.raises(
        vembed.UserError,
        match=f"loss: {loss} compares a positive with the hard negatives",
    ):
        train(tmp_path, pairs, loss=loss, teacher=teacher)
    if loss == "kl":  # over the whole batch there is something to compare
        losses = [{"loss": loss, "distill_candidates": "batch"}]
        train(tmp_path, pairs, losses=losses, teacher=teacher)
