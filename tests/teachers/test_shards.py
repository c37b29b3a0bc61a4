"""Teachers in shards, and decoders that answer yes or no: the same answers as whole ones in one process."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.harness import run_ranks
from tests.teachers.test_cache import Data, rows
from tests.tiny import shared, tiny_bert, tiny_qwen3, tiny_qwen3_reranker, tiny_reranker
from vembed.config.schema import Teacher, TrainConfig
from vembed.data.row_store import RowStore
from vembed.errors import UserError
from vembed.inference.reranker import Reranker
from vembed.parallel.session import start_session
from vembed.teachers import Teachers, is_sharded, teacher_kind


def config_of(judge, **settings):
    """A run with a teacher of each kind."""
    folders = {
        "vectors": shared(tiny_bert),
        "reranker": shared(tiny_reranker),
        "judge": judge,
    }
    teachers = [
        Teacher(model=str(folder), name=name, **settings)
        for name, folder in folders.items()
    ]
    losses = [{"loss": "kl", "teacher": name} for name in folders]
    losses[0]["distill_candidates"] = "batch"
    return TrainConfig(
        model_name=str(folders["vectors"]),
        data_path="none",
        teachers=teachers,
        losses=losses,
        strategy="ddp",
    )


def answer(config, cache, data):
    """Called on every rank: fill the cache with the answers for some data, and return the classes of the models."""
    with start_session(config) as session:
        teachers = Teachers(config.objective, config.data, config.model, session, cache)
        for number, examples in enumerate(data):
            teachers.prepare(Data(examples, str(number)))
        return [type(teacher) for teacher in teachers.by_name.values()]


def kept(cache):
    """All answers in a cache, by store and key."""
    answers = {}
    for path in (cache / "teachers").iterdir():
        store = RowStore(cache / "teachers", path.name, "teacher", ".answers")
        keys = sorted(store._places)
        answers[path.name] = (keys, store.read_rows(keys))
    return answers


def test_shards_answer_as_whole_teachers_do(tmp_path):
    judge = shared(tiny_qwen3_reranker)
    single = [
        replace(entry, negatives=()) for entry in rows(40)[39:]
    ]  # one pair: a rank has none
    data = [rows(9), single]
    answer(config_of(judge), tmp_path / "whole", data)
    run_ranks(
        answer,
        2,
        config_of(judge, sharded=True),
        tmp_path / "shards",
        data,
        process_group=False,
    )
    whole = kept(tmp_path / "whole")
    shards = kept(tmp_path / "shards")
    assert whole.keys() == shards.keys(), "shards are no part of a teacher's identity"
    assert sorted(len(keys) for keys, _ in whole.values()) == [19, 19, 29]
    for name, (keys, answers) in whole.items():
        other_keys, other_answers = shards[name]
        assert other_keys == keys
        np.testing.assert_allclose(other_answers, answers, atol=2e-5)


def test_kinds_of_teachers():
    folder = shared(tiny_qwen3_reranker)
    teacher = Teacher(model=str(folder))
    assert teacher_kind(teacher, folder, needs_vectors=False) == "yes_no"
    assert teacher_kind(teacher, folder, needs_vectors=True) == "embedder"


def test_a_teacher_that_does_not_fit_is_sharded(
    monkeypatch,
):
    teacher = Teacher(model=str(shared(tiny_bert)))
    size = sum(path.stat().st_size for path in shared(tiny_bert).rglob("*.safetensors"))
    monkeypatch.setattr(
        "vembed.parallel.collectives.broadcast_object", lambda value: value
    )

    ranks = SimpleNamespace(world_size=2, memory=size, fsdp=None)
    folder = shared(tiny_bert)
    assert is_sharded(teacher, folder, ranks)
    ranks.memory = 2 * size
    assert not is_sharded(teacher, folder, ranks)
    always = teacher.model_copy(update={"sharded": True})
    assert is_sharded(always, folder, ranks)
    ranks.fsdp = object()
    assert is_sharded(teacher, folder, ranks)
    ranks.world_size = 1
    assert not is_sharded(always, folder, ranks)


def test_a_decoder_without_tokens_for_yes_and_no(tmp_path):
    with pytest.raises(UserError, match="no single tokens for yes and no"):
        Reranker(
            shared(tiny_qwen3),
            role="teacher x",
            head="answer",
            device=torch.device("cpu"),
        )
