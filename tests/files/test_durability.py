"""Flushing to disks that refuse it, and what is said about it."""

import errno
import os
from pathlib import Path

import pytest

from tests.training.test_run import metrics
from vembed.files import disk_refusal, replaced_file, sync, sync_folder
from vembed.saving.files import replaced_folder
from vembed.training.checkpoint.folders import trim_metrics


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES])
def test_file_systems_that_cannot_flush_folders(code, tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def refuse(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    with pytest.raises(OSError, match=os.strerror(code)):
        sync_folder(tmp_path)  # a file that cannot be flushed is an error


def test_a_saved_model_is_flushed_before_it_has_its_name(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda number: flushed.append(str(Path(f"/proc/self/fd/{number}").readlink())),
    )
    with replaced_folder(tmp_path / "final") as folder:
        (folder / "weights").write_text("1")
    assert flushed == [f"{folder}/weights", str(folder), str(tmp_path)]


def test_an_evaluation_that_will_be_made_again_is_cut(tmp_path):
    lines = [
        '{"step": 2, "loss": 1.0}',
        '{"step": 2, "eval": {"a": 1}}',
        '{"step": 4, "loss": 2.0}',
        '{"step": 4, "eval": {"a": 2}}',
    ]
    for is_scored, evaluations in ((True, 2), (False, 1)):
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        trim_metrics(tmp_path, 4, is_scored=is_scored)
        assert len(metrics(tmp_path, "eval")) == evaluations
        assert len(metrics(tmp_path)) == 2


def test_a_file_that_finds_no_room_is_named_and_has_no_name(tmp_path):
    target = tmp_path / "scores.npy"
    target.write_text("earlier")
    with pytest.raises(OSError) as raised, replaced_file(target) as partial:
        partial.write_text("ha")
        raise OSError(
            errno.ENOSPC, os.strerror(errno.ENOSPC)
        )  # without a file, as `write` raises it
    said = disk_refusal(raised.value)
    assert said is not None and said.startswith(
        f"{target} could not be written (No space left on device): make room"
    )
    assert [path.name for path in tmp_path.iterdir()] == [
        "scores.npy"
    ] and target.read_text() == "earlier"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/srv/x"),
            "/srv/x could not be opened (Permission denied)",
        ),
        (
            RuntimeError("Error while serializing: I/O error: (os error 28)"),
            "a file could not be written (No space left",
        ),
        (
            OSError("640 requested and 624 written"),
            "a file could not be written (No space left on device): make room",
        ),
        (RuntimeError("shared memory: No space left on device"), None),
        (PermissionError(errno.EACCES, "Permission denied"), None),  # of a port
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), None),
    ],
)
def test_errors_of_the_disk_get_a_sentence(error, said):
    actual = disk_refusal(error)
    assert actual is None if said is None else (actual or "").startswith(said)
