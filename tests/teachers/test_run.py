"""Whole runs with teachers, through the function that the command calls."""

import pytest

import vembed
from tests.data.files import text_records, write_jsonl
from tests.data.pictures import write
from tests.tiny import shared, texts, tiny_bert, tiny_clip
from tests.training.test_run import metrics
from vembed.files import cache_folder


@pytest.fixture(autouse=True)
def own_cache(cache_home):
    assert cache_folder() == cache_home / "vembed"


def small_bert(folder):
    return tiny_bert(folder, layers=1, hidden=24)


def train(folder, records, losses, *, model=tiny_bert, teacher=small_bert, **options):
    """The folder of a run with these losses and a teacher."""
    data = folder / "train.jsonl"
    write_jsonl(data, records)
    settings = {
        "model_name": str(shared(model)),
        "data_path": str(data),
        "output_dir": str(folder / "out"),
        "losses": losses,
        "teachers": [{"model": str(shared(teacher)), "name": "teacher"}],
        "batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        **options,
    }
    return vembed.train(settings).output_dir


def test_several_losses_and_a_teacher(tmp_path):
    infonce = {"loss": "infonce", "guide": "teacher", "mix_negatives": 1}
    losses = [infonce, {"loss": "embedding"}, {"loss": "spread_out"}]
    records = text_records(12, num_negatives=2)
    run = train(tmp_path, records, losses, mrl_dims=[8, 32])
    assert len(metrics(run)) == 3
    weights = list((run / "final").rglob("*.safetensors"))
    assert weights
    assert all("projection" not in path.name for path in weights)


def test_a_teacher_of_texts_and_images(tmp_path):
    records = []
    for number, text in enumerate(texts(8, seed=2)):
        picture = write(tmp_path / f"{number}.jpg", seed=number)
        records.append({"query": text, "positive": {"image": picture.name}})
    losses = [{"loss": "embedding"}, {"loss": "relational"}]
    run = train(tmp_path, records, losses, model=tiny_clip, teacher=tiny_clip)
    assert len(metrics(run)) == 3


def test_texts_without_pairs_follow_a_teacher(tmp_path):
    records = [{"text": text} for text in texts(24, seed=5)]
    losses = [{"loss": "embedding"}, {"loss": "relational"}]
    run = train(tmp_path, records, losses, max_steps=12, learning_rate=1e-2)
    embedding = metrics(run, "loss/embedding")
    assert len(embedding) == 12 and sum(embedding[-4:]) < sum(embedding[:4])
    with pytest.raises(vembed.UserError, match="no query and no positive"):
        train(tmp_path, records, [{"loss": "infonce"}, *losses], overwrite=True)
