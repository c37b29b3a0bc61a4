"""run_stages(): the steps of a config in order, each in a folder of its own; what is done stays done."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vembed.cli.commands.train import result_of, run_train
from vembed.config.aliases import option_of
from vembed.config.arguments import TrainArguments
from vembed.config.layers import shared_layer
from vembed.config.loading import resolve_run
from vembed.config.paths import require_paths
from vembed.config.stages import MINED, Pipeline, Step, read_pipeline
from vembed.errors import RunError, UserError
from vembed.files import read_json_object
from vembed.pipelines.stages.checks import check_options, located
from vembed.pipelines.stages.estimates import pipeline_table
from vembed.pipelines.stages.fingerprint import of_options, of_training
from vembed.pipelines.stages.requirements import check_requirements
from vembed.pipelines.stages.stages_report import write_report

STATE_FILE = "stage.json"
"""In the folder of each step: its fingerprint, and whether it is done."""
SCORES_FILE = "scores.json"
SHARED_WITHIN = 60.0
"""Seconds after which every process must see what rank 0 has written."""

Verb = Callable[[str, Sequence[str]], int]
"""Runs `vembed VERB WORDS` in this process and returns its exit code."""
Check = Callable[[str, Sequence[str]], str | None]
"""Returns what is wrong with `vembed VERB WORDS`, which it does not run."""
Train = Callable[[TrainArguments], int]
"""Runs one training stage and returns its exit code."""


@dataclass(frozen=True)
class StageRange:
    """The steps of a pipeline that are run."""

    only: str | None = None
    first: str | None = None
    last: str | None = None


def pipeline_of_arguments(arguments: TrainArguments) -> Pipeline | None:
    """Return the steps that these arguments ask for; None where it is one training: no stages, or one by name."""
    if arguments.config is None and arguments.mapping is None:
        return None
    pairs = _pairs(arguments.overrides)
    root = next((value for option, value, _ in pairs if option == "output_dir"), None)
    named = arguments.stage or next(
        (value for option, value, _ in pairs if option == "stage"), None
    )
    pipeline = read_pipeline(arguments.source, root)
    if pipeline is None or (named is not None and _is_training(pipeline, named)):
        return None
    return pipeline


def run_stages(
    pipeline: Pipeline,
    arguments: TrainArguments,
    command_name: Verb,
    check: Check,
    env: Mapping[str, str] = os.environ,
    *,
    starts_processes: bool,
    train: Train | None = None,
) -> int:
    """Run the steps and return the exit code of the first that fails, or 0. All are checked before one is run.

    A step is skipped if it is done and nothing that it depends on has changed. A training that was stopped goes on
    where it stood. Under a launcher all ranks run this; otherwise each training starts its own processes. `train`: runs
    a training in place of the command's way.
    """
    prints: dict[str, str] = {}
    chosen = _chosen(
        pipeline,
        StageRange(arguments.stage, arguments.first_stage, arguments.last_stage),
    )
    stages = [
        _Stage(pipeline, step, arguments, command_name, env, starts_processes, train)
        for step in pipeline.steps
    ]
    for stage in stages:
        if stage.step in chosen:
            stage.check(
                check
            )  # a mistake in the last step must not come out after days of training
    for step, stage in zip(pipeline.steps, stages, strict=True):
        # Also of steps that are not run: those behind them depend on it.
        prints[step.name] = stage.fingerprint(prints)
        if step not in chosen:
            continue
        if arguments.is_dry_run:
            sys.stdout.write(f"==== {step.name} ({step.kind}) in {stage.folder}\n")
            code = stage.dry_run()
        else:
            code = stage.run(prints[step.name])
        if code:
            return code
    if arguments.is_dry_run:
        sys.stdout.write(pipeline_table(pipeline, arguments, env))
    elif _is_main(env):
        path = write_report(pipeline, STATE_FILE)
        _say(f"stages: all done; report: {path}", env)
    return 0


def results_of(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return the result of each training that has finished, in order, as JSON values."""
    folders = [
        (step.name, pipeline.folder(step.name))
        for step in pipeline.steps
        if step.kind == "train"
    ]
    return [
        {"stage": name, **result_of(folder)}
        for name, folder in folders
        if (folder / "final").is_dir()
    ]


class _Stage:
    """One step of a pipeline, with what it takes to run it."""

    def __init__(
        self,
        pipeline: Pipeline,
        step: Step,
        arguments: TrainArguments,
        command_name: Verb,
        env: Mapping[str, str],
        starts_processes: bool,
        train: Train | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.step = step
        self.folder = pipeline.folder(step.name)
        self.verb = command_name
        self.env = env
        self.starts_processes = starts_processes
        self.train = train
        self.given = arguments
        self.arguments = replace(
            arguments,
            stage=step.name,
            first_stage=None,
            last_stage=None,
            overrides=self._overrides(arguments),
        )

    def check(self, check: Check) -> None:
        """Raise UserError where this step cannot work, as far as can be told before the steps before it have run."""
        name = self.step.name
        made = [self.pipeline.folder(step.name) for step in self.pipeline.before(name)]
        if self.step.kind == "train":
            run = resolve_run(
                self.arguments.source,
                self.arguments.overrides,
                stage=name,
                env=self.env,
            )
            if not self.arguments.is_dry_run:
                require_paths(run.config.model, run.config.data, run.origins, made)
            return
        check_options(self.pipeline, self.step, self.options(), made)
        problem = check(*self._words())
        if problem is not None:
            raise UserError(f"{self.pipeline.source}: stage {name}: {problem}")

    def options(self) -> dict[str, Any]:
        """Return the options of a step between, with paths that are found beside the config file."""
        return located(self.step.options(), self.arguments.config)

    def fingerprint(self, known: Mapping[str, str]) -> str:
        """Return what this step depends on. `known`: the fingerprints of the steps before it."""
        before = self.pipeline.model_before(self.step.name)
        if self.step.kind != "train":
            return of_options(
                self.options(),
                [known[step.name] for step in self.pipeline.before(self.step.name)],
            )
        run = resolve_run(
            self.arguments.source,
            self.arguments.overrides,
            stage=self.step.name,
            env=self.env,
        )
        mined = self.pipeline.mined_before(self.step.name)
        start = (
            None
            if before is None or self.step.option("model_name") is not None
            else known[before.name]
        )
        fingerprint = of_training(
            run.config, start, self._world_size(run.processes.value, run.machines.value)
        )
        # Mined data are made anew with the step that mines them; their file need not be there yet.
        return (
            fingerprint
            if mined is None
            else of_options({"training": fingerprint}, [known[mined.name]])
        )

    def run(self, fingerprint: str) -> int:
        """Run the step unless it is done, and remember that it is."""
        state = self._state()
        if state.get("fingerprint") == fingerprint and state.get("state") == "done":
            _say(
                f"stage {self.step.name}: done already (nothing that it depends on has changed)",
                self.env,
            )
            return 0
        if state and state.get("fingerprint") != fingerprint and _is_main(self.env):
            aside = _aside(self.folder)
            self.folder.rename(aside)
            _say(
                f"stage {self.step.name}: what it depends on has changed; the old one is now {aside}",
                self.env,
            )
        _say(f"stage {self.step.name}: {self.step.kind} in {self.folder}", self.env)
        began = time.time()
        # "started" is noted first: a step that is killed is not done, and a start with another fingerprint moves its
        # folder away.
        self._write(
            {"fingerprint": fingerprint, "state": "started", "kind": self.step.kind}
        )
        self._wait_for_rank_0(fingerprint)
        result: dict[str, Any] = {}
        if self.step.kind == "train" and self.train is not None:
            code = self.train(self.arguments)
        elif self.step.kind == "train":
            code = run_train(
                self.arguments, self.env, starts_processes=self.starts_processes
            )
        else:
            code, result = self._between()
        if code == 0:
            done = {
                "fingerprint": fingerprint,
                "state": "done",
                "kind": self.step.kind,
                **result,
            }
            self._write({**done, "seconds": round(time.time() - began, 1)})
        return code

    def dry_run(self) -> int:
        """Print what would be done."""
        if self.step.kind == "train":
            return run_train(
                self.arguments, self.env, starts_processes=self.starts_processes
            )
        command_name, args = self._words()
        sys.stdout.write(f"would run: vembed {command_name} {' '.join(args)}\n")
        return 0

    # ---- steps between -------------------------------------------------------------------------------------------

    def _between(self) -> tuple[int, dict[str, Any]]:
        if (
            self.step.kind == "merge"
            and _is_main(self.env)
            and (self.folder / "final").exists()
        ):
            raise UserError(
                f"{self.folder / 'final'} exists already; remove it, or give the merge another name"
            )
        command_name, args = self._words()
        path = self.folder / {"mine": MINED, "merge": "final/merge.json"}.get(
            self.step.kind, SCORES_FILE
        )
        if _is_main(self.env):
            path.unlink(
                missing_ok=True
            )  # of an earlier start: nobody may take it for the result
        code = self.verb(command_name, args)
        if code == 0:
            self._wait_for(path)
        if code or self.step.kind != "evaluate":
            return code, {}
        scores = read_json_object(path)
        required = self.options().get("require", {})
        problem = check_requirements(scores, required)
        if problem:
            raise RunError(
                f"stage {self.step.name}: {problem}; the stages after it are not run"
            )
        return 0, {"scores": scores}

    def _words(self) -> tuple[str, list[str]]:
        """Return the verb of a step between, and its words."""
        options = self.options()
        if self.step.kind == "mine":
            # `vembed mine` takes options as key=value, and only the launcher's as flags.
            flags = _flags({"nproc": options.pop("nproc", None)})
            options = {
                **self._mined_by(options),
                **options,
                "output_path": str(self.folder / MINED),
            }
            return "mine", [
                f"{key}={_word(value)}"
                for key, value in options.items()
                if value is not None
            ] + flags
        if self.step.kind == "evaluate":
            data = options.pop("data", None)
            named_model = options.pop("model", None)
            options.pop("require", None)
            if data is None:
                raise UserError(f"stage {self.step.name}: evaluate needs data")
            flags = _flags(options)
            return "eval", [
                self._place(named_model) or self._model(),
                data,
                "--json",
                str(self.folder / SCORES_FILE),
                *flags,
            ]
        models = options.pop("models", None)
        if models is None:
            models = [
                step.name
                for step in self.pipeline.before(self.step.name)
                if step.kind == "train"
            ]
        places = [self._run_or_model(model, "last" in options) for model in models]
        return "merge", [
            *places,
            "--output",
            str(self.folder / "final"),
            *_flags(options),
        ]

    def _mined_by(self, options: Mapping[str, Any]) -> dict[str, str]:
        # The model that the config starts from is no answer where the step names its own.
        return (
            {}
            if "retrievers" in options or "model_name" in options
            else {"model_name": self._model()}
        )

    def _model(self) -> str:
        """Return the model of the last step before this one that leaves one, else the config's own."""
        before = self.pipeline.model_before(self.step.name)
        if before is not None:
            return str(self.pipeline.folder(before.name) / "final")
        named_models = [
            value
            for key, value, _ in _pairs(self.given.overrides)
            if key == "model_name"
        ]
        start_model = shared_layer(self.given.source).values.get("model_name")
        if not named_models and start_model is None:
            raise UserError(
                f"{self.pipeline.source}: stage {self.step.name}: no step before it leaves a model, and the config has no "
                "model_name to begin with"
            )
        return (
            named_models[-1]
            if start_model is None or named_models
            else str(start_model.value)
        )

    def _place(self, name: str | None) -> str | None:
        """Return the model of a stage by its name; any other name as it is."""
        known = {
            step.name for step in self.pipeline.before(self.step.name) if step.has_model
        }
        return str(self.pipeline.folder(name) / "final") if name in known else name

    def _run_or_model(self, name: str, takes_run: bool) -> str:
        place = self._place(name)
        return (
            str(self.pipeline.folder(name))
            if takes_run and place != name
            else str(place)
        )

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _overrides(self, arguments: TrainArguments) -> tuple[str, ...]:
        """Return the overrides of a training: those of the command line, with a moved root divided among the stages."""
        pairs = _pairs(arguments.overrides)
        before = self.pipeline.model_before(self.step.name)
        # A model that the command line names is the one that the first stage starts from.
        left = (
            ("output_dir", "stage")
            if before is None
            else ("output_dir", "stage", "model_name")
        )
        kept = [text for option, _, text in pairs if option not in left]
        if (
            any(option == "output_dir" for option, _, _ in pairs)
            and self.step.kind == "train"
        ):
            if before is not None and self.step.option("model_name") is None:
                kept.append(f"model_name={self.pipeline.folder(before.name) / 'final'}")
            mined = self.pipeline.mined_before(self.step.name)
            if mined is not None and self.step.option("data_path") is None:
                kept.append(f"data_path={self.pipeline.folder(mined.name) / MINED}")
            kept.append(f"output_dir={self.folder}")
        if not any(option == "resume" for option, _, _ in pairs):
            kept.append(
                "resume=auto"
            )  # a stage that was stopped goes on; its folder is of this very fingerprint
        return tuple(kept)

    def _world_size(self, num_processes: Any, num_machines: int) -> int:
        if self.env.get("WORLD_SIZE"):
            return int(self.env["WORLD_SIZE"])
        return int(num_processes) * num_machines if num_processes != "auto" else 1

    def _wait_for_rank_0(self, fingerprint: str) -> None:
        """Wait until rank 0 has noted the start: no rank may write into the folder before an old one is moved away."""
        deadline = time.monotonic() + SHARED_WITHIN
        while self._state().get("fingerprint") != fingerprint:
            if time.monotonic() > deadline:
                raise UserError(
                    f"output_dir: {self.folder} is not the same folder for all processes; give one on a file system "
                    "that all machines share"
                )
            time.sleep(0.05)

    def _wait_for(self, path: Path) -> None:
        """Wait for a file that rank 0 writes and all read: under a launcher the others may be here before it has."""
        deadline = time.monotonic() + SHARED_WITHIN
        while (
            not (path.is_file() and path.stat().st_size) and time.monotonic() < deadline
        ):
            time.sleep(0.05)

    def _state(self) -> dict[str, Any]:
        path = self.folder / STATE_FILE
        return read_json_object(path) if path.exists() else {}

    def _write(self, state: Mapping[str, Any]) -> None:
        if _is_main(self.env):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / STATE_FILE
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            partial.replace(path)


def _chosen(pipeline: Pipeline, asked: StageRange) -> list[Step]:
    names = [step.name for step in pipeline.steps]
    for flag, name in (
        ("--stage", asked.only),
        ("--from", asked.first),
        ("--until", asked.last),
    ):
        if name is not None and name not in names:
            raise UserError(
                f"{flag} {name}: {pipeline.source} has the stages {', '.join(names)}"
            )
    if asked.only is not None:
        if asked.first is not None or asked.last is not None:
            raise UserError(
                "--stage runs one stage alone: leave out --from and --until"
            )
        return [pipeline.steps[names.index(asked.only)]]
    first = names.index(asked.first) if asked.first else 0
    last = names.index(asked.last) if asked.last else len(names) - 1
    if first > last:
        raise UserError(
            f"--from {asked.first} stands after --until {asked.last} in {pipeline.source}"
        )
    return list(pipeline.steps[first : last + 1])


def _is_training(pipeline: Pipeline, name: str) -> bool:
    # A name that no step has counts as one: the training refuses it with the names that there are.
    return all(step.kind == "train" for step in pipeline.steps if step.name == name)


def _aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return aside


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the option of each word, whichever of its names is written, its value, and the word."""
    args = [(*text.partition("="), text) for text in overrides]
    return [(option_of(key) or key, value, text) for key, _, value, text in args]


def _flags(options: Mapping[str, Any]) -> list[str]:
    args: list[str] = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            args.append(flag)
        elif value is not None and value is not False:
            args += [flag, _word(value)]
    return args


def _word(value: Any) -> str:
    """Return a value as a word of the command line: lists of plain values with commas, the rest as JSON."""
    if isinstance(value, list) and all(
        isinstance(step, int | float | str) for step in value
    ):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _is_main(env: Mapping[str, str]) -> bool:
    return env.get("RANK", "0") == "0"


def _say(line: str, env: Mapping[str, str]) -> None:
    if _is_main(env):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
