"""The same result for one and for three ranks, and after a rank was killed in the middle."""

import os
import signal
from pathlib import Path

import pytest

from tests.harness import rank_outcomes, run_ranks
from tests.mining.data import assert_same_rows, on_ranks, read_jsonl, run, write_data
from vembed.data.row_store import RowStore
from vembed.mining import candidates
from vembed.mining.mine import mine


def mined(options, chunk=candidates.QUERIES_PER_SEARCH):
    candidates.QUERIES_PER_SEARCH = chunk
    result = mine(options)
    return result.counts, result.num_encoded


def killed_at_the_third_block(options):
    add_rows = RowStore.add_rows
    written = []

    def add_and_count(self, keys, rows):
        written.append(len(keys))
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return add_rows(self, keys, rows)

    RowStore.add_rows = add_and_count
    return mined(options)


def killed_in_the_search(options):
    find = candidates.CandidateSearch._find

    def find_and_end(self, first, last):
        if first > 16:
            os.kill(os.getpid(), signal.SIGKILL)
        return find(self, first, last)

    candidates.CandidateSearch._find = find_and_end
    return mined(options, 16)


@pytest.fixture
def options(tmp_path):
    base = write_data(tmp_path)
    model_name = base.pop("model_name")
    return {
        **base,
        "retrievers": ["bm25", model_name],
        "scores": True,
        "sampling": "random",
        "work_dir": str(tmp_path / "work"),
    }


def test_the_same_for_any_number_of_ranks(options, tmp_path):
    del options["work_dir"]  # each has one beside its file
    rows_alone, result = run(options)
    assert result.num_encoded == 340
    assert sum(len(row["negatives"]) for row in rows_alone) > 100
    outcomes, rows = on_ranks(mined, options, 3, tmp_path)
    assert outcomes == [(result.counts, 340)] * 3
    assert_same_rows(rows, rows_alone)


@pytest.mark.parametrize(
    "killed, chunk, num_missing",
    [(killed_at_the_third_block, 40, 340 - 40 - 128), (killed_in_the_search, 16, 0)],
)
def test_a_killed_run_goes_on_where_it_was(
    options, tmp_path, killed, chunk, num_missing
):
    whole = {
        **options,
        "output_path": str(tmp_path / "whole.jsonl"),
        "work_dir": str(tmp_path / "other"),
    }
    ((counts, num_all),) = run_ranks(mined, 1, whole, process_group=True)
    assert num_all == 340
    (outcome,) = rank_outcomes(killed, 1, options, process_group=True)
    assert outcome.exitcode == -signal.SIGKILL
    assert not Path(options["output_path"]).exists()
    assert (
        run_ranks(mined, 2, options, chunk, process_group=True)
        == [(counts, num_missing)] * 2
    )
    assert_same_rows(
        read_jsonl(Path(options["output_path"])), read_jsonl(tmp_path / "whole.jsonl")
    )
