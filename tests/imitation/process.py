"""The process that has the imitation device: `python -m tests.imitation.process LIBRARY RESULTS NAME ...`.

It imports everything once and forks for each case, so that no case sees what another one has left.
"""

import importlib
import os
import pickle
import sys
import traceback
from pathlib import Path

from tests.imitation.guard import load_guard
from tests.imitation.runs import Result, leave_group, train

STAGES = ("split", "encode", "gather", "differentiate", "backward")
"""Methods of the training step, in order."""


def main(library, answer, *names):
    """Run in a new process: train each case in a fork, and write the results."""
    load_guard(Path(library))
    importlib.import_module("tests.preloaded")
    leave_group()
    results = {name: in_fork(run_on_imitation, name) for name in names}
    Path(answer).write_bytes(pickle.dumps(results))


def in_fork(function, name):
    """Return what the function returns in a forked process, which leaves nothing behind."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(function(name), pipe)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        payload = pipe.read()
    _, status = os.waitpid(child, 0)
    if not payload:
        return Result(error=f"the process died with status {status}")
    return pickle.loads(payload)


def run_on_imitation(name):
    """Install the device in this process, and train a case or call a probe."""
    from tests.imitation.device import RECORDING
    from tests.imitation.probes import PROBES
    from tests.imitation.runtime import install
    from vembed.training.step import TrainingStep

    for stage in STAGES:
        setattr(TrainingStep, stage, staged(stage, getattr(TrainingStep, stage)))
    install()
    if name not in PROBES:
        return train(name, RECORDING)
    result = Result(
        kernels=RECORDING.kernels,
        waits=RECORDING.waits,
        pinned_copies=RECORDING.pinned_copies,
    )
    try:
        PROBES[name]()
    except Exception:
        result.error = traceback.format_exc()
    return result


def staged(stage, method):
    """Return the method, under whose name everything that happens in it is counted."""
    from tests.imitation.device import RECORDING

    def counted(*args, **kwargs):
        with RECORDING.during(stage):
            return method(*args, **kwargs)

    return counted


if __name__ == "__main__":
    main(*sys.argv[1:])
