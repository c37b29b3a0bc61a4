"""`vembed tune`: trials of a config with other values of a few options, stopped early where they do badly.

The study is a journal in the search's folder, to which each trial is added as it happens: a search that was stopped
goes on with the trials that are missing, and several processes share it, one trial each at a time.
"""

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from vembed.cli.support import Result, print_lines
from vembed.config.decisions import rate_of
from vembed.config.loading import config_yaml, load_config, resolve_run
from vembed.config.schema import TrainConfig
from vembed.config.terms import loss_terms
from vembed.errors import RunError, Stopped, UserError, require_package
from vembed.files import require_regular, write_json
from vembed.parallel.environment import num_cores
from vembed.parallel.launch import STOPPED_CODES, num_visible_devices, run_ranks

OPTIONS = (
    "learning_rate",
    "temperature",
    "batch_size",
    "warmup_steps",
    "weight_decay",
    "lora_r",
)
"""Options that can be searched, those that usually matter most first."""
JOURNAL = "journal.log"
TRIALS = "trials.json"
BEST = "best.yaml"
STUDY = "vembed"
WORKER = "VEMBED_TUNE_WORKER"
"""Variable with the number of a process that was started to share a search."""
TRIAL_OPTIONS = (
    "console=quiet",
    "report_to=none",
    "overwrite=true",
    "resume=false",
    "save_steps=null",
    "load_best_model_at_end=false",
    "patience=null",
    "guards=null",
)
"""A trial is scored by its best evaluation, and its weights are not kept. Guards choose among checkpoints."""
SEEDS_OF_A_TRIAL = 1_000
"""Distance between the seeds of two starts of a search, by the trials that each finds."""
RATE_RATIO = 8
"""Learning rates are searched up to this factor above and below that of the first trial."""
REDUCTION = 3
"""Successive halving: of the trials that have come to an evaluation, a third goes on to three times as many."""

OptionNumber = float | int


@dataclass(frozen=True)
class Search:
    """Options that are searched, and the folder of the search."""

    config: str
    overrides: tuple[str, ...]
    folder: Path
    num_trials: int
    options: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Range:
    """Values of one option: all between two limits, by ratio, or a few."""

    option: str
    start: OptionNumber
    """Value of the first trial, which is the run without a search."""
    low: float = 0.0
    high: float = 0.0
    choices: Sequence[OptionNumber] = ()

    @property
    def distribution(self) -> Any:
        """The values for optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        return FloatDistribution(self.low, self.high, log=True)

    def __str__(self) -> str:
        if self.choices:
            values = ", ".join(f"{choice:g}" for choice in self.choices)
            return f"{self.option}: {values} (first {self.start:g})"
        return f"{self.option}: {self.low:.3g} to {self.high:.3g}, by ratio (first {self.start:.3g})"


def run_tune(
    search: Search,
    *,
    nproc: int = 0,
    is_dry_run: bool = False,
) -> Result | None:
    """Search, or go on with a search, and write the best config. Return the result; None for a dry run."""
    require_package("optuna", "search")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if WORKER in os.environ:
        # The number for the launcher: each worker trains on its own.
        os.environ.pop("RANK", None)
        _work(search)
        return None
    if search.folder.is_file():
        raise UserError(f"--output {search.folder} is a file; give a folder")
    config = resolve_run(search.config, search.overrides).config
    if not config.data.has_validation:
        raise UserError(
            "vembed tune compares trials on validation data, and the config has none: give val_data_path, or "
            "val_split: 0.1"
        )
    num_devices = num_visible_devices()
    num_workers = min(nproc or max(num_devices, 1), search.num_trials)
    is_auto = config.optimizer.learning_rate == "auto"
    if is_auto:
        # Some number: what `auto` comes to is known when the model is loaded.
        config = config.changed(learning_rate=1e-4)
    # A mistake in the options is found before the first trial.
    planned = ranges(config, search.options)
    if is_dry_run:
        listed = [f"  {entry}" for entry in planned]
        if is_auto and planned[0].option == "learning_rate":
            listed[0] = (
                f"  learning_rate: an eighth to {RATE_RATIO} times that of the first trial, by ratio (auto)"
            )
        print_lines(
            f"trials: {search.num_trials}, the first one the config as it is, {num_workers} at once",
            "options:",
            *listed,
            f"a run writes: {search.folder}/{BEST}, {TRIALS}, {JOURNAL}",
        )
        return None
    search.folder.mkdir(parents=True, exist_ok=True)
    _begin(search)
    if num_workers == 1:
        _work(search)
    else:
        _run_workers(search, num_workers, num_devices)
    return _write_outcome(search)


def ranges(config: TrainConfig, names: Sequence[str] = ()) -> list[Range]:
    """Return the ranges of the named options, by default of all that have an effect. `config`: that of the first trial,
    with numbers in place of `auto`."""
    for name in names:
        if name not in OPTIONS:
            raise UserError(f"--options {name}: it can search {', '.join(OPTIONS)}")
    # Ranges are ratios around what the config has: three doublings of the rate; temperatures stay where a softmax is
    # neither one-hot nor flat.
    rate = rate_of(config.optimizer)
    all_ranges = [Range("learning_rate", rate, rate / RATE_RATIO, rate * RATE_RATIO)]
    objective = config.objective
    start = loss_terms(objective, config.model.model_name)[0].temperature
    if objective.losses is None and start is not None:
        low = min(max(start / 5, 0.005), start)
        high = max(min(start * 4, 1.0), start)
        all_ranges.append(Range("temperature", start, low, high))
    size = config.batch.batch_size
    warmup = config.optimizer.warmup_steps
    decay = config.optimizer.weight_decay
    rank = config.adapters.lora_r
    # The first one is that of the config.
    choices: dict[str, list[OptionNumber]] = {}
    if config.batch.global_batch_size is None:
        choices["batch_size"] = [size, max(size // 2, 8), size * 2, size * 4]
    if isinstance(warmup, float):
        choices["warmup_steps"] = [warmup, 0.0, 0.1, 0.3]
    choices["weight_decay"] = [decay, 0.0, 0.01, 0.1]
    if config.adapters.use_lora:
        choices["lora_r"] = [rank, 4, 16, 64]
    for name, values in choices.items():
        all_ranges.append(Range(name, values[0], choices=sorted(set(values))))
    chosen = [entry for entry in all_ranges if not names or entry.option in names]
    if not chosen:
        raise UserError(
            f"--options {','.join(names)} has no effect on this run: choose others of {', '.join(OPTIONS)}"
        )
    return chosen


def _begin(search: Search) -> None:
    """Run the config as it is, which is the first trial and tells what `auto` comes to; or go on with a search."""
    from optuna.trial import TrialState, create_trial

    asked = {
        "config": load_config(search.config, search.overrides).to_dict(),
        "options": list(search.options),
    }
    journal = search.folder / JOURNAL
    study = _study(search) if journal.exists() else None
    if study is not None and study.user_attrs:
        if study.user_attrs["asked"] != asked:
            raise UserError(
                f"{search.folder} holds a search over another config or other options: choose another --output"
            )
        # Of a search that was killed: nobody runs them any more.
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
        num_done = len(_trials(study))
        print_lines(
            f"going on with the search in {search.folder}: {num_done} trials are done"
        )
        return
    # What is asked is written last, so a journal without it is that of a search killed during trial 0.
    journal.unlink(missing_ok=True)
    print_lines("trial 0: the config as it is")
    scores, folder = _run(search, 0, {}, None)
    space = ranges(load_config(folder / "config.yaml"), search.options)
    study = _study(search)
    study.add_trial(
        create_trial(
            params={entry.option: entry.start for entry in space},
            distributions={entry.option: entry.distribution for entry in space},
            value=max(scores),
            # The best score up to each evaluation.
            intermediate_values=dict(enumerate(accumulate(scores, max))),
        )
    )
    print_lines(f"trial 0: {max(scores):.4f}", *(f"  {entry}" for entry in space))
    study.set_user_attr("asked", asked)


def _work(search: Search) -> None:
    """Run trials until as many are done as were asked for. Several processes may do this at once."""
    from optuna import TrialPruned
    from optuna.trial import TrialState

    study = _study(search)
    distributions = study.get_trials(deepcopy=False)[0].distributions
    num_failed = 0
    # This bound ends a search whose values all fail. Failed trials are not taken, so others are made in their place.
    while (
        num_failed < search.num_trials
        and len(_trials(study, "RUNNING")) < search.num_trials
    ):
        trial = study.ask(distributions)
        started = [
            earlier
            for earlier in _trials(study, "RUNNING")
            if earlier.number <= trial.number
        ]
        if len(started) > search.num_trials:  # another process was faster
            study.tell(trial, state=TrialState.FAIL)
            break
        values = {name: _rounded(value) for name, value in trial.params.items()}
        text = ", ".join(f"{name}={value:.3g}" for name, value in values.items())
        try:
            scores, _ = _run(search, trial.number, values, trial)
            # Asked again: the run has ended without a word on why.
            if trial.should_prune():
                raise TrialPruned
        except TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
            outcome = f"stopped early {text}"
        except (RunError, UserError) as error:
            # Values that do not go together, or a loss that is not finite.
            study.tell(trial, state=TrialState.FAIL)
            num_failed += 1
            outcome = f"failed {text}: {error}"
        else:
            study.tell(trial, max(scores))
            outcome = f"{max(scores):.4f} {text}"
        print_lines(f"trial {trial.number}: {outcome}")


def _run(
    search: Search,
    number: int,
    values: Mapping[str, Any],
    trial: Any,
) -> tuple[list[float], Path]:
    """Train once; return the scores of the evaluations, and the folder. `trial` hears of each and may end the run."""
    from vembed.training.hooks.base import STOP, Callbacks, Evaluation
    from vembed.training.trainer import train_run

    folder = search.folder / f"trial-{number}"
    scores = []

    def on_evaluation(info: Evaluation) -> str | None:
        if info.step == 0:
            return None
        scores.append(info.scores[info.metric])
        if trial is None:
            return None
        # The number of the evaluation, not the step: batch sizes differ.
        trial.report(max(scores), len(scores) - 1)
        return STOP if trial.should_prune() else None

    # With options that a trial sets too.
    config = load_config(search.config, search.overrides)
    options = [f"{name}={value}" for name, value in values.items()]
    overrides = [*TRIAL_OPTIONS, f"output_dir={folder}", *options]
    try:
        train_run(resolve_run(config, overrides), [Callbacks(None, on_evaluation)])
    except Stopped as stopped:
        for checkpoint in folder.glob("checkpoint-*"):  # no trial is resumed
            shutil.rmtree(checkpoint, ignore_errors=True)
        if stopped.signum:
            raise _interrupted(stopped.signum, f"in trial {number}") from None
        if not scores:
            raise RunError(
                "max_train_minutes: the time was up before the first evaluation"
            ) from None
    shutil.rmtree(folder / "final", ignore_errors=True)
    return scores, folder


def _interrupted(signum: int, where: str) -> Stopped:
    name = signal.Signals(signum).name
    return Stopped(
        f"{name}: stopped {where}; the same command goes on with the search", signum
    )


def _run_workers(
    search: Search,
    num_workers: int,
    num_devices: int,
) -> None:
    """Run processes that share the search, one for each GPU that is used."""
    command = [sys.executable, "-m", "vembed", "tune", search.config]
    command += ["--trials", str(search.num_trials), "--output", str(search.folder)]
    command += ["--seed", str(search.seed), "--options", ",".join(search.options)]
    command += search.overrides
    # Some of the GPUs may be given by the user.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else list(map(str, range(num_devices)))
    environments = []
    for number in range(num_workers):
        env = {**os.environ, WORKER: str(number), "RANK": str(number)}
        if num_devices:
            env["CUDA_VISIBLE_DEVICES"] = devices[number % num_devices]
        else:
            # Processes that each take all cores are slower than one after the other.
            threads = max(num_cores() // num_workers, 1)
            env.setdefault("OMP_NUM_THREADS", str(threads))
        environments.append(env)
    code = run_ranks(command, environments)
    if code in STOPPED_CODES:
        raise _interrupted(code - 128, f"with {num_workers} trials at once")
    if code:
        raise RunError(
            f"a process of the search failed with exit code {code}; run it again to go on"
        )


def _study(search: Search) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

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
    number = int(os.environ.get(WORKER, "0"))
    num_trials = len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(
        seed=search.seed + number + SEEDS_OF_A_TRIAL * num_trials,
        n_startup_trials=6,
        constant_liar=True,
    )
    return study


def _trials(study: Any, *more_states: str) -> list[Any]:
    """Return the trials that are done, and those in further states."""
    states = ("COMPLETE", "PRUNED", *more_states)
    trials = study.get_trials(deepcopy=False)
    return [trial for trial in trials if trial.state.name in states]


def _write_outcome(search: Search) -> Result:
    """Write the best config as YAML and all trials as JSON. Return and print the result."""
    study = _study(search)
    trials = _trials(study)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    if not complete:
        raise RunError(f"no trial came to its end; the logs are in {search.folder}")
    best = max(complete, key=lambda trial: trial.value)
    first = trials[0]
    plain = [
        {
            "trial": trial.number,
            "state": trial.state.name.lower(),
            "score": trial.value,
            "options": trial.params,
            "scores": list(trial.intermediate_values.values()),
        }
        for trial in trials
    ]
    write_json(search.folder / TRIALS, plain)
    values = {}
    if best.number != first.number:
        values = {name: _rounded(value) for name, value in best.params.items()}
    # The search's trials have their own folders; the best config trains in that of the user's config.
    overrides = [f"{name}={value}" for name, value in values.items()]
    config = load_config(search.config, [*search.overrides, *overrides])
    best_config = search.folder / BEST
    head = f"# The best of {len(trials)} trials of {search.config}: {best.value:.4f}, and {first.value:.4f} without a search.\n"
    best_config.write_text(head + config_yaml(config), "utf-8")
    lines = [
        f"best: trial {best.number}, {best.value:.4f} ({best.value - first.value:+.4f} to the config as it is)"
    ]
    lines += [f"  {name}: {value:g}" for name, value in values.items()]
    print_lines(*lines, f"train with it: vembed train {best_config}")
    return {
        "best_config": best_config,
        "best_trial": best.number,
        "score": best.value,
        "score_without_search": first.value,
        "values": values,
        "trials": plain,
    }


def _rounded(value: OptionNumber) -> OptionNumber:
    """Return the value as the trial uses it."""
    return float(f"{value:.3g}") if isinstance(value, float) else value
