"""`vembed.train` with Python objects for data, and with callbacks."""

import threading
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pytest

import vembed
from tests.data.files import open_examples
from tests.tiny import texts
from tests.training.test_run import settings, settings_without_validation
from vembed.config.schema import TrainConfig
from vembed.data.in_memory import as_path

WORDS = texts(64)
ROWS = [
    {"query": WORDS[2 * row], "positive": f"{WORDS[2 * row + 1]} {row}"}
    for row in range(32)
]


pytestmark = pytest.mark.usefixtures("cache_home")


def test_lists_of_dicts_and_callbacks_that_end_the_run(tmp_path):
    steps = []
    evaluations = []

    def on_step(info):
        steps.append(info)
        return "stop" if info.step == 3 else None

    result = vembed.train(
        settings(tmp_path, data_path=ROWS, val_data_path=ROWS[:8]),
        on_step=on_step,
        on_evaluation=evaluations.append,
    )
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(step.loss > 0 and step.grad_norm > 0 for step in steps)
    assert [evaluation.step for evaluation in evaluations] == [0, 3]
    last = evaluations[-1]
    assert last.scores[last.metric] == result.metrics["ndcg@10"]
    assert "array(" not in repr(last)
    assert result.steps == 3
    assert (result.model_dir / "config.json").is_file()
    report = (result.output_dir / "report.md").read_text()
    assert "in the training data too: 8 of 8 (100.0%)" in report
    by_user, decided = report.split("Decided by vembed")
    assert "data_path" in by_user and "save_steps" in decided
    options = settings_without_validation(tmp_path, data_path=ROWS, overwrite=True)
    with pytest.raises(vembed.UserError, match="on_step returned 'no'"):
        vembed.train(options, on_step=lambda _: "no")
    for thread in threading.enumerate():
        assert not thread.name.startswith("vembed-data"), "it prepares batches"


def test_datasets_and_paths_become_paths():
    rows = datasets.Dataset.from_list(ROWS)
    stored = as_path("data_path", rows)
    assert len(datasets.load_from_disk(stored)) == 32
    assert as_path("data_path", datasets.Dataset.from_list(ROWS)) == stored
    paths = [Path("a.jsonl"), {"path": "b.jsonl"}]
    assert as_path("data_path", paths) == ["a.jsonl", {"path": "b.jsonl"}]
    assert as_path("data_path", ROWS) == as_path("data_path", list(map(dict, ROWS)))
    with pytest.raises(vembed.UserError, match=r"data_path, record 1: .*JSON"):
        as_path("data_path", [{"query": b"x"}])
    splits = datasets.DatasetDict(train=rows, test=rows)
    with pytest.raises(vembed.UserError, match="splits train, test"):
        as_path("data_path", splits)


def test_tables_become_paths():
    frame = pd.DataFrame(ROWS)[::2]
    frame["negatives"] = [["a", "b"]] * 16
    frame["score"] = [None, *[0.5] * 15]
    for table in (frame, pa.Table.from_pandas(frame, preserve_index=False)):
        stored = as_path("data_path", table)
        assert as_path("data_path", table) == stored
        store = open_examples(TrainConfig(model_name="m", data_path=stored), stored)
        assert len(store) == 16 and store[1].query.text == ROWS[2]["query"]
        assert [negative.text for negative in store[1].negatives] == ["a", "b"]
        assert store[0].scores is None and store[1].scores == (0.5,)
    mixed = pd.DataFrame({"query": ["a", 1]}, dtype=object)
    with pytest.raises(vembed.UserError, match=r"data_path: .* mixed types"):
        as_path("data_path", mixed)
