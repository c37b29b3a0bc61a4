"""`mine`: negatives by the run's own model between epochs, the same on any ranks and after an interruption."""

import contextlib
import math
from pathlib import Path

import pytest

import vembed
from tests.data.files import read_jsonl, write_jsonl
from tests.harness import result_of, run_cases
from tests.tiny import shared, texts, tiny_bert_st
from tests.training.test_run import log_text, metrics
from vembed.errors import RunError, UserError
from vembed.training.hooks.base import Hook
from vembed.training.hooks.mining import MINING_FOLDER, EpochMiner

NUM_ROWS = 24
MINE = {
    "every_epochs": 1,
    "num_negatives": 3,
    "top_k": 10,
    "relative_margin": None,
}


def write(path):
    rows = []
    for text in texts(
        NUM_ROWS,
        seed=3,
        shortest=5,
        longest=9,
    ):
        negatives = [rows[-1]["positive"]] if len(rows) % 2 else []
        query = text.rpartition(" ")[0]
        rows.append(
            {
                "query": query,
                "positive": text,
                "negatives": negatives,
            }
        )
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
        self.negative_scores = []

    def on_start(self, run):
        miners = [hook for hook in run.hooks if isinstance(hook, EpochMiner)]
        self.miner = miners[0] if miners else None

    def on_step(self, report):
        if self.miner is not None:
            self.documents.append(self.miner._numbers.tolist())
        self.losses.append(report.outcome.loss)
        batch = report.batches[0][0]
        self.batches.append((len(batch.negative), batch.where))
        self.negative_scores += batch.negative_label_scores.tolist()
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
    first, second, third = (recorded.documents[step] for step in (0, 3, 6))
    assert recorded.documents[:6] == [first] * 3 + [second] * 3
    assert first != second != third
    for row in first:
        assert len(row) == 3 and min(row) >= 0
    text = log_text(result.output_dir)
    assert text.count("72 negatives for 24 examples (mean score 0.") == 3
    assert len(metrics(result.output_dir, "mine/score")) == 3
    assert not (result.output_dir / MINING_FOLDER).exists()
    # The batches get them: the data have a negative for every second row.
    for num_negatives, where in recorded.batches:
        lines = [int(name.rpartition(":")[2]) for name in where]
        assert num_negatives == 3 * 8 + sum(line % 2 == 0 for line in lines)
    # The order of the data is that without mining.
    plain, _ = train(config, mine=None, overwrite=True)
    for (_, where), (_, expected) in zip(recorded.batches, plain.batches, strict=True):
        assert where == expected


def test_negatives_of_the_data_keep_their_scores(config):
    path = Path(config["data_path"])
    rows = read_jsonl(path)
    for row in rows:
        row["score"] = 1.0
        row["negative_score"] = [0.25] * len(row["negatives"])
    write_jsonl(path, rows)
    recorded, _ = train(config, loss="bce", epochs=1)
    known = [score for score in recorded.negative_scores if not math.isnan(score)]
    assert known == [0.25] * (NUM_ROWS // 2)
    assert len(recorded.negative_scores) == 3 * NUM_ROWS + NUM_ROWS // 2


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
    config["mine"] = {**MINE, "corpus_path": str(corpus)}
    recorded, _ = train(config, max_steps=2, save_steps=2)
    mined = {number for row in recorded.documents[0] for number in row}
    assert max(mined) < recorded.miner._miner.documents.num_candidates <= 20
    write_jsonl(corpus, [{"text": text} for text in texts(20, seed=10)])
    with pytest.raises(UserError, match="the documents that are mined have changed"):
        vembed.train(
            {
                **config,
                "save_steps": 2,
                "resume": "force",
            }
        )


def test_a_start_without_mining_and_data_with_labels(config, tmp_path):
    recorded, _ = train(
        config,
        mine={
            **MINE,
            "every_epochs": 2,
            "at_start": False,
        },
    )
    first, second, third = (recorded.documents[step] for step in (0, 3, 6))
    assert {number for row in first for number in row} == {-1}
    assert first == second != third
    # Steps of four batches begin in the epochs 0, 1, 2 and 4.
    rarer = {**MINE, "every_epochs": 3, "at_start": False}
    recorded, _ = train(
        config,
        mine=rarer,
        gradient_accumulation_steps=4,
        max_steps=4,
        output_dir=str(tmp_path / "long steps"),
    )
    *earlier, last = recorded.documents
    assert earlier == [first] * 3
    assert last != first
    path = tmp_path / "labelled.jsonl"
    write_jsonl(path, [{"text": text, "label": text[0]} for text in texts(12)])
    with pytest.raises(UserError, match="mine needs pairs of queries and documents"):
        vembed.train(
            {
                **config,
                "data_path": str(path),
                "overwrite": True,
            }
        )


def mined_on_a_rank(config):
    recorded, _ = train(config)
    return recorded.documents, recorded.losses


def test_two_ranks_mine_what_one_mines(config, tmp_path):
    config["epochs"] = 2
    documents, losses = mined_on_a_rank(config)
    config["batch_size"] = 4
    cases = {}
    for strategy in ("ddp", "fsdp"):
        output = {"strategy": strategy, "output_dir": str(tmp_path / strategy)}
        cases[strategy] = ({**config, **output},)
    actual = run_cases(mined_on_a_rank, 2, cases)
    for strategy in cases:
        (first, recorded), (other, _) = result_of(actual, strategy)
        assert first == other == documents, strategy
        assert recorded == pytest.approx(losses, rel=1e-5), strategy
