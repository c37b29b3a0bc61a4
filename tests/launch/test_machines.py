"""Two "machines" on loopback through the command."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.commands import Started
from tests.commands import start as start_command
from tests.harness import free_port
from tests.training.test_run import settings


def start(config: Path, machine: int, port: int, *words: str) -> Started:
    command = ["train", str(config), "--num-machines", "2", "--nproc", "1"]
    place = ["--machine-rank", str(machine), "--main-process-ip", "127.0.0.1", "--main-process-port", str(port)]
    return start_command(*command, *place, *words, stderr=errors_of(config, machine))


def errors_of(config: Path, machine: int) -> Path:
    return config.with_name(f"errors-{machine}")


def test_both_machines_name_what_differs(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**settings(tmp_path), "report_to": "none", "dist_timeout_minutes": 1}))
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(lines[::-1]))
    port = free_port()
    words = ("learning_rate=0.5", f"data_path={tmp_path}/other.jsonl")
    machines = [start(config, 0, port), start(config, 1, port, *words)]
    for number, machine in enumerate(machines):
        code, err = machine.wait(100), errors_of(config, number).read_text()
        assert code == 2, err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "learning_rate is 0.002 on rank 0 (machine 0, " in line and ") but 0.5 on rank 1 (machine 1, " in line
        assert "data_path is " in line and "Traceback" not in err
    assert not (tmp_path / "run").exists()
