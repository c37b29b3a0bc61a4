"""Closed standard streams, and variables of the environment that are no numbers."""

import subprocess
import sys

import pytest
import yaml

from tests.commands import start
from tests.tiny import shared, tiny_bert_st
from tests.training.test_run import settings
from vembed.errors import UserError
from vembed.parallel.environment import check_num_threads


def test_a_run_without_standard_streams_ends_well(tmp_path):
    options = settings(tmp_path, max_steps=2, val_data_path=None)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**options, "report_to": "none"}))
    assert (
        start("train", f"{tmp_path}/run.yaml", "--nproc", "2", has_streams=False).wait(
            100
        )
        == 0
    )
    assert (tmp_path / "run" / "final").is_dir()
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2, (
        "nothing is printed into other files"
    )


def test_a_full_disk_is_a_sentence_and_leaves_no_half_model(tmp_path):
    err = tmp_path / "err"
    code = start(
        "export",
        str(shared(tiny_bert_st)),
        f"{tmp_path}/copy",
        stderr=err,
        max_file_bytes=20_000,
    ).wait(100)
    assert code == 1 and err.read_text().startswith(
        f"error: {tmp_path}/copy could not be written (File too large): "
    )
    assert err.read_text().count("\n") == 1 and [
        path.name for path in tmp_path.iterdir()
    ] == ["err"]


def test_libraries_say_nothing_while_they_are_imported(tmp_path):
    """bitsandbytes and torchao would name kernels of GPUs that are not here."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"query": "red cat", "positive": "blue dog"}')
    words = ["score", str(shared(tiny_bert_st)), str(pairs)]
    result = subprocess.run(
        [sys.executable, "-m", "vembed", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) > 0
    assert result.stderr == ""


def test_threads_that_are_no_number():
    for value in ("abc", "0", "-1", "1.5"):
        with pytest.raises(UserError, match="OMP_NUM_THREADS"):
            check_num_threads({"OMP_NUM_THREADS": value})
    for value in ("", "4"):
        check_num_threads({"OMP_NUM_THREADS": value})
