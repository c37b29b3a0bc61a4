"""Flushing to disks that refuse it, and what is said about it."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.data.files import write_jsonl
from tests.training.test_run import metrics
from vembed.files import disk_refusal, replaced_file, sync, sync_folder
from vembed.saving.files import replaced_folder
from vembed.training.checkpoint.folders import trim_metrics


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES])
def test_file_systems_that_cannot_flush_folders(code, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    error = OSError(code, os.strerror(code))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    sync(tmp_path)
    with pytest.raises(OSError, match=os.strerror(code)):
        sync_folder(tmp_path)  # a file that cannot be flushed is an error


def test_a_saved_model_is_flushed_before_it_has_its_name(tmp_path, monkeypatch):
    flushed = []

    def note(number):
        flushed.append(str(Path(f"/proc/self/fd/{number}").readlink()))

    monkeypatch.setattr(os, "fsync", note)
    with replaced_folder(tmp_path / "final") as folder:
        (folder / "weights").write_text("1")
    assert flushed == [f"{folder}/weights", str(folder), str(tmp_path)]


@pytest.mark.parametrize(("is_scored", "evaluations"), [(True, 2), (False, 1)])
def test_an_evaluation_that_will_be_made_again_is_cut(tmp_path, is_scored, evaluations):
    rows = []
    for step in (2, 4):
        rows += [{"step": step, "loss": 1.0}, {"step": step, "eval": {"a": 1}}]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    trim_metrics(tmp_path, 4, is_scored=is_scored)
    assert len(metrics(tmp_path, "eval")) == evaluations
    assert len(metrics(tmp_path)) == 2


def test_a_file_that_finds_no_room_is_named_and_has_no_name(tmp_path):
    target = tmp_path / "scores.npy"
    target.write_text("earlier")
    # Without a file, as `write` raises it.
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError) as raised, replaced_file(target) as partial:
        partial.write_text("ha")
        raise full
    said = disk_refusal(raised.value)
    assert said.startswith(f"{target} could not be written (No space left on device)")
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text() == "earlier"


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
    sentence = disk_refusal(error)
    if said is None:
        assert sentence is None
    else:
        assert sentence.startswith(said)
