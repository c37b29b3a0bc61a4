"""Two "machines" on loopback through the command."""

from tests.commands import start
from tests.tiny import shared, tiny_bert
from tests.training.test_run import config_file
from vembed.parallel.launch import free_port


def refused(folder, *words_of_machines):
    """Start a machine with each of these words. Return what each says when it ends with exit code 2."""
    config = config_file(folder, dist_timeout_minutes=1)
    place = ["--main-process-ip", "127.0.0.1", "--main-process-port", str(free_port())]
    machines = []
    for number, words in enumerate(words_of_machines):
        rank = ["--num-machines", "2", "--nproc", "1", "--machine-rank", str(number)]
        errors = folder / f"errors-{number}"
        machine = start("train", str(config), *rank, *place, *words, stderr=errors)
        machines.append((machine, errors))
    lines = []
    for machine, errors in machines:
        code = machine.wait(300)
        text = errors.read_text()
        assert code == 2 and "Traceback" not in text, text
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        lines.append(line)
    assert not (folder / "run").exists()
    return lines


def test_both_machines_name_what_differs(tmp_path):
    model_name = shared(tiny_bert, hidden=16)
    words = [f"model_name={model_name}", "learning_rate=0.5", "--run-id", "friday"]
    for line in refused(tmp_path, ["--run-id", "monday"], words):
        assert "(VEMBED_RUN_ID) is monday on rank 0 (" in line
        assert "learning_rate is 0.002 on rank 0 (" in line
        assert ") but 0.5 on rank 1 (" in line
        assert "model_name is " in line
