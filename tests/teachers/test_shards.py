"""Teachers in shards, and decoders that answer yes or no: the same answers as whole ones in one process."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.harness import run_ranks
from tests.teachers.test_cache import Data, rows
from tests.tiny import shared, tiny_bert, tiny_qwen3, tiny_reranker
from vembed.config.schema import Teacher, TrainConfig
from vembed.data.features import ANSWER_END, ANSWER_PROMPT
from vembed.data.row_store import RowStore
from vembed.errors import UserError
from vembed.inference.reranker import Reranker
from vembed.parallel.session import start_session
from vembed.teachers import PairTeacher, Teachers, is_sharded, teacher_kind


def yes_no_decoder(folder):
    """A Qwen3 whose tokenizer has single tokens for yes and no."""
    tokenizer = AutoTokenizer.from_pretrained(shared(tiny_qwen3))
    tokenizer.add_tokens(["yes", "no"])
    model = AutoModelForCausalLM.from_pretrained(shared(tiny_qwen3))
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
    stores = [
        RowStore(cache / "teachers", path.name, "teacher", ".answers")
        for path in sorted((cache / "teachers").iterdir())
    ]
    actual = {}
    for store in stores:
        keys = list(store._places)
        actual[store.folder.name] = {
            keys[place]: row for place, row in store.find_rows(keys).items()
        }
    return actual


def test_shards_answer_as_whole_teachers_do(tmp_path):
    judge = yes_no_decoder(tmp_path / "judge")
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
    assert sorted(map(len, whole.values())) == [19, 19, 29]
    for name, rows_by_key in whole.items():
        assert rows_by_key.keys() == shards[name].keys()
        for key, row in rows_by_key.items():
            np.testing.assert_allclose(shards[name][key], row, atol=2e-5)


def test_the_answer_is_the_logit_of_yes_less_that_of_no(tmp_path):
    folder = yes_no_decoder(tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = config_of(folder)
    teacher = Teacher(model=str(folder), instruction="Do they match")
    assert teacher_kind(teacher, folder, needs_vectors=False) == "yes_no"
    assert teacher_kind(teacher, folder, needs_vectors=True) == "embedder"
    example = rows(1)[0]
    config = config.changed(
        **{"teachers": [teacher], "losses": None, "loss": "margin_mse"}
    )
    with start_session(config) as session:
        teachers = Teachers(
            config.objective, config.data, config.model, session, tmp_path / "cache"
        )
        teachers.prepare(Data([example], "data"))
        actual = teachers.by_name[str(folder)].compute(
            [(example.query, example.negatives[0])]
        )
    text = f"<Instruct>: Do they match\n<Query>: {example.query.text}\n<Document>: {example.negatives[0].text}"
    ids = [
        entry
        for part in (ANSWER_PROMPT, text, ANSWER_END)
        for entry in tokenizer.encode(part, add_special_tokens=False)
    ]
    no, yes = tokenizer.convert_tokens_to_ids(["no", "yes"])
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    assert float(actual[0, 0]) == pytest.approx(
        float(logits[yes] - logits[no]), abs=1e-4
    )


def test_a_rank_without_pairs_runs_a_decoder_whose_tokenizer_makes_nothing_of_an_empty_text(
    tmp_path, monkeypatch
):
    tokenizer = AutoTokenizer.from_pretrained(shared(tiny_qwen3))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A", pair="$A $B"
    )  # no special tokens
    tokenizer.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        shared(tiny_qwen3), num_labels=1
    )
    model.save_pretrained(tmp_path)
    teacher = Teacher(model=str(tmp_path))
    config = config_of(shared(tiny_qwen3))
    with start_session(config) as session:
        judge = PairTeacher(
            teacher,
            "reranker",
            tmp_path,
            session,
            tmp_path,
            arithmetic="float32",
            trust_remote_code=False,
        )
        assert judge.compute([]).shape == (0, 1)
        assert tokenizer("", "")["input_ids"] == []
        judge._world_size = 2
        monkeypatch.setattr(
            "vembed.parallel.collectives.max_ints", lambda counts: [2] * len(counts)
        )  # another rank has two batches
        assert judge.compute([]).shape == (0, 1)


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
