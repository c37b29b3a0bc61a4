"""Two "machines" on loopback through the command."""

import yaml

from tests.commands import CODE
from tests.commands import start as start_command
from tests.tiny import shared, tiny_bert
from tests.training.test_run import settings
from vembed.parallel.launch import free_port

WITH_PACKAGES = "import sys; sys.path.insert(0, sys.argv.pop(1)); from vembed.cli.main import main; main()"
"""The command with a folder of packages that comes before the installed ones."""


def start(config, machine, port, *words, packages=None):
    command = ["train", str(config), "--num-machines", "2", "--nproc", "1"]
    place = [
        "--machine-rank",
        str(machine),
        "--main-process-ip",
        "127.0.0.1",
        "--main-process-port",
        str(port),
    ]
    all_words = [*command, *place, *words]
    errors = errors_of(config, machine)
    if packages is None:
        return start_command(*all_words, stderr=errors)
    return start_command(
        WITH_PACKAGES, str(packages), *all_words, module=CODE, stderr=errors
    )


def errors_of(config, machine):
    return config.with_name(f"errors-{machine}")


def test_both_machines_name_what_differs(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {**settings(tmp_path), "report_to": "none", "dist_timeout_minutes": 1}
        )
    )
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(lines[::-1]))
    port = free_port()
    other = shared(tiny_bert, hidden=16)
    words = (
        "learning_rate=0.5",
        f"data_path={tmp_path}/other.jsonl",
        f"model_name={other}",
    )
    machines = [start(config, 0, port), start(config, 1, port, *words)]
    for number, machine in enumerate(machines):
        code = machine.wait(100)
        err = errors_of(config, number).read_text()
        assert code == 2, err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (
            "learning_rate is 0.002 on rank 0 (" in line
            and ") but 0.5 on rank 1 (" in line
        )
        assert (
            "data_path is " in line
            and "model_name is " in line
            and "Traceback" not in err
        )
    assert not (tmp_path / "run").exists()


def test_a_machine_of_another_run_is_refused(tmp_path):
    """With equal settings, data, port and output folder nothing but the word tells the two runs apart."""
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {**settings(tmp_path), "report_to": "none", "dist_timeout_minutes": 1}
        )
    )
    port = free_port()
    machines = [
        start(config, number, port, "--run-id", word)
        for number, word in enumerate(("monday", "friday"))
    ]
    for number, machine in enumerate(machines):
        assert machine.wait(timeout=300) == 2
        err = errors_of(config, number).read_text()
        assert "(VEMBED_RUN_ID) is monday on rank 0 (" in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()
