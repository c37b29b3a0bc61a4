"""run_stages(): the steps of a config in order, each in a folder of its own; what is done stays done."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vembed.cli.main import check_arguments, run_process
from vembed.cli.run_train import result_of, run_train
from vembed.cli.support import log_line
from vembed.config.aliases import option_of
from vembed.config.arguments import TrainArguments
from vembed.config.layers import shared_layer
from vembed.config.loading import resolve_run
from vembed.config.paths import require_paths
from vembed.config.resolved import ResolvedRun
from vembed.config.stages import MINED, Pipeline, Step, read_pipeline
from vembed.errors import RunError, UserError
from vembed.files import read_json_object, read_state_text
from vembed.pipelines.stages.checks import check_options, check_requirements, located
from vembed.pipelines.stages.estimates import pipeline_table
from vembed.pipelines.stages.fingerprint import of_options, of_training

STATE_FILE = "stage.json"
"""In the folder of each step: its fingerprint, and whether it is done."""
SCORES_FILE = "scores.json"
REPORT_FILE = "stages.md"
REPORTED_METRICS = ("ndcg@10", "mrr@10", "recall@10", "spearman")
SHARED_WITHIN_SECONDS = 60.0
"""Time after which every process must see what rank 0 has written."""


def pipeline_of_arguments(arguments: TrainArguments) -> Pipeline | None:
    """Return the steps that these arguments ask for; None where it is one training: no stages, or one by name."""
    if arguments.config is None and arguments.mapping is None:
        return None
    options = _by_option(arguments.overrides)
    pipeline = read_pipeline(arguments.source, options.get("output_dir"))
    name = arguments.stage or options.get("stage")
    if pipeline is None or name is None:
        return pipeline
    # A name that no step has counts as a training, which refuses it with the names that there are.
    kinds = [step.kind for step in pipeline.steps if step.name == name]
    return None if kinds in ([], ["train"]) else pipeline


def run_stages(
    pipeline: Pipeline,
    arguments: TrainArguments,
    *,
    starts_processes: bool,
    train: Callable[[TrainArguments], int] | None = None,
) -> int:
    """Run the steps and return the exit code of the first that fails, or 0. All are checked before one is run.

    A step is skipped if it is done and nothing that it depends on has changed. A training that was stopped goes on
    where it stood. Under a launcher all ranks run this; otherwise each training starts its own processes. `train`: runs
    a training in place of the command's way.
    """

    def train_by_command(stage_arguments: TrainArguments) -> int:
        return run_train(stage_arguments, starts_processes=starts_processes)[0]

    chosen = _chosen(pipeline, arguments)
    stages = [_Stage(pipeline, step, arguments) for step in pipeline.steps]
    for stage in stages:
        if stage.step in chosen:
            # A mistake in the last step must not come out after days of training.
            stage.check()
    fingerprints: dict[str, str] = {}
    for stage in stages:
        step = stage.step
        # Also of steps that are not run: those behind them depend on it.
        fingerprints[step.name] = stage.fingerprint(fingerprints)
        if step not in chosen:
            continue
        code = 0
        if not arguments.is_dry_run:
            code = stage.run(fingerprints[step.name], train or train_by_command)
        else:
            sys.stdout.write(f"==== {step.name} ({step.kind}) in {stage.folder}\n")
            if step.kind == "train":
                code = train_by_command(stage.arguments)
            else:
                name, args = stage.command()
                sys.stdout.write(f"would run: vembed {name} {' '.join(args)}\n")
        if code:
            return code
    if arguments.is_dry_run:
        sys.stdout.write(pipeline_table(pipeline, arguments))
    elif _is_main():
        log_line(f"stages: all done; report: {_write_report(pipeline)}")
    return 0


def results_of(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return the result of each training that has finished, in order, as JSON values."""
    results = []
    for step in pipeline.steps:
        folder = pipeline.folder(step.name)
        if step.kind == "train" and (folder / "final").is_dir():
            results.append({"stage": step.name, **result_of(folder)})
    return results


class _Stage:
    """One step of a pipeline, with what it takes to run it."""

    def __init__(
        self,
        pipeline: Pipeline,
        step: Step,
        arguments: TrainArguments,
    ) -> None:
        self.pipeline = pipeline
        self.step = step
        self.folder = pipeline.folder(step.name)
        self.before = pipeline.before(step.name)
        self.model_before = pipeline.model_before(step.name)
        self.all_arguments = arguments
        self.options = located(step.options(), arguments.config)
        """Of a step between; its paths may stand beside the config file."""
        self.arguments = replace(
            arguments,
            stage=step.name,
            first_stage=None,
            last_stage=None,
            overrides=self._overrides(arguments.overrides),
        )

    def check(self) -> None:
        """Raise UserError where this step cannot work, as far as can be told before the steps before it have run."""
        made = [self.pipeline.folder(step.name) for step in self.before]
        if self.step.kind == "train":
            run = self._resolve()
            if not self.arguments.is_dry_run:
                require_paths(run.config.model, run.config.data, run.origins, made)
            return
        check_options(self.pipeline, self.step, self.options, made)
        problem = check_arguments(*self.command())
        if problem is not None:
            raise UserError(
                f"{self.pipeline.source}: stage {self.step.name}: {problem}"
            )

    def fingerprint(self, known: Mapping[str, str]) -> str:
        """Return what this step depends on. `known`: the fingerprints of the steps before it."""
        if self.step.kind != "train":
            return of_options(self.options, [known[step.name] for step in self.before])
        run = self._resolve()
        start = None
        if self.model_before is not None and self.step.option("model_name") is None:
            start = known[self.model_before.name]
        world_size = 1
        if os.environ.get("WORLD_SIZE"):
            world_size = int(os.environ["WORLD_SIZE"])
        elif run.processes.value != "auto":
            world_size = int(run.processes.value) * run.machines.value
        fingerprint = of_training(run.config, start, world_size)
        mined = self.pipeline.mined_before(self.step.name)
        if mined is None:
            return fingerprint
        # Mined data are made anew with the step that mines them; their file need not be there yet.
        return of_options({"training": fingerprint}, [known[mined.name]])

    def run(self, fingerprint: str, train: Callable[[TrainArguments], int]) -> int:
        """Run the step unless it is done, and remember that it is."""
        name = self.step.name
        state = _read_state(self.folder)
        is_same = state.get("fingerprint") == fingerprint
        is_main = _is_main()
        if is_same and state.get("state") == "done":
            if is_main:
                log_line(
                    f"stage {name}: done already (nothing that it depends on has changed)"
                )
            return 0
        if is_main:
            if state and not is_same:
                number = 1
                while (aside := Path(f"{self.folder}.old-{number}")).exists():
                    number += 1
                self.folder.rename(aside)
                log_line(
                    f"stage {name}: what it depends on has changed; the old one is now {aside}"
                )
            log_line(f"stage {name}: {self.step.kind} in {self.folder}")
        began = time.time()
        # "started" is noted first: a step that is killed is not done, and a start with another fingerprint moves its
        # folder away.
        facts = {"fingerprint": fingerprint, "kind": self.step.kind}
        self._write_state({**facts, "state": "started"})
        # No rank may write into the folder before an old one is moved away.
        deadline = time.monotonic() + SHARED_WITHIN_SECONDS
        while _read_state(self.folder).get("fingerprint") != fingerprint:
            if time.monotonic() > deadline:
                raise UserError(
                    f"output_dir: {self.folder} is not the same folder for all processes; give one on a file system "
                    "that all machines share"
                )
            time.sleep(0.05)
        result: dict[str, Any] = {}
        if self.step.kind == "train":
            code = train(self.arguments)
        else:
            code, result = self._run_between()
        if code == 0:
            seconds = round(time.time() - began, 1)
            self._write_state({**facts, "state": "done", **result, "seconds": seconds})
        return code

    def command(self) -> tuple[str, list[str]]:
        """Return the command of a step between, and its arguments."""
        options = dict(self.options)
        if self.step.kind == "mine":
            # `vembed mine` takes options as key=value, and only the launcher's as flags.
            flags = _flags({"nproc": options.pop("nproc", None)})
            if "retrievers" not in options and "model_name" not in options:
                options["model_name"] = self._model()
            options["output_path"] = str(self.folder / MINED)
            pairs = [
                f"{key}={_as_word(value)}"
                for key, value in options.items()
                if value is not None
            ]
            return "mine", pairs + flags
        if self.step.kind == "evaluate":
            data = options.pop("data", None)
            name = options.pop("model", None)
            options.pop("require", None)
            if data is None:
                raise UserError(f"stage {self.step.name}: evaluate needs data")
            model = self._model() if name is None else self._model_named(name)
            target = str(self.folder / SCORES_FILE)
            return "eval", [model, data, "--json", target, *_flags(options)]
        names = options.pop("models", None)
        if names is None:
            names = [step.name for step in self.before if step.kind == "train"]
        models = []
        for name in names:
            model = self._model_named(name)
            if "last" in options and model != name:
                model = str(self.pipeline.folder(name))  # a run, with its checkpoints
            models.append(model)
        return "merge", [
            *models,
            "--output",
            str(self.folder / "final"),
            *_flags(options),
        ]

    def _run_between(self) -> tuple[int, dict[str, Any]]:
        final = self.folder / "final"
        is_main = _is_main()
        if self.step.kind == "merge" and is_main and final.exists():
            raise UserError(
                f"{final} exists already; remove it, or give the merge another name"
            )
        files = {"mine": MINED, "merge": "final/merge.json", "evaluate": SCORES_FILE}
        path = self.folder / files[self.step.kind]
        if is_main:
            # Of an earlier start: nobody may take it for the result.
            path.unlink(missing_ok=True)
        if code := run_process(*self.command()):
            return code, {}
        # Under a launcher the other ranks may be here before rank 0 has written it.
        deadline = time.monotonic() + SHARED_WITHIN_SECONDS
        while not (path.is_file() and path.stat().st_size):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if self.step.kind != "evaluate":
            return 0, {}
        scores = read_json_object(path)
        problem = check_requirements(scores, self.options.get("require", {}))
        if problem:
            raise RunError(
                f"stage {self.step.name}: {problem}; the stages after it are not run"
            )
        return 0, {"scores": scores}

    def _model(self) -> str:
        """Return the model of the last step before this one that leaves one, else the config's own."""
        if self.model_before is not None:
            return str(self.pipeline.folder(self.model_before.name) / "final")
        name = _by_option(self.all_arguments.overrides).get("model_name")
        start_model = shared_layer(self.all_arguments.source).values.get("model_name")
        if name is not None:
            return name
        if start_model is None:
            raise UserError(
                f"{self.pipeline.source}: stage {self.step.name}: no step before it leaves a model, and the config has no "
                "model_name to begin with"
            )
        return str(start_model.value)

    def _model_named(self, name: str) -> str:
        """Return the model of a stage by its name; any other name as it is."""
        if any(step.name == name and step.has_model for step in self.before):
            return str(self.pipeline.folder(name) / "final")
        return name

    def _overrides(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """Return the overrides of a training: those of the command line, with a moved root divided among the stages."""
        options = _by_option(overrides)
        left_out = ["output_dir", "stage"]
        if self.model_before is not None:
            # A model that the command line names is the one that the first stage starts from.
            left_out.append("model_name")
        kept = [text for text in overrides if _option_of(text) not in left_out]
        if "output_dir" in options and self.step.kind == "train":
            if self.model_before is not None and self.step.option("model_name") is None:
                kept.append(f"model_name={self._model()}")
            mined = self.pipeline.mined_before(self.step.name)
            if mined is not None and self.step.option("data_path") is None:
                kept.append(f"data_path={self.pipeline.folder(mined.name) / MINED}")
            kept.append(f"output_dir={self.folder}")
        if "resume" not in options:
            # A stage that was stopped goes on; its folder is of this very fingerprint.
            kept.append("resume=auto")
        return tuple(kept)

    def _resolve(self) -> ResolvedRun:
        arguments = self.arguments
        return resolve_run(arguments.source, arguments.overrides, stage=self.step.name)

    def _write_state(self, state: Mapping[str, Any]) -> None:
        if _is_main():
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / STATE_FILE
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            partial.replace(path)


def _chosen(pipeline: Pipeline, arguments: TrainArguments) -> list[Step]:
    names = [step.name for step in pipeline.steps]
    first = arguments.first_stage
    last = arguments.last_stage
    flags = {"--stage": arguments.stage, "--from": first, "--until": last}
    for flag, name in flags.items():
        if name is not None and name not in names:
            raise UserError(
                f"{flag} {name}: {pipeline.source} has the stages {', '.join(names)}"
            )
    if arguments.stage is not None:
        if first is not None or last is not None:
            raise UserError(
                "--stage runs one stage alone: leave out --from and --until"
            )
        return [pipeline.steps[names.index(arguments.stage)]]
    start = names.index(first) if first else 0
    stop = names.index(last) + 1 if last else len(names)
    if start >= stop:
        raise UserError(
            f"--from {first} stands after --until {last} in {pipeline.source}"
        )
    return list(pipeline.steps[start:stop])


def _write_report(pipeline: Pipeline) -> Path:
    """Write one report over all stages: what each was, how long it took, what it scored, and where its report is."""
    lines = [
        "# Stages",
        "",
        "| stage | step | state | took | scores | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for step in pipeline.steps:
        folder = pipeline.folder(step.name)
        state = _read_state(folder)
        scores = state.get("scores") or _last_scores(folder / "metrics.jsonl")
        texts = [
            f"{name} {scores[name]:.4f}" for name in REPORTED_METRICS if name in scores
        ]
        link = ""
        if (folder / "report.html").is_file():
            link = f"[report]({folder.name}/report.html)"
        took = f"{state['seconds']:,.0f} s" if "seconds" in state else ""
        result = state.get("state", "not run")
        lines.append(
            f"| {step.name} | {step.kind} | {result} | {took} | {', '.join(texts)} | {link} |"
        )
    path = Path(pipeline.root) / REPORT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _last_scores(metrics: Path) -> dict[str, float]:
    """Return the newest evaluation of a training."""
    scores: dict[str, float] = {}
    if metrics.exists():
        for line in read_state_text(metrics, errors="replace").splitlines():
            try:
                scores = json.loads(line).get("eval", scores)
            except ValueError:
                continue  # the run was killed while it wrote its last line
    return scores


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    return read_json_object(path) if path.exists() else {}


def _by_option(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values by option, whichever of its names is written; of several the last one."""
    return {_option_of(text): text.partition("=")[2] for text in overrides}


def _option_of(override: str) -> str:
    key = override.partition("=")[0]
    return option_of(key) or key


def _flags(options: Mapping[str, Any]) -> list[str]:
    args: list[str] = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            args.append(flag)
        elif value is not None and value is not False:
            args += [flag, _as_word(value)]
    return args


def _as_word(value: Any) -> str:
    """Return a value as a word of the command line: lists of plain values with commas, the rest as JSON."""
    if isinstance(value, list) and all(
        isinstance(entry, int | float | str) for entry in value
    ):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"
