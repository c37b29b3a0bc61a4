"""Answers of teachers on disk: a second run computes nothing, damage is named and mended, two runs share a folder."""

import logging
import shutil
from dataclasses import dataclass

import numpy as np
import pytest

from tests.harness import run_ranks
from tests.tiny import (
    change_json,
    shared,
    texts,
    tiny_bert,
    tiny_bert_st,
    tiny_reranker,
)
from vembed import Embedder
from vembed.config.schema import TrainConfig
from vembed.data.examples import Example, Item, ReadAs
from vembed.data.row_store import RowStore
from vembed.parallel.session import start_session
from vembed.teachers import Teachers


def config_of(*, reranker=tiny_reranker, sharded=False, **options):
    """A run with a teacher of vectors, which has these options, and one of scores."""
    bert = str(shared(tiny_bert))
    judge = str(shared(reranker))
    teachers = [
        {"model": bert, "name": "bert", "sharded": sharded, **options},
        {"model": judge, "name": "reranker", "sharded": sharded},
    ]
    losses = [
        {"loss": "kl", "distill_candidates": "batch", "teacher": "bert"},
        {"loss": "kl", "teacher": "reranker"},
    ]
    return TrainConfig(
        model_name=bert,
        data_path="none",
        teachers=teachers,
        losses=losses,
        strategy="ddp",
    )


def rows(count=30):
    items = iter([Item(text) for text in texts(3 * count, seed=1)])
    return [Example(next(items), (next(items),), (next(items),)) for _ in range(count)]


@dataclass
class Data:
    """Examples with a fingerprint, as a store of examples has one."""

    examples: list[Example]
    fingerprint: str
    num_sources: int = 1

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index, /):
        return self.examples[index]

    def source_of(self, index):
        """Each source has as many examples."""
        return index * self.num_sources // len(self)


def teachers_of(config, session, cache):
    return Teachers(config.objective, config.data, config.model, session, cache)


def prepare(config, cache, examples, fingerprint="data"):
    """Called on every rank: the answers that were added to the stores."""
    with start_session(config) as session:
        teachers = teachers_of(config, session, cache)
        num_sources = len(config.data.sources())
        teachers.prepare(Data(examples, fingerprint, num_sources))
        return {name: value.store.num_added for name, value in teachers.by_name.items()}


def run(world_size, config, cache, *more):
    return run_ranks(prepare, world_size, config, cache, rows(), *more)


@pytest.fixture
def config():
    return config_of()


def width_of(store):
    """Values per row of a store, 0 without rows."""
    rows = store.find_rows(list(store._places)[:1])
    return sum(map(len, rows.values()))


def stores(cache):
    """The stores of a cache by the width of their rows."""
    by_width = {}
    for path in (cache / "teachers").iterdir():
        store = RowStore(path.parent, path.name, "teacher", ".answers")
        by_width[width_of(store)] = store
    return by_width


def answers_on_disk(cache):
    """The keys and the rows of each store, by its name."""
    answers = {}
    for store in stores(cache).values():
        keys = sorted(store._places)
        answers[store.folder.name] = (keys, store.read_rows(keys))
    return answers


def assert_same_answers(cache, expected, tolerance):
    actual = answers_on_disk(cache)
    assert actual.keys() == expected.keys()
    for name, (keys, answers) in expected.items():
        other_keys, other_answers = actual[name]
        assert other_keys == keys
        np.testing.assert_allclose(other_answers, answers, atol=tolerance)


def test_two_ranks_answer_once_and_a_second_run_reads(tmp_path, config):
    first = run(2, config, tmp_path)
    nothing = {"bert": 0, "reranker": 0}
    # One process of a machine writes.
    assert first == [{"bert": 90, "reranker": 60}, nothing]
    opened = stores(tmp_path)
    assert len(opened[32]) == 90
    assert len(opened[1]) == 60
    assert prepare(config, tmp_path, []) == nothing
    assert run(1, config, tmp_path, "more data") == [nothing]


def test_damage_is_named_and_mended(tmp_path, config, caplog):
    run(1, config, tmp_path)
    whole = answers_on_disk(tmp_path)
    remaining = stores(tmp_path)
    (file,) = remaining[32].folder.glob("*.answers")
    file.write_bytes(b"")
    (other,) = remaining[1].folder.glob("*.answers")
    other.write_bytes(other.read_bytes()[:300])
    with caplog.at_level(logging.INFO, logger="vembed"):
        assert prepare(config, tmp_path, rows()) == {"bert": 90, "reranker": 48}
    assert "teacher bert: 90 of 90 answers are missing" in caplog.text
    assert "teacher reranker: 48 of 60 answers are missing" in caplog.text
    assert_same_answers(tmp_path, whole, 1e-6)


def test_the_answers_change_with_the_model_and_its_settings(tmp_path, config):
    run(1, config, tmp_path)
    changed = config_of(max_length=4)
    assert run(1, changed, tmp_path) == [{"bert": 90, "reranker": 0}]


def test_the_answers_change_with_the_prompts_that_the_folders_name_decides(tmp_path):
    first = tmp_path / "nomic-embed-text-v1"
    second = tmp_path / "e5-small"
    shutil.copytree(shared(tiny_bert), first)
    shutil.copytree(first, second)
    added = []
    for folder in (first, second):
        config = config_of(model=str(folder))
        added.append(prepare(config, tmp_path / "cache", rows())["bert"])
    assert added == [90, 90]


def test_a_teacher_of_one_source_is_asked_about_its_examples_alone(tmp_path, config):
    taught = {"path": "a", "losses": [{"loss": "kl", "teacher": "reranker"}]}
    options = {
        **config.given_options(),
        "data_path": [taught, "b"],
        "losses": [{"loss": "infonce"}],
        "homogeneous_batches": True,
    }
    added = prepare(TrainConfig(**options), tmp_path, rows())
    assert added == {"reranker": 30}


def vectors_of(config, cache, items):
    """The vectors of a teacher for items as queries, asked for one after the other."""
    with start_session(config) as session:
        teacher = teachers_of(config, session, cache).by_name["bert"]
        asked = []
        for item in items:
            answer, _ = teacher.answers([[teacher.question(item, "query")]])
            asked.append(answer)
    return np.concatenate(asked)


def test_answers_do_not_depend_on_what_was_asked_for_first(tmp_path, config):
    text = texts(1, seed=3, shortest=12, longest=12)[0]
    items = [Item(text), Item(text, prompt="find: "), Item(text, max_length=5)]
    actual = vectors_of(config, tmp_path / "a", items)
    np.testing.assert_allclose(
        vectors_of(config, tmp_path / "b", items[::-1])[::-1], actual, atol=1e-6
    )
    for number in (1, 2):
        assert np.abs(actual[0] - actual[number]).max() > 0.01


def test_a_teacher_keeps_as_many_dimensions_as_its_folder_says(tmp_path):
    folder = tiny_bert_st(tmp_path / "teacher")
    texts_of_items = texts(3, seed=4)
    items = [Item(text) for text in texts_of_items]
    change_json(folder / "config_sentence_transformers.json", truncate_dim=8)
    actual = vectors_of(config_of(model=str(folder)), tmp_path / "cache", items)
    expected = Embedder(folder).encode(texts_of_items, "query", normalize=True)
    assert expected.shape == (3, 8)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_two_runs_at_once_share_a_folder(tmp_path):
    """Each process writes a file of its own and sees what the others have written; nobody reads half a block."""
    keys = [number.to_bytes(16, "little") for number in range(40)]
    rows = np.arange(160, dtype=np.float32).reshape(40, 4)

    def opened():
        return RowStore(tmp_path, "identity", "teacher", ".answers")

    runs = (opened(), opened())
    for start in range(0, 40, 5):
        for store, size in zip(runs, (5, 12), strict=True):
            wanted = keys[start : start + size]
            places = [start + place for place in store.missing(wanted)]
            store.add_rows([keys[place] for place in places], rows[places])
    num_added = sum(store.num_added for store in runs)
    assert num_added == 40, "what the other run has computed is not computed again"
    first, _ = (tmp_path / "identity").glob("*.answers")
    with first.open("ab") as file:
        file.write(b"the beginning of a block that is being written")
    np.testing.assert_array_equal(opened().read_rows(keys), rows)


def test_own_prompts_and_length_of_a_teacher_come_before_those_of_a_source(
    tmp_path,
):
    source = ReadAs(query_prompt="find: ", document_prompt="passage: ", max_length=4)

    prompted = [source.apply(row) for row in rows()]

    def added(**options):
        cache = tmp_path / str(options)
        config = config_of(**options)
        plain = prepare(config, cache, rows(), "a")["bert"]
        return [plain, prepare(config, cache, prompted, "b")["bert"]]

    assert added() == [90, 90], "without own ones, those of the source"
    assert added(query_prompt="", document_prompt="", max_length=64) == [90, 0]
    assert added(query_prompt="", max_length=64) == [90, 60], (
        "documents have the source's prompt"
    )
