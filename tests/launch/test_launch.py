"""The local launcher, with scripts of a few lines in place of training: environment, output, signals and failures."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from vembed.errors import UserError
from vembed.parallel import launch as launcher

STOPPABLE = """
import os, signal, sys, time
stop = []
for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)):
    signal.signal(number, lambda *_, code=code: stop.append(code))
print("ready", os.environ["RANK"], flush=True)
deadline = time.monotonic() + 60
while not stop and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep({saving})
open(f"saved-{os.environ['RANK']}", "w").close()
sys.exit(stop[0] if stop else 9)
"""

LAUNCH = """
import sys
from vembed.parallel import launch
launch.KILL_TIMEOUT_SECONDS, launch.CAUSE_SECONDS, launch.REPEATED_SIGNAL_SECONDS = map(float, sys.argv[3:])
sys.exit(launch.run_ranks([sys.executable, sys.argv[1]], launch.rank_environments(int(sys.argv[2]))))
"""
SHORT_GRACE = 0.5
"""Seconds that ranks are given which do not end by themselves."""
SETTLE = 0.3
SAME_REQUEST = 1.0
"""Shorter times than the launcher's own."""


class Launched:
    """A launcher as a process of its own, in a folder where its ranks leave files."""

    def __init__(
        self,
        folder,
        script,
        num_processes=2,
        *,
        settle=launcher.CAUSE_SECONDS,
    ):
        (folder / "rank.py").write_text(script)
        (folder / "launcher.py").write_text(LAUNCH)
        self.folder = folder
        numbers = [num_processes, SHORT_GRACE, settle, SAME_REQUEST]
        words = ["launcher.py", "rank.py", *map(str, numbers)]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Unbuffered, `print` writes a line in pieces, and two ranks' pieces mix in the pipe that they share.
            env=os.environ | {"PYTHONUNBUFFERED": ""},
        )

    def end(self):
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def ranks(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_until_ready(self):
        """Both ranks have printed their line (rank 0 directly, the other through the launcher). Return them."""
        for _ in range(2):
            assert "ready" in self.process.stdout.readline()
        return self.ranks()

    def rank(self, number):
        (rank,) = [
            rank for rank in self.ranks() if rank.environ()["RANK"] == str(number)
        ]
        return rank


def is_alive(process):
    """Tell a process that runs from one that has ended, also where nobody has waited for it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run(folder, script, num_processes=2):
    return Launched(folder, script, num_processes).end()


@pytest.mark.promise("A08", "A14", "B26", "C26", "D35", "E33")
def test_ranks_get_torchs_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS NCCL_DEBUG"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code, out, err = run(
        tmp_path,
        f"import os; print(*(os.environ[n] for n in '{names}'.split()), flush=True)",
        3,
    )
    assert (code, err) == (0, "")
    ports = set()
    ranks = set()
    for line in out.splitlines():
        rank, local_rank, *sizes, address, port, threads, debug = line.rpartition("] ")[
            2
        ].split()
        assert rank == local_rank
        assert sizes == ["3", "3"]
        assert (address, debug) == ("127.0.0.1", "INFO")
        assert int(threads) == max(1, launcher.num_cores() // 3)
        ranks.add(rank)
        ports.add(port)
    assert ranks == {"0", "1", "2"}
    assert len(ports) == 1


@pytest.mark.promise("A10", "C04", "C27")
def test_more_processes_than_a_machine_can_hold_are_refused_before_any_starts():
    with pytest.raises(UserError, match=r"num_processes: 100,000 on a machine of \d+"):
        launcher.rank_environments(100_000)


def test_several_machines():
    env = {"OMP_NUM_THREADS": "3"}
    ranks = launcher.rank_environments(
        2, num_machines=3, machine_rank=1, main_process_ip="10.0.0.1", env=env
    )
    shared = {
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "3",
    }
    for number, rank in enumerate(ranks):
        expected = {
            **shared,
            "RANK": str(2 + number),
            "LOCAL_RANK": str(number),
        }
        assert expected.items() <= rank.items()
    assert len(ranks) == 2


def test_rank_0_writes_as_it_is_and_the_others_with_their_number(tmp_path):
    script = "import os, sys; print('out'); sys.stderr.write('err\\n')"
    code, out, err = run(tmp_path, script)
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 1] out", "out"]
    assert sorted(err.splitlines()) == ["[rank 1] err", "err"]


@pytest.mark.promise("B28")
def test_a_failing_rank_ends_all_and_is_named(tmp_path):
    script = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('broken')\ntime.sleep(60)"
    began = time.monotonic()
    code, _, err = Launched(tmp_path, script, 3, settle=SETTLE).end()
    assert code == 1
    assert time.monotonic() - began < 50
    assert "[rank 1] ValueError: broken" in err
    assert "vembed: rank 1 ended with exit code 1; ending the other 2" in err


def test_a_killed_rank_ends_all_and_is_named(tmp_path):
    launched = Launched(tmp_path, STOPPABLE.replace("{saving}", "60"), settle=SETTLE)
    ranks = launched.wait_until_ready()
    began = time.monotonic()
    launched.rank(1).kill()
    code, _, err = launched.end()
    assert code == 1
    assert time.monotonic() - began < 40, "far less than saving takes"
    assert "rank 1 was killed by signal 9, SIGKILL (perhaps because memory" in err
    # Although rank 0 does not heed SIGTERM in time.
    assert not [rank for rank in ranks if rank.is_running()]


def test_a_users_mistake_on_a_rank_is_exit_code_2_without_the_tracebacks_it_causes(
    tmp_path,
):
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not (os.path.exists('1') and os.path.exists('2')): time.sleep(0.01)\n"
        "    sys.stderr.write('error: wrong\\n')\n"
        "    open('0', 'w').close()\n    sys.exit(2)\n"
        "sys.stderr.write('before\\n')\nsys.stderr.flush()\nopen(os.environ['RANK'], 'w').close()\n"
        "while not os.path.exists('0'): time.sleep(0.01)\n"
        "raise ConnectionError('the other is gone')\n"
    )
    code, _, err = run(tmp_path, script, 3)
    assert code == 2
    *lines, last = err.splitlines()
    assert set(lines) == {"[rank 1] before", "[rank 2] before", "error: wrong"}
    assert "rank 0 ended with exit code 2" in last


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGUSR1, 143), (signal.SIGHUP, 143)],
)
def test_a_signal_is_passed_on_and_the_checkpoint_awaited(tmp_path, signum, code):
    launched = Launched(tmp_path, STOPPABLE.replace("{saving}", "0.5"))
    launched.wait_until_ready()
    launched.process.send_signal(signum)
    assert launched.end()[0] == code
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


def test_a_second_signal_some_time_later_ends_at_once(tmp_path):
    launched = Launched(tmp_path, STOPPABLE.replace("{saving}", "60"))
    ranks = launched.wait_until_ready()
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    launched.process.send_signal(
        signal.SIGINT
    )  # a wrapper passes Ctrl-C on: the same request
    time.sleep(SAME_REQUEST + 0.5)
    assert all(rank.is_running() for rank in ranks)
    began = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 130
    assert time.monotonic() - began < 40, "far less than saving takes"
    assert not [rank for rank in ranks if rank.is_running()]


def test_a_signal_to_one_rank_stops_all_where_they_agree(tmp_path):
    script = STOPPABLE.replace(
        "while not stop", "while not stop and not os.path.exists('saved-0')"
    ).replace("{saving}", "0")
    script = script.replace("else 9", "else 143")
    launched = Launched(tmp_path, script)
    launched.wait_until_ready()
    launched.rank(0).send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143


def test_ranks_that_do_not_follow_a_stopped_one_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "STOP_TIMEOUT_SECONDS", 0.5)
    (tmp_path / "rank.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(143)\ntime.sleep(60)"
    )
    command = [sys.executable, str(tmp_path / "rank.py")]
    assert (
        launcher.run_ranks(command, launcher.rank_environments(2, env=os.environ)) == 1
    )


def test_no_orphan_and_no_file_when_the_launcher_itself_is_killed(
    tmp_path, monkeypatch
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    launched = Launched(tmp_path, STOPPABLE.replace("{saving}", "60"))
    ranks = launched.wait_until_ready()
    assert len(ranks) == 2
    launched.process.kill()
    launched.process.communicate()
    deadline = time.monotonic() + 60
    while any(is_alive(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [rank for rank in ranks if is_alive(rank)]
    assert not list(temporary.iterdir())


def test_devices_are_counted_without_torch_where_there_are_none(monkeypatch):
    assert launcher.num_visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == 0
    monkeypatch.setattr(launcher, "GPU_NODES", ("/",))
    assert launcher.num_visible_devices({"CUDA_VISIBLE_DEVICES": "2,5"}) == 2
    monkeypatch.setattr(launcher, "GPU_NODES", ("/nowhere",))
    assert launcher.num_visible_devices({}) == 0
