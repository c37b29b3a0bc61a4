"""Disks that are really full: a small file system in memory, filled to the last byte at the worst moments."""

import os
import subprocess

import pytest

import vembed
from tests.training.test_checkpoint import found_in
from tests.training.test_run import settings
from vembed.errors import RunError
from vembed.evaluation.report.report import write_report
from vembed.training import final as finish
from vembed.training.hooks.base import Hook

OPTIONS = {"val_data_path": None, "eval_before": False, "save_steps": 1}
ROOM = 20_000
"""Bytes: more than a log line, less than any model."""


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(
            "no right to mount a small file system here; limits on file sizes stand in for it in other tests"
        )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


class Filler(Hook):
    """Fills the disk before the checkpoint of a step, or before final/ is written."""

    def __init__(self, disk, step):
        self.disk, self.step = disk, step

    def on_step(self, report):
        if report.step == self.step:
            fill(self.disk)

    def on_finish(self, run):
        del run
        if self.step is None:
            fill(self.disk)


def fill(disk, room=ROOM):
    free = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize - room))


@pytest.mark.parametrize("when", ["checkpoint", "final"])
def test_a_run_whose_disk_fills_up_says_so_and_goes_on_when_there_is_room(
    disk, tmp_path, when
):
    options = {
        **settings(tmp_path, max_steps=2, **OPTIONS),
        "output_dir": str(disk / "run"),
    }
    with pytest.raises((RunError, OSError), match="No space left on device") as caught:
        vembed.train(options, hooks=[Filler(disk, 2 if when == "checkpoint" else None)])
    assert not (disk / "run" / "final").exists()
    good = found_in(disk / "run")
    assert good is not None and good.name == (
        "checkpoint-1" if when == "checkpoint" else "checkpoint-2"
    )
    assert isinstance(caught.value, RunError) and f"ake room in {disk / 'run'}" in str(
        caught.value
    )
    (disk / "ballast").unlink()
    result = vembed.train({**options, "resume": True})
    assert result.steps == 2 and (result.model_dir / "model.safetensors").is_file()


def test_a_disk_that_is_full_for_the_report_costs_the_report_alone(
    disk, tmp_path, monkeypatch
):
    options = {
        **settings(tmp_path, max_steps=1, **OPTIONS, save_total_limit=1),
        "output_dir": str(disk / "run"),
    }
    save_model = finish.save_model

    def then_full(*arguments, **named):
        model = save_model(*arguments, **named)
        fill(disk, 0)
        return model

    monkeypatch.setattr(finish, "save_model", then_full)
    with pytest.raises(
        RunError,
        match=r"the model is in .*final, but its report .*No space left on device.*make room",
    ):
        vembed.train(options)
    assert (disk / "run" / "final" / "model.safetensors").is_file()
    (disk / "ballast").unlink()
    assert write_report(disk / "run").is_file()
