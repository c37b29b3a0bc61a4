"""Teachers in shards, and decoders that answer yes or no: the same answers as whole ones in one process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.harness import run_ranks
from tests.teachers.test_cache import (
    answers_on_disk,
    assert_same_answers,
    config_of,
    prepare,
    rows,
)
from tests.tiny import (
    change_json,
    shared,
    tiny_bert,
    tiny_qwen3,
    tiny_qwen3_reranker,
    tiny_reranker,
)
from vembed.config.schema import Teacher
from vembed.errors import UserError
from vembed.inference.reranker import Reranker
from vembed.parallel import collectives
from vembed.teachers import is_sharded, teacher_kind


def prepare_all(config, cache, data):
    """Called on every rank: fill the cache with the answers for some data."""
    for number, examples in enumerate(data):
        prepare(config, cache, examples, str(number))


@pytest.mark.parametrize("reranker", [tiny_reranker, tiny_qwen3_reranker])
def test_shards_answer_as_whole_teachers_do(reranker, tmp_path):
    # One pair: a rank has none.
    single = replace(rows(40)[39], negatives=())
    data = [rows(9), [single]]
    prepare_all(config_of(reranker=reranker), tmp_path / "whole", data)
    sharded = config_of(reranker=reranker, sharded=True)
    run_ranks(prepare_all, 2, sharded, tmp_path / "shards", data)
    whole = answers_on_disk(tmp_path / "whole")
    assert sorted(len(keys) for keys, _ in whole.values()) == [19, 29]
    # The names are the same: shards are no part of a teacher's identity.
    assert_same_answers(tmp_path / "shards", whole, 2e-5)


def test_a_decoder_whose_vectors_are_needed_is_an_embedder():
    folder = shared(tiny_qwen3_reranker)
    teacher = Teacher(model=str(folder))
    assert teacher_kind(teacher, folder, needs_vectors=True) == "embedder"


def test_a_teacher_that_does_not_fit_is_sharded(monkeypatch):
    folder = shared(tiny_bert)
    teacher = Teacher(model=str(folder))
    size = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(collectives, "broadcast_object", lambda value: value)
    ranks = SimpleNamespace(world_size=2, memory=size, fsdp=None)
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
    folder = tiny_qwen3(tmp_path)
    change_json(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(UserError, match="no single tokens for yes and no"):
        Reranker(
            folder,
            role="teacher x",
            head="answer",
            device=torch.device("cpu"),
        )
