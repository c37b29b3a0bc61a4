"""What a run writes to may fail, and the run goes on: consoles that nobody reads any more, disks that are full."""

import errno
import logging
import os
import pty
import signal
from pathlib import Path

import pytest

import vembed
from tests.commands import start
from tests.training.test_checkpoint import small_files
from tests.training.test_run import (
    config_file,
    log_text,
    metrics,
    settings_without_validation,
)
from vembed.errors import RunError
from vembed.evaluation.report.report import write_report
from vembed.training import final as finish
from vembed.training import run_log
from vembed.training.run_log import LineFile, LogFile


def started(folder, console, **options):
    config = config_file(folder, **options)
    return start("train", str(config), stdout=console, stderr=console)


def test_a_pipe_that_nobody_reads_ends_no_run(tmp_path):
    """`vembed train cfg.yaml | head -1`"""
    os.mkfifo(tmp_path / "pipe")
    process = started(tmp_path, tmp_path / "pipe")
    with (tmp_path / "pipe").open() as pipe:
        pipe.readline()
    assert process.wait(timeout=300) == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    log = log_text(tmp_path / "run")
    assert log.count("the console is closed") == 1
    assert "report: " in log


def test_a_closed_terminal_is_a_signal_and_the_checkpoint_is_saved(
    tmp_path,
):
    terminal, inner = pty.openpty()
    process = started(tmp_path, Path(os.ttyname(inner)), max_steps=100_000)
    recorded = b""
    while b"step 3/" not in recorded:
        recorded += os.read(terminal, 4096)
    os.close(inner)
    os.close(terminal)  # what is written from now on fails
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=300) == 143
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert (checkpoint / "manifest.json").exists()


def test_lines_wait_until_there_is_room(tmp_path, caplog):
    caplog.set_level("INFO", logger="vembed")
    path = tmp_path / "lines"
    file = LineFile(path)
    with small_files(10):
        for line in ("first", "second", "third"):
            file.write(line)
            assert path.read_bytes() == b"first\n", "no half a line"
    file.write("fourth")
    assert path.read_text().split() == ["first", "second", "third", "fourth"]
    with small_files(1):
        file.write("fifth")
        file.close()
    no_room, written, _, lost = caplog.messages
    assert f"{path}: File too large" in no_room
    assert "3 lines that waited are written" in written
    assert "1 lines found no room" in lost


def test_a_full_disk_is_said_once_by_the_log(caplog, capsys, monkeypatch):
    monkeypatch.setattr(run_log, "require_regular", lambda *_: None)
    handler = LogFile(Path("/dev/full"))
    for _ in range(3):
        handler.handle(logging.makeLogRecord({"msg": "a line"}))
    handler.close()
    (message,) = caplog.messages
    assert "/dev/full: No space left on device" in message
    assert capsys.readouterr().err == ""


def test_a_tracker_that_fails_is_left_alone(tmp_path, monkeypatch):
    from accelerate.tracking import TensorBoardTracker

    monkeypatch.setattr(TensorBoardTracker, "log", fail)
    result = vembed.train(
        settings_without_validation(tmp_path, report_to=["tensorboard"])
    )
    log = log_text(result.output_dir)
    assert log.count("report_to: tensorboard failed and is disabled ([Errno 28]") == 1
    assert len(metrics(result.output_dir)) == 6


def fail(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("save_steps", "way_out"), [(3, "resume from checkpoint-6"), (None, "train again")]
)
def test_a_disk_that_is_full_at_the_end(save_steps, way_out, tmp_path, monkeypatch):
    options = settings_without_validation(tmp_path, save_steps=save_steps)
    with monkeypatch.context() as patch:
        patch.setattr(finish, "save_model", fail)
        with pytest.raises(RunError, match=rf"No space.*{tmp_path}/run .*{way_out}"):
            vembed.train(options)
    if save_steps:
        again = vembed.train({**options, "resume": True})
        assert (again.model_dir / "model.safetensors").exists()


def test_a_disk_that_is_full_for_the_report_costs_the_report_alone(
    tmp_path, monkeypatch
):
    options = settings_without_validation(tmp_path, max_steps=1)
    monkeypatch.setattr(finish, "write_report", fail)
    with pytest.raises(RunError, match=r"is in .*final, but its report .*No space"):
        vembed.train(options)
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert write_report(tmp_path / "run").is_file()
