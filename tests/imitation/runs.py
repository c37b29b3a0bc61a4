"""Run cases: on the CPU in ordinary processes, on the imitation device in processes of its own."""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.imitation.guard import built_library
from tests.imitation.recording import ROOT, Wait

COUNTED_STEP = 3
"""The step whose kernels and waits are reported: the step before it is not logged."""
LOGGED_STEP = 2
"""The step during which the first one is logged."""
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass
class Result:
    """What one training showed."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each step."""
    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of the counted step, by stage and operator; empty on the CPU."""
    waits: Counter[Wait] = field(default_factory=Counter)
    log_waits: Counter[Wait] = field(default_factory=Counter)
    """What a logged step waits for besides."""
    pinned_copies: Counter[str] = field(default_factory=Counter)
    error: str | None = None
    """The traceback, if the training failed."""

    def all_waits(self):
        """Return the places that wait, in any step."""
        return sorted(set(self.waits) | set(self.log_waits))

    def kernels_of(self, *stages):
        """Return the number of kernels of these stages, or of the whole step."""
        return sum(
            count
            for (stage, _), count in self.kernels.items()
            if not stages or stage in stages
        )


def train(name, recording=None):
    """Train one case in this process. `recording`: of the imitation device, where it is installed."""
    import vembed
    from tests.imitation.cases import whole_matrix

    case = next(case for case in whole_matrix() if case.name == name)
    result = Result()

    def on_step(info):
        result.losses.append(info.loss)
        result.norms.append(info.grad_norm)
        if recording is None:
            return
        if info.step == LOGGED_STEP:
            result.log_waits = Counter(recording.waits)
        if info.step == COUNTED_STEP:
            result.kernels = Counter(recording.kernels)
            result.waits = Counter(recording.waits)
            result.log_waits -= result.waits
            result.pinned_copies = Counter(recording.pinned_copies)
        recording.clear()

    try:
        with tempfile.TemporaryDirectory(prefix="imitation-") as folder:
            config = case.config(Path(folder), on_cpu=recording is None)
            vembed.train(config, on_step=on_step)
    except BaseException:
        result.error = traceback.format_exc()
    return result


def on_cpu(names):
    """Train cases on the CPU, all in one forked process."""
    from tests.harness import run_ranks

    results = run_ranks(_train_all, 1, list(names))
    return results[0]


def _train_all(names):
    leave_group()
    return {name: train(name) for name in names}


def on_imitation(names):
    """Train cases, or call probes, on the imitation device: one process imports everything and forks for each."""
    library = built_library()
    with tempfile.TemporaryDirectory(prefix="imitation-") as folder:
        answer = Path(folder, "results")
        command = [sys.executable, "-m", "tests.imitation.process", library, answer]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        ended = subprocess.run(
            [*map(str, command), *names],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"the imitation's process failed:\n{ended.stdout}")
        return pickle.loads(answer.read_bytes())


def leave_group():
    """Forget the launcher's variables: each training is a single process."""
    for variable in VARIABLES:
        os.environ.pop(variable, None)
