"""`vembed tune`: trials of a config with other values of a few options, stopped early where they do badly.

The study is a journal in the search's folder, to which each trial is added as it happens: a search that was stopped
goes on with the trials that are missing, and several processes share it, one trial each at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vembed.config.loading import load_config, resolve_run
from vembed.cores import num_cores
from vembed.errors import RunError, Stopped, UserError
from vembed.files import read_json_object, require_regular
from vembed.parallel.launch import num_visible_devices
from vembed.pipelines.tuning.search_outcome import write_outcome
from vembed.pipelines.tuning.search_space import Range, from_plain, ranges

JOURNAL = "journal.log"
SPACE = "space.json"
STUDY = "vembed"
WORKER = "VEMBED_TUNE_WORKER"
"""Variable with the number of a process that was started to share a search."""
QUIETLY = (
    "console=quiet",
    "report_to=none",
    "overwrite=true",
    "resume=false",
    "save_steps=null",
    "load_best_model_at_end=false",
    "patience=null",
)
"""Options that are off in a trial: it is scored by its best evaluation, and its weights are not kept."""
SEEDS_OF_A_TRIAL = 1_000
"""Distance between the seeds of two starts of a search, by the trials that each finds."""
REDUCTION = 3
"""Successive halving: of the trials that have come to an evaluation, a third goes on to three times as many."""


@dataclass(frozen=True, slots=True)
class Search:
    """Options that are searched, and the folder of the search."""

    config: str
    overrides: tuple[str, ...]
    folder: Path
    num_trials: int
    options: tuple[str, ...] = ()
    seed: int = 0


def run_tune(
    search: Search,
    *,
    nproc: int = 0,
    is_dry_run: bool = False,
    on_result: Callable[[dict[str, Any]], object] = lambda _: None,
) -> int:
    """Search, or go on with a search; write the best config and the picture. Return the exit code. `on_result` gets the
    result."""
    _optuna()
    if WORKER in os.environ:
        work(search)
        return 0
    if search.folder.exists() and not search.folder.is_dir():
        raise UserError(
            f"--output {search.folder} is a file; give a folder, a new one or that of an earlier search"
        )
    config = resolve_run(search.config, search.overrides).config
    if config.data.val_data_path is None and config.data.val_split is None:
        raise UserError(
            "vembed tune compares trials on validation data, and the config has none: give val_data_path, or "
            "val_split: 0.1"
        )
    devices = num_visible_devices()
    workers = min(nproc or max(devices, 1), search.num_trials)
    auto = ""
    if config.optimizer.learning_rate == "auto":
        auto = " (learning_rate: auto; the first trial tells the number)"
        config = config.changed(**{"learning_rate": 1e-4})
    # A mistake in the options is found before the first trial.
    planned = ranges(config, search.options)
    if is_dry_run:
        sys.stdout.write(_plan(search, planned, auto, workers, devices))
        return 0
    search.folder.mkdir(parents=True, exist_ok=True)
    known = _begin(search)
    sys.stdout.write("".join(f"  {option}\n" for option in known))
    if workers == 1:
        work(search)
    else:
        _start_workers(search, workers, devices)
    study = _study(search)
    done = _finished(study)
    if not any(
        trial.value is not None and trial.state.name == "COMPLETE" for trial in done
    ):
        raise RunError(f"no trial came to its end; the logs are in {search.folder}")
    outcome = write_outcome(search.folder, search.config, search.overrides, study)
    sys.stdout.write("".join(f"{line}\n" for line in outcome.lines))
    on_result(outcome.to_dict())
    return 0


def work(search: Search) -> None:
    """Run trials until as many are done as were asked for. Several processes may do this at once."""
    optuna = _optuna()
    known = read_space(search.folder)
    study = _study(search)
    num_failed = 0
    # The second bound ends a search whose values all fail. Failed trials are not taken, so others are made in their
    # place.
    while len(_taken(study)) < search.num_trials and num_failed < search.num_trials:
        trial = study.ask()
        if (
            sum(earlier.number <= trial.number for earlier in _taken(study))
            > search.num_trials
        ):
            study.tell(
                trial, state=optuna.trial.TrialState.FAIL
            )  # another process was faster
            break
        try:
            value = _train(search, known, trial)
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            sys.stdout.write(
                f"trial {trial.number}: stopped early {_shown(trial.params)}\n"
            )
        except (
            RunError,
            UserError,
        ) as error:  # values that do not go together, or a loss that is not finite
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            num_failed += 1
            sys.stdout.write(
                f"trial {trial.number}: failed {_shown(trial.params)}: {error}\n"
            )
        else:
            study.tell(trial, value)
            sys.stdout.write(
                f"trial {trial.number}: {value:.4f} {_shown(trial.params)}\n"
            )
        sys.stdout.flush()


def read_space(folder: Path) -> list[Range]:
    """Return the ranges that the search began with."""
    return [from_plain(load) for load in read_json_object(folder / SPACE)["ranges"]]


def _begin(search: Search) -> list[Range]:
    """Run the config as it is, which is the first trial and tells what `auto` comes to; or go on with a search."""
    optuna = _optuna()
    place = search.folder / SPACE
    asked = {
        "config": load_config(search.config, search.overrides).to_dict(),
        "options": list(search.options),
    }
    if place.exists():
        before = read_json_object(place)
        if {name: before.get(name) for name in asked} != asked:
            raise UserError(
                f"{search.folder} holds a search over another config or other options: choose another --output"
            )
        study = _study(search)
        for trial in study.get_trials(
            deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)
        ):
            # Of a search that was killed: nobody runs it any more.
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        sys.stdout.write(
            f"going on with the search in {search.folder}: {len(_finished(study))} trials are done\n"
        )
        return read_space(search.folder)
    # space.json is written last, so a journal without it is that of a search killed during trial 0.
    (search.folder / JOURNAL).unlink(missing_ok=True)
    sys.stdout.write("trial 0: the config as it is\n")
    seen, result = _run(search, 0, {}, None)
    search_ranges = ranges(load_config(result / "config.yaml"), search.options)
    study = _study(search)
    study.add_trial(
        optuna.trial.create_trial(
            params={entry.option: entry.start for entry in search_ranges},
            distributions={
                entry.option: _distribution(optuna, entry) for entry in search_ranges
            },
            value=max(seen),
            intermediate_values={
                number: max(seen[: number + 1]) for number in range(len(seen))
            },
        )
    )
    sys.stdout.write(f"trial 0: {max(seen):.4f}\n")
    place.write_text(
        json.dumps(
            asked | {"ranges": [entry.as_plain() for entry in search_ranges]}, indent=1
        ),
        "utf-8",
    )
    return search_ranges


def _distribution(optuna: ModuleType, option_range: Range) -> Any:
    if option_range.choices:
        return optuna.distributions.CategoricalDistribution(list(option_range.choices))
    return optuna.distributions.FloatDistribution(
        option_range.low, option_range.high, log=True
    )


def _train(search: Search, known: Sequence[Range], trial: Any) -> float:
    optuna = _optuna()
    values = {entry.option: entry.suggest(trial) for entry in known}
    seen, _ = _run(search, trial.number, values, trial)
    # Asked again: the run has ended without a word on why.
    if trial.should_prune():
        raise optuna.TrialPruned
    return max(seen)


def _run(
    search: Search, number: int, values: Mapping[str, Any], trial: Any
) -> tuple[list[float], Path]:
    """Train once; return the scores of the evaluations, and the folder. `trial` hears of each and may end the run."""
    from vembed.training.hooks.callbacks import STOP, EvaluationInfo
    from vembed.training.run import train

    folder = search.folder / f"trial-{number}"
    seen: list[float] = []

    def on_evaluation(info: EvaluationInfo) -> str | None:
        if info.step == 0:
            return None
        seen.append(info.scores[info.metric])
        if trial is None:
            return None
        # The number of the evaluation, not the step: batch sizes differ.
        trial.report(max(seen), len(seen) - 1)
        return STOP if trial.should_prune() else None

    config = load_config(
        search.config, search.overrides
    )  # with options that a trial sets too
    args = [
        *QUIETLY,
        f"output_dir={folder}",
        *(f"{name}={value}" for name, value in values.items()),
    ]
    try:
        train(config, args, on_evaluation=on_evaluation)
    except Stopped as stopped:
        for checkpoint in folder.glob("checkpoint-*"):  # no trial is resumed
            shutil.rmtree(checkpoint, ignore_errors=True)
        if stopped.signum:
            raise _interrupted(stopped.signum, f"in trial {number}") from None
        if not seen:
            raise RunError(
                "max_train_minutes: the time was up before the first evaluation"
            ) from None
    shutil.rmtree(folder / "final", ignore_errors=True)
    return seen, folder


def _interrupted(signum: int, where: str) -> Stopped:
    return Stopped(
        f"{signal.Signals(signum).name}: stopped {where}; the same command goes on with the search",
        signum,
    )


def _start_workers(search: Search, workers: int, devices: int) -> None:
    """Start the processes, one for each GPU that is used, and wait for them."""
    command = [
        sys.executable,
        "-m",
        "vembed",
        "tune",
        search.config,
        "--trials",
        str(search.num_trials),
        "--output",
        str(search.folder),
        *_flags(search),
    ]
    running = []
    for number in range(workers):
        worker_env = {**os.environ, WORKER: str(number)}
        if devices:
            # Some of the GPUs may be given by the user; "".split(",") is [""].
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            worker_env["CUDA_VISIBLE_DEVICES"] = (
                visible[number % devices] if any(visible) else str(number % devices)
            )
        else:
            # Processes that each take all cores are slower than one after the other.
            worker_env.setdefault(
                "OMP_NUM_THREADS", str(max(num_cores() // workers, 1))
            )
        running.append(subprocess.Popen(command, env=worker_env))
    with _forwarded(running) as received:
        codes = [process.wait() for process in running]
    if received:
        raise _interrupted(received[0], f"with {workers} trials at once")
    if any(codes):
        raise RunError(
            f"{sum(map(bool, codes))} of {workers} processes of the search failed; run it again to go on"
        )


@contextmanager
def _forwarded(
    running: Sequence[subprocess.Popen[bytes]],
) -> Iterator[list[signal.Signals]]:
    """Forward signals to the processes while the with-block runs. Give a list of those that were received."""
    received: list[signal.Signals] = []

    def handle(signum: int, _frame: object) -> None:
        received.append(signal.Signals(signum))
        for process in running:
            process.send_signal(signum)

    before = {
        number: signal.signal(number, handle)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _flags(search: Search) -> list[str]:
    flags = ["--seed", str(search.seed)]
    flags += ["--options", ",".join(search.options)] if search.options else []
    return [*flags, *search.overrides]


def _study(search: Search) -> Any:
    optuna = _optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    number = int(os.environ.get(WORKER, "0"))
    journal = search.folder / JOURNAL
    require_regular(journal, "--output")
    try:
        storage = JournalStorage(JournalFileBackend(str(journal)))
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{journal} is damaged ({error}): restore it, or choose another --output"
        ) from error
    study = optuna.create_study(
        study_name=STUDY,
        storage=storage,
        pruner=optuna.pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=REDUCTION
        ),
        direction="maximize",
        load_if_exists=True,
    )
    # Each process, and each start of a search that goes on, draws its own first guesses, and what runs already counts
    # as bad: no two try the same.
    seed = (
        search.seed + number + SEEDS_OF_A_TRIAL * len(study.get_trials(deepcopy=False))
    )
    study.sampler = optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=6, constant_liar=True
    )
    return study


def _finished(study: Any) -> list[Any]:
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name in ("COMPLETE", "PRUNED")
    ]


def _taken(study: Any) -> list[Any]:
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name in ("COMPLETE", "PRUNED", "RUNNING")
    ]


def _plan(
    search: Search, known: list[Range], auto: str, workers: int, devices: int
) -> str:
    where = f"{workers} GPU(s)" if devices else f"{workers} process(es) on the CPU"
    lines = [
        f"trials: {search.num_trials}, the first one the config as it is, on {where}, one trial each",
        f"options{auto}:",
        *(f"  {option}" for option in known),
        f"stopped early: of the trials at an evaluation, two thirds (successive halving by {REDUCTION})",
        f"written: {search.folder}/best.yaml, importance.svg and .png, trials.json, {JOURNAL}",
    ]
    return "\n".join(lines) + "\n"


def _shown(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value:.3g}" for name, value in params.items())


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise UserError(
            f"vembed tune needs optuna ({error}): pip install 'vembed[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search_ranges: ModuleType = optuna
    return search_ranges
