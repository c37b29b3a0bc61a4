"""`mine`: negatives by the run's own model between epochs, the same on any ranks and after an interruption."""

import contextlib
import shutil

import pytest

import vembed
from tests.data.files import write_jsonl
from tests.harness import result_of, run_cases
from tests.tiny import shared, texts, tiny_bert_st
from tests.training.test_run import metrics
from vembed.errors import RunError, UserError
from vembed.training.hooks.base import Hook
from vembed.training.hooks.mining import MINING_FOLDER, EpochMiner

NUM_ROWS = 24
MINE = {"every_epochs": 1, "num_negatives": 3, "top_k": 10, "relative_margin": None}


def write(path):
    actual = texts(NUM_ROWS, seed=3, shortest=5, longest=9)
    rows = [
        {
            "query": text.rpartition(" ")[0],
            "positive": text,
            "negatives": [actual[number - 1]] if number % 2 else [],
        }
        for number, text in enumerate(actual)
    ]
    write_jsonl(path, rows)
    return path


@pytest.fixture
def config(tmp_path):
    return {
        "model_name": str(shared(tiny_bert_st)),
        "data_path": str(write(tmp_path / "train.jsonl")),
        "batch_size": 8,
        "epochs": 3,
        "output_dir": str(tmp_path / "run"),
        "report_to": "none",
        "strategy": "single",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "optim": "sgd",
        "mine": MINE,
    }


class Seen(Hook):
    """Mined documents and losses of each step."""

    def __init__(self, fails_after=None):
        self.fails_after = fails_after
        self.documents = []
        self.losses = []
        self.batches = []

    def on_start(self, run):
        self.run = run
        self.miner = next(hook for hook in run.hooks if isinstance(hook, EpochMiner))

    def on_step(self, report):
        self.documents.append(self.miner._numbers.tolist())
        self.losses.append(report.outcome.loss)
        self.batches.append(
            [len(report.batches[0][0].negative), sorted(report.batches[0][0].where)]
        )
        if report.step == self.fails_after:
            raise RunError("killed")


def train(config, **changes):
    recorded = Seen(changes.pop("fails_after", None))
    result = None
    with contextlib.suppress(RunError):
        result = vembed.train({**config, **changes}, hooks=[recorded])
    return recorded, result


def test_each_epoch_has_negatives_of_its_own(config):
    recorded, result = train(config)
    assert len(recorded.losses) == 9
    first = recorded.documents[:3]
    second = recorded.documents[3:6]
    third = recorded.documents[6:]
    assert first == [first[0]] * 3
    assert second == [second[0]] * 3
    assert first[0] != second[0] != third[0]
    assert all(sum(number >= 0 for number in row) == 3 for row in first[0])
    text = (result.output_dir / "training_log.txt").read_text()
    lines = [
        line.partition("mine: ")[2]
        for line in text.splitlines()
        if "mine: before" in line
    ]
    assert [line.partition(",")[0] for line in lines] == [
        f"before epoch {epoch}" for epoch in (1, 2, 3)
    ]
    assert "72 negatives for 24 examples (mean score 0." in lines[0]
    assert len(metrics(result.output_dir, "mine/score")) == 3
    assert not (result.output_dir / MINING_FOLDER).exists()
    # The batches get them: the data have a negative for every second row.
    plain = [
        sum(int(where.rpartition(":")[2]) % 2 == 0 for where in batch)
        for _, batch in recorded.batches
    ]
    assert [count for count, _ in recorded.batches] == [
        count + 3 * 8 for count in plain
    ]


def test_the_order_of_the_data_is_that_without_mining(config):
    class Order(Hook):
        def __init__(self):
            self.rows = []

        def on_step(self, report):
            self.rows.append(report.batches[0][0].where)

    orders = []
    for changes in ({}, {"mine": None}):
        order = Order()
        vembed.train(
            {
                **config,
                **changes,
                "output_dir": f"{config['output_dir']}-{len(orders)}",
            },
            hooks=[order],
        )
        orders.append(order.rows)
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    "saved, killed", [(1, 5), (3, 4)], ids=["inside an epoch", "between epochs"]
)
def test_a_killed_run_goes_on_with_the_same_negatives(config, tmp_path, saved, killed):
    whole, _ = train(config, output_dir=str(tmp_path / "whole"))
    before, _ = train(config, save_steps=saved, fails_after=killed)
    after, result = train(config, save_steps=saved, resume=True)
    done = killed - 1  # the checkpoint of the step that fails was not written any more
    assert after.losses == whole.losses[done:]
    assert before.documents[:done] + after.documents == whole.documents
    assert result.steps == 9


def test_other_documents_are_refused(config, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    write_jsonl(corpus, [{"text": text} for text in texts(20, seed=9)])
    options = {**config, "mine": {**MINE, "corpus_path": str(corpus)}}
    recorded, result = train(options, epochs=1, save_steps=2)
    mined = {number for row in recorded.documents[0] for number in row}
    assert max(mined) < recorded.miner._miner.documents.num_candidates <= 20
    write_jsonl(corpus, [{"text": text} for text in texts(20, seed=10)])
    shutil.rmtree(result.output_dir / "final")
    shutil.rmtree(result.output_dir / "checkpoint-3", ignore_errors=True)
    with pytest.raises(UserError, match="the documents that are mined have changed"):
        vembed.train({**options, "epochs": 1, "save_steps": 2, "resume": True})


def test_a_start_without_mining_and_data_with_labels(config, tmp_path):
    recorded, _ = train(config, mine={**MINE, "every_epochs": 2, "at_start": False})
    assert all(number == -1 for row in recorded.documents[0] for number in row)
    assert recorded.documents[3] == recorded.documents[0]
    assert recorded.documents[6] != recorded.documents[0]
    path = tmp_path / "labelled.jsonl"
    write_jsonl(path, [{"text": text, "label": text[0]} for text in texts(12)])
    with pytest.raises(UserError, match="mine needs pairs of queries and documents"):
        vembed.train({**config, "data_path": str(path), "overwrite": True})


def mined_on_a_rank(config):
    recorded, _ = train(config)
    return recorded.documents, recorded.losses


def test_two_ranks_mine_what_one_mines(config, tmp_path):
    documents, losses = mined_on_a_rank(
        {**config, "epochs": 2, "output_dir": str(tmp_path / "one")}
    )
    options = {**config, "epochs": 2, "batch_size": 4}
    cases = {
        strategy: (
            {**options, "strategy": strategy, "output_dir": str(tmp_path / strategy)},
        )
        for strategy in ("ddp", "fsdp")
    }
    actual = run_cases(mined_on_a_rank, 2, cases, process_group=False)
    for strategy in cases:
        (first, recorded), (other, _) = result_of(actual, strategy)
        assert first == other == documents, strategy
        assert recorded == pytest.approx(losses, rel=1e-5), strategy
