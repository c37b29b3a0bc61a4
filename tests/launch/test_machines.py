"""Two "machines" on loopback through the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.harness import free_port
from tests.training.test_run import settings


def start(config: Path, machine: int, port: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vembed", "train", str(config), "--num-machines", "2", "--nproc", "1"]
    place = ["--machine-rank", str(machine), "--main-process-ip", "127.0.0.1", "--main-process-port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *place, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_both_machines_name_what_differs(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**settings(tmp_path), "report_to": "none", "dist_timeout_minutes": 1}))
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(lines[::-1]))
    port = free_port()
    words = ("learning_rate=0.5", f"data_path={tmp_path}/other.jsonl")
    machines = [start(config, 0, port), start(config, 1, port, *words)]
    for machine in machines:
        _, err = machine.communicate(timeout=100)
        assert machine.returncode == 2, err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "learning_rate is 0.002 on rank 0 (machine 0, " in line and ") but 0.5 on rank 1 (machine 1, " in line
        assert "data_path is " in line and "Traceback" not in err
    assert not (tmp_path / "run").exists()
