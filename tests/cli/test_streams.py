"""Closed standard streams, and variables of the environment that are no numbers."""

import os
import resource
import subprocess
import sys

import yaml

from tests.commands import start
from tests.tiny import shared, tiny_bert_st
from tests.training.test_run import settings
from vembed.cli.support import guarded


def test_a_run_without_standard_streams_ends_well(tmp_path):
    options = settings(tmp_path, max_steps=2, val_data_path=None, report_to=[])
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(options))
    process = start("train", str(config), "--nproc", "2", has_streams=False)
    assert process.wait(100) == 0
    assert (tmp_path / "run" / "final").is_dir()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2, "nothing is printed into other files"


def test_a_full_disk_is_a_sentence_and_leaves_no_half_model(tmp_path):
    err = tmp_path / "err"
    model = str(shared(tiny_bert_st))
    words = ("export", model, f"{tmp_path}/copy")
    process = start(*words, stderr=err, max_file_bytes=20_000)
    assert process.wait(100) == 1
    (line,) = err.read_text().splitlines()
    assert line.startswith(f"error: {tmp_path}/copy could not be written (File too")
    assert list(tmp_path.iterdir()) == [err]


def scored(folder, address_space=resource.RLIM_INFINITY):
    """Run `vembed score` as a process of its own, with a limit on its memory if one is given."""
    pairs = folder / "pairs.jsonl"
    pairs.write_text('{"query": "red cat", "positive": "blue dog"}')
    words = ["score", str(shared(tiny_bert_st)), str(pairs)]
    limits = (address_space, address_space)
    # Each thread has a stack, and a machine may have many cores.
    few_threads = {"OMP_NUM_THREADS": "2", "RAYON_NUM_THREADS": "2"}
    return subprocess.run(
        [sys.executable, "-m", "vembed", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **few_threads},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits),
    )


def test_libraries_say_nothing_while_they_are_imported(tmp_path):
    """bitsandbytes and torchao would name kernels of GPUs that are not here."""
    result = scored(tmp_path)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) > 0
    assert result.stderr == ""


def test_too_little_memory_is_a_sentence(tmp_path):
    result = scored(tmp_path, 300_000_000)
    assert result.returncode == 1
    assert result.stderr.startswith("error: there is not enough memory (")
    assert result.stderr.count("\n") == 1


def test_a_rank_whose_neighbour_ended_says_it_in_a_sentence(capsys):
    """The traceback of a collective says nothing about the rank that ended, whose own message does."""

    def gather():
        error = RuntimeError("Connection closed by peer [127.0.0.1]:13487")
        error.add_note("rank 0 of 2, in the collective all_gather_parts (call 7)")
        raise error

    assert guarded(gather) == 1
    shown = capsys.readouterr().err
    assert "rank 0 of 2" in shown and "all_gather_parts" in shown
    assert "Traceback" not in shown
