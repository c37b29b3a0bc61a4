"""`command` and `start`: the `vembed` command as a process of its own that has imported everything already.

`python -m vembed` imports for four seconds, and so does each rank that it starts. Here both are forked from the server
of `tests.harness`. Arguments, environment, folder, standard streams, session, signals and exit codes are those of a
real process. Tests of what starting itself does (other launchers, no torch, an installed script) use the real command.
"""

import atexit
import ctypes
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.harness import LIMIT, forkserver
from vembed.cli.main import app

PR_SET_PDEATHSIG = 1
CODE = "-c"
SCRIPT = "script"
"""In place of a module's name: the first word is a program, or the path of one."""


class Started:
    """A running command, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("vembed", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def start(
    *words,
    module="vembed",
    stdout=None,
    stderr=None,
    folder=None,
    env=None,
    max_file_bytes=None,
    has_streams=True,
):
    """Start `python -m MODULE WORDS` in a folder, the current one by default, and in a session of its own. Output is
    appended to the files.

    `max_file_bytes`: a limit on the size of each file that it writes, as on a full disk. `has_streams=False`: with the
    standard streams closed.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    streams = (
        tuple(str(path or os.devnull) for path in (stdout, stderr))
        if has_streams
        else ()
    )
    arguments = (
        module,
        list(words),
        str(folder or Path.cwd()),
        environment,
        streams,
        max_file_bytes,
    )
    process = forkserver().Process(target=_main, args=arguments, daemon=True)
    process.start()
    return Started(process)


def invoke(*words, code=0):
    """Run `vembed WORDS` in this process, check its exit code, and return its output."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def command(*words, module="vembed", folder=None, env=None, timeout=LIMIT, code=None):
    """Run the command as `start` does, wait for its end, check its exit code if one is given, and return it with the
    output."""
    with tempfile.TemporaryDirectory(prefix="vembed-command-") as place:
        out, err = (Path(place, name) for name in ("stdout", "stderr"))
        process = start(
            *words, module=module, stdout=out, stderr=err, folder=folder, env=env
        )
        try:
            process.wait(timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        done = subprocess.CompletedProcess(
            ["vembed", *words], process.returncode, out.read_text(), err.read_text()
        )
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done


def _main(module, words, folder, environment, streams, max_file_bytes):
    """Become the command. Runs in a process that the server has forked."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        subprocess_handler,  # torchrun's own Popen
    )

    os.setsid()
    _die_with_parent()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if streams:
        numbers = [
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o644)
            for path in streams
        ]
        _use_streams(os.open(os.devnull, os.O_RDONLY), *numbers)
    else:
        os.closerange(0, 3)
        sys.stdin = sys.stdout = sys.stderr = None
    subprocess.Popen = subprocess_handler.Popen = _ForkingPopen
    _run(module, words)


class _ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks this process where the command is Python's, as for a rank or a worker."""

    def _execute_child(self, *arguments):
        # As `Popen` calls it: what to start, three options of Windows, the pipes, and options of the new process.
        args, _, preexec_fn, _, _, cwd, env, *others = arguments
        pipes = others[3:9]
        *_, start_new_session, _ = others  # the last one is process_group
        words = (
            []
            if isinstance(args, str)
            else [entry for entry in map(os.fspath, args) if entry != "-u"]
        )
        if words[:1] != [sys.executable]:
            super()._execute_child(*arguments)
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            p2cread, _, _, c2pwrite, _, errwrite = pipes
            streams = (p2cread, c2pwrite, errwrite)
            try:
                self._become(words, preexec_fn, cwd, env, start_new_session, streams)
            finally:
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    @staticmethod
    def _become(words, preexec_fn, cwd, env, start_new_session, pipes):
        for number in (
            signal.valid_signals()
        ):  # as exec does: what was handled has its default again
            if callable(signal.getsignal(number)):
                signal.signal(
                    number,
                    signal.default_int_handler
                    if number == signal.SIGINT
                    else signal.SIG_DFL,
                )
        _die_with_parent()  # nobody is left where a test is cut off
        if start_new_session:
            os.setsid()
        if cwd is not None:
            os.chdir(cwd)
        if preexec_fn is not None:
            preexec_fn()
        if env is not None:
            environment = dict(env)
            os.environ.clear()
            os.environ.update(environment)
        _use_streams(
            *(position if pipe == -1 else pipe for position, pipe in enumerate(pipes))
        )
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        flags = {"-m": words[2:], "-c": [CODE, *words[2:]]}
        module, *rest = flags.get(words[1], [SCRIPT, *words[1:]])
        _run(module, rest)


def _die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _use_streams(*numbers):
    """Make the open files the standard streams."""
    for position, number in enumerate(numbers):
        os.dup2(number, position)
    # As Python opens them: errors are written line by line.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


def _run(module, words):
    """Run a module as `python -m` does, and end this process as Python does."""
    code = 0
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".* found in sys.modules", category=RuntimeWarning
            )
            if module == CODE:
                sys.argv = [CODE, *words[1:]]
                exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
            elif module == SCRIPT:
                sys.argv = list(words)
                sys.path.insert(0, str(Path(words[0]).resolve().parent))
                runpy.run_path(words[0], run_name="__main__")
            else:
                sys.argv = [module, *words]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def train_arguments(words):
    """The arguments of `vembed train`, as the command reads these words."""
    from vembed.cli.arguments import LaunchFlags
    from vembed.cli.main import load_command

    values = load_command("train").make_context("train", list(words)).params
    values.pop("json_file")
    words = values.pop("args")
    return LaunchFlags(**values).with_words(words)
