"""Stages: the stages of a config in order, each in a folder of its own; what is done stays done."""

import hashlib
import json
import operator
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vembed.cli.arguments import TrainArguments
from vembed.cli.main import check_arguments, run_process
from vembed.cli.run_train import result_of
from vembed.cli.support import Result, is_first_rank, print_lines, print_progress
from vembed.config.loading import DATA_FILE_OF_KIND, Pipeline, PipelineStage
from vembed.config.options import OptionValues, command_line_layer
from vembed.config.rules import is_inside, missing_path, require_paths
from vembed.config.schema import FILE_OPTIONS, DataSource, Options
from vembed.config.terms import needed_teachers
from vembed.errors import RunError, UserError, did_you_mean
from vembed.evaluation.report.page import render_page
from vembed.evaluation.report.record import read_run
from vembed.files import (
    checksums_of,
    damage_of,
    is_hub_model,
    read_json_object,
    replace_text,
    similar_path,
)
from vembed.mining.options import BM25, READING_OPTIONS
from vembed.training.checkpoint.folders import FINAL, MAY_CHANGE, of_local
from vembed.training.trackers.table import require_trackers

STATE_FILE = "stage.json"
"""In the folder of each stage: its fingerprint, and whether it is done."""
RESULTS = {**DATA_FILE_OF_KIND, "merge": "final/merge.json", "evaluate": "scores.json"}
"""Kind of a command stage -> the file that it writes last, in its folder."""
REPORT_FILE = "stages.md"
Train = Callable[[TrainArguments], int]
"""Runs one training and returns its exit code."""
REPORTED_METRICS = ("ndcg@10", "mrr@10", "recall@10", "spearman")
SHARED_WITHIN_SECONDS = 60.0
"""Time after which every process must see what rank 0 has written."""


def run_stages(
    pipeline: Pipeline,
    arguments: TrainArguments,
    train: Train,
) -> int:
    """Run the stages and return the exit code of the first that fails, or 0. All are checked before one is run.

    A stage is skipped if it is done and nothing that it depends on has changed. A training that was stopped goes on
    where it stood. Under a launcher all ranks run this. `train` runs one training.
    """
    chosen = _chosen(pipeline, arguments)
    stage_runs = [_StageRun(pipeline, stage, arguments) for stage in pipeline.stages]
    for stage_run in stage_runs:
        if stage_run.stage in chosen:
            # A mistake in the last stage must not come out after days of training.
            stage_run.check()
            if not arguments.is_dry_run:
                _require_earlier(stage_run.stage, chosen)
    fingerprints: dict[str, str] = {}
    for stage_run in stage_runs:
        stage = stage_run.stage
        # Also of stages that are not run: those behind them depend on it.
        fingerprints[stage.name] = stage_run.fingerprint(fingerprints)
        if stage not in chosen:
            continue
        code = 0
        if not arguments.is_dry_run:
            try:
                code = stage_run.run(fingerprints[stage.name], train)
            finally:
                # Also where this stage failed: the page says how far the others came.
                if is_first_rank() and Path(pipeline.root).is_dir():
                    _write_report(pipeline)
        else:
            print_lines(f"==== {stage.name} ({stage.kind}) in {stage_run.folder}")
            if stage.kind == "train":
                code = train(stage_run.arguments)
            else:
                name, args = stage_run.command()
                print_lines(f"would run: vembed {name} {' '.join(args)}")
        if code:
            return code
    if not arguments.is_dry_run and is_first_rank():
        done = "all done"
        if len(chosen) < len(pipeline.stages):
            names = ", ".join(stage.name for stage in chosen)
            done = f"{names} done, {len(chosen)} of {len(pipeline.stages)}"
        print_progress(f"stages: {done}; report: {Path(pipeline.root) / REPORT_FILE}")
    return 0


def _require_earlier(stage: PipelineStage, chosen: Collection[PipelineStage]) -> None:
    """Raise UserError if a command stage needs the result of one that is neither there nor run now."""
    # A training may get another model and other data on the command line.
    if stage.kind == "train":
        return
    for earlier in (stage.model_stage, stage.data_stage):
        if earlier is None or earlier in chosen:
            continue
        if not earlier.result.exists():
            raise UserError(
                f"stage {stage.name} needs {earlier.result}, which stage {earlier.name} makes: run that one first "
                f"(--from {earlier.name})"
            )


def results_of(pipeline: Pipeline) -> list[Result]:
    """Return the result of each training that has finished, in order, as JSON values."""
    return [
        {"stage": stage.name, **result_of(stage.folder)}
        for stage in pipeline.stages
        if stage.kind == "train" and stage.result.is_dir()
    ]


class _StageRun:
    """One stage of a pipeline, with what it takes to run it."""

    def __init__(
        self,
        pipeline: Pipeline,
        stage: PipelineStage,
        arguments: TrainArguments,
    ) -> None:
        self.pipeline = pipeline
        self.all_arguments = arguments
        self.stage = stage
        self.where = f"{pipeline.config_name}: stage {stage.name}: "
        self.folder = stage.folder
        self.before = stage.before
        self.command_line, _ = command_line_layer(arguments.overrides)
        shared = {**pipeline.shared.values, **self.command_line.values}
        self.options = _with_shared_options(shared, stage)
        """Of a command stage; its paths may stand beside the config file."""
        for key in (*DATA_FILE_OPTIONS, *MODELS, "image_root"):
            if key in self.options:
                self.options[key] = _with_names(self.options[key], self._located)
        self.takes_model = _takes_model(stage.kind, self.options)
        model = pipeline.shared.value("model_name")
        self.config_model = self.command_line.value("model_name", model)
        overwrite = pipeline.shared.value("overwrite", False)
        self.starts_over = bool(self.command_line.value("overwrite", overwrite))
        """The stage runs even if it is done, and replaces what is there."""
        self.arguments = replace(
            arguments,
            stage=stage.name,
            first_stage=None,
            last_stage=None,
            overrides=self._overrides(),
        )

    def check(self) -> None:
        """Raise UserError where this stage cannot work, as far as can be told before the stages before it have run."""
        future_folders = [stage.folder for stage in self.before]
        if self.stage.kind == "train":
            run = self.arguments.resolve()
            require_trackers(run.config.logging.report_to)
            config = run.config
            by_name = {stage.name: stage for stage in self.pipeline.stages}
            for teacher in needed_teachers(config.objective, config.data, config.model):
                name = teacher.model
                if name in by_name and not Path(name).exists():
                    raise UserError(
                        f"{self.where}teacher: {name} is a stage: give its model, {by_name[name].result}"
                    )
                # The folder of another run with the same stages, where output_dir is new.
                stage = by_name.get(Path(name).parent.name)
                if stage is not None and Path(name) != stage.result:
                    self._log(
                        f"teacher: {name} is a model of another run: stage {stage.name} of this one leaves {stage.result}"
                    )
            if not self.arguments.is_dry_run:
                require_paths(run, future_folders)
            return
        for key in DATA_FILE_OPTIONS:
            for path in _names_in(self.options.get(key)):
                problem = missing_path(key, path, future_folders)
                if problem is not None:
                    raise UserError(self.where + problem)
        before = [stage.name for stage in self.before if stage.has_model]
        others = {stage.name for stage in self.pipeline.stages} - set(before)
        for key in MODELS:
            for name in _names_in(self.options.get(key)):
                is_folder = Path(name).expanduser().exists()
                if name in (*before, BM25) or is_folder:
                    continue
                if is_inside(name, future_folders):
                    continue
                hint = did_you_mean(name, before) or similar_path(name)
                if name in others or hint or not is_hub_model(name):
                    raise UserError(
                        f"{self.where}{key}: {name} is neither a folder nor a stage before it with a model, which are "
                        f"{', '.join(before) or 'none'}{hint}"
                    )
        required = self.options.get("require", {})
        if not isinstance(required, Mapping):
            raise UserError(
                f"{self.where}require: {required!r} is no condition by name"
            )
        for name, condition in required.items():
            _parse(name, condition)
        problem = check_arguments(*self.command())
        if problem is not None:
            raise UserError(self.where + problem)

    def fingerprint(self, known: Mapping[str, str]) -> str:
        """Return what this stage depends on. `known`: the fingerprints of the stages before it."""
        if self.stage.kind != "train":
            before = [known[stage.name] for stage in self.before]
            facts = {"options": _contents(self.options), "before": before}
            if self.stage.model_stage is None and self.takes_model:
                facts["model_name"] = _contents(self.config_model)
            return _digest(facts)
        run = self.arguments.resolve()
        facts = {}
        for name, value in run.config.to_dict().items():
            if name in COUNTED or name not in MAY_CHANGE:
                facts[name] = _contents(value) if name in FILE_OPTIONS else value
        start = self.stage.model_stage
        if start is not None and "model_name" not in self.stage.options:
            facts["model_name"] = known[start.name]
        world_size = 1
        if os.environ.get("WORLD_SIZE"):
            world_size = int(os.environ["WORLD_SIZE"])
        elif run.processes.value != "auto":
            world_size = int(run.processes.value) * run.machines.value
        # The gradient depends on the global batch only, so the same fingerprint holds for 2 x 32 and 4 x 16.
        batch = run.config.batch
        facts["global batch"] = batch.global_batch_size or batch.batch_size * world_size
        fingerprint = _digest(facts)
        if self.stage.data_stage is None:
            return fingerprint
        # Such data are made anew with their stage; their file need not be there yet.
        return _digest(
            {"training": fingerprint, "data": known[self.stage.data_stage.name]}
        )

    def run(self, fingerprint: str, train: Train) -> int:
        """Run the stage unless it is done, and remember that it is."""
        state = _read_state(self.folder)
        if state.get("fingerprint") != fingerprint:
            if state and is_first_rank():
                number = 1
                while (aside := Path(f"{self.folder}.old-{number}")).exists():
                    number += 1
                self.folder.rename(aside)
                self._log(f"what it depends on has changed; the old one is now {aside}")
        elif state.get("state") == "done" and not self.starts_over:
            damage = None
            for name, checksum in state.get("outputs", {}).items():
                damage = damage or damage_of(self.folder, name, checksum)
            if damage is None:
                self._log("done already (nothing that it depends on has changed)")
                return 0
            final = self.stage.result
            if final.is_dir():
                # The user may have changed it on purpose.
                raise UserError(
                    f"stage {self.stage.name}: {self.folder}: {damage}; delete {final} to make it again"
                )
            self._log(f"{self.folder}: {damage}, so it runs again")
        self._log(f"{self.stage.kind} in {self.folder}")
        began = time.time()
        # "started" is noted first: a stage that is killed is not done, and a start with another fingerprint moves its
        # folder away.
        facts = {"fingerprint": fingerprint, "kind": self.stage.kind}
        self._write_state({**facts, "state": "started"})
        # No rank may write into the folder before an old one is moved away.
        if not _comes_true(
            lambda: _read_state(self.folder).get("fingerprint") == fingerprint
        ):
            raise UserError(
                f"output_dir: {self.folder} is not the same folder for all processes; give one on a file system "
                "that all machines share"
            )
        scores = None
        if self.stage.kind == "train":
            code = train(self.arguments)
        else:
            code, scores = self._run_command()
        if code == 0 and is_first_rank():
            done = {**facts, "state": "done", "seconds": round(time.time() - began, 1)}
            if scores is not None:
                done["scores"] = scores
            done["outputs"] = self._outputs()
            self._write_state(done)
        return code

    def _outputs(self) -> dict[str, dict[str, Any]]:
        """Return the checksums of what the stages after this one read."""
        if not self.stage.has_model:
            return checksums_of(self.folder, [self.folder / RESULTS[self.stage.kind]])
        # users edit the card
        paths = [
            path
            for path in self.stage.result.rglob("*")
            if path.is_file() and path.name != "README.md"
        ]
        return checksums_of(self.folder, paths)

    def command(self) -> tuple[str, list[str]]:
        """Return the command of a command stage, and its arguments."""
        kind = self.stage.kind
        options = dict(self.options)
        layers = [stage.layer for stage in self.before if stage.kind == "train"]
        if kind in ("mine", "evaluate") and any(
            "model_class" in layer.values for layer in [self.pipeline.shared, *layers]
        ):
            # The code in the folders of trained models is the class that the config names.
            options.setdefault("trust_remote_code", True)
        for key in MODELS:
            if key in options:
                options[key] = _with_names(options[key], self._model_named)
        target = str(self.folder / RESULTS[kind])
        if kind == "mine" and self.takes_model:
            options["model_name"] = self._model()
        if kind == "judge":
            if "data_path" not in options and self.stage.data_stage is not None:
                options["data_path"] = str(self.stage.data_stage.result)
            if self.takes_model:
                options["judges"] = [{"model": self._model()}]
        if kind in ("mine", "judge"):
            return kind, _pairs({**options, "output_path": target})
        if kind == "evaluate":
            options.pop("require", None)
            if "data" not in options:
                raise UserError(f"{self.where}evaluate needs data")
            words = [options.pop("model", None) or self._model(), options.pop("data")]
            return "eval", [*words, "--json", target, *_flags(options)]
        models = options.pop("models", None)
        if models is None:
            models = [
                str(stage.result) for stage in self.before if stage.kind == "train"
            ]
        if "last" in options:
            # A run, with its checkpoints.
            models = [model.removesuffix(f"/{FINAL}") for model in models]
        final = str(self.stage.result)
        return "merge", [*models, "--output", final, *_flags(options)]

    def _run_command(self) -> tuple[int, dict[str, Any] | None]:
        """Run a command stage. Return the exit code and, of an evaluation, the scores."""
        path = self.folder / RESULTS[self.stage.kind]
        if is_first_rank() and self.stage.kind != "merge":
            # Of an earlier start: nobody may take it for the result.
            path.unlink(missing_ok=True)
        code = run_process(*self.command())
        if code:
            return code, None
        # Under a launcher the other ranks may be here before rank 0 has written it.
        _comes_true(lambda: path.is_file() and path.stat().st_size > 0)
        if self.stage.kind != "evaluate":
            return 0, None
        scores = read_json_object(path)
        by_name = {name.lower(): value for name, value in scores.items()}
        for name, condition in self.options.get("require", {}).items():
            sign, limit = _parse(name, condition)
            score = by_name.get(name.lower())
            if score is None:
                raise UserError(
                    f"require: {name} is not among what is measured: {', '.join(scores)}"
                )
            if not COMPARE[sign](score, limit):
                raise RunError(
                    f"stage {self.stage.name}: {name} is {score:.4f}, and {sign} {limit:g} is required; the stages after "
                    "it are not run"
                )
        return 0, scores

    def _model(self) -> str:
        """Return the model of the last stage before this one that leaves one, else the config's own."""
        if self.stage.model_stage is not None:
            return str(self.stage.model_stage.result)
        if self.config_model is None:
            raise UserError(
                f"{self.where}no stage before it leaves a model, and the config has no model_name to begin with"
            )
        return str(self.config_model)

    def _model_named(self, name: str) -> str:
        """Return the model of a stage by its name; any other name as it is."""
        for stage in self.before:
            if stage.name == name and stage.has_model:
                return str(stage.result)
        return name

    def _located(self, name: str) -> str:
        """Return a path that is not in the current folder, but beside the config file, as there; others as they are."""
        config = self.all_arguments.source
        if not isinstance(config, str) or Path(name).exists():
            return name
        beside = Path(config).parent / name
        return str(beside) if beside.exists() else name

    def _overrides(self) -> tuple[str, ...]:
        """Return the overrides of a training: those of the command line that are for it."""
        kept_overrides = []
        for override in self.all_arguments.overrides:
            layer, stage_name = command_line_layer([override])
            # A model or data that the command line names are those that the first stage starts from.
            comes_from_stage = (
                self.stage.model_stage is not None and "model_name" in layer.values
            ) or (self.stage.data_stage is not None and "data_path" in layer.values)
            if stage_name is None and not comes_from_stage:
                kept_overrides.append(override)
        is_run = not self.all_arguments.is_dry_run and not self.starts_over
        if is_run and "resume" not in self.command_line.values:
            # A stage that was stopped goes on; its folder is of this very fingerprint.
            kept_overrides.append("resume=auto")
        return tuple(kept_overrides)

    def _write_state(self, state: Mapping[str, Any]) -> None:
        if is_first_rank():
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.folder / STATE_FILE, json.dumps(state, indent=2) + "\n")

    def _log(self, line: str) -> None:
        if is_first_rank():
            print_progress(f"stage {self.stage.name}: {line}")


def _chosen(pipeline: Pipeline, arguments: TrainArguments) -> list[PipelineStage]:
    names = [stage.name for stage in pipeline.stages]
    first = arguments.first_stage
    last = arguments.last_stage
    flags = {"--stage": arguments.stage, "--from": first, "--until": last}
    for flag, name in flags.items():
        if name is not None and name not in names:
            raise UserError(
                f"{flag} {name}: {pipeline.config_name} has the stages {', '.join(names)}"
            )
    if arguments.stage is not None:
        if first is not None or last is not None:
            raise UserError(
                "--stage runs one stage alone: leave out --from and --until"
            )
        return [pipeline.stages[names.index(arguments.stage)]]
    start = names.index(first) if first else 0
    stop = names.index(last) + 1 if last else len(names)
    if start >= stop:
        raise UserError(
            f"--from {first} stands after --until {last} in {pipeline.config_name}"
        )
    return list(pipeline.stages[start:stop])


def _write_report(pipeline: Pipeline) -> None:
    """Write one report over all stages: what each was, how long it took, what it scored, and where its report is."""
    rows = []
    for stage in pipeline.stages:
        folder = stage.folder
        state = _read_state(folder)
        scores = state.get("scores", {})
        link = ""
        if stage.kind == "train" and (folder / "config.yaml").is_file():
            scores = read_run(folder).after
        if (folder / "report.html").is_file():
            link = f"{folder.name}/report.html"
        texts = [
            f"{name} {scores[name]:.4f}" for name in REPORTED_METRICS if name in scores
        ]
        rows.append((stage, state, ", ".join(texts), link))
    path = Path(pipeline.root) / REPORT_FILE
    replace_text(path, render_page("stages.md.j2", rows=rows))


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    return read_json_object(path) if path.exists() else {}


def _pairs(options: Options) -> list[str]:
    """Return the words of a command on data: its options, and the flag --nproc."""
    words = []
    for key, value in options.items():
        if key == "nproc":
            words.append(f"--nproc={value}")
        elif isinstance(value, list):
            words.append(f"{key}={json.dumps(value)}")
        elif value is not None:
            words.append(f"{key}={_word(value)}")
    return words


def _word(value: Any) -> str:
    """Return a value as a word of the command line: lists with commas, others as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value)


def _flags(options: Options) -> list[str]:
    args = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            args.append(flag)
        elif value is not None and value is not False:
            args += [flag, _word(value)]
    return args


def _comes_true(condition: Callable[[], bool]) -> bool:
    """Wait until every process must see what rank 0 has written, and return whether this one does."""
    deadline = time.monotonic() + SHARED_WITHIN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# ---- checks before any stage is run --------------------------------------------------------------------------------

DATA_FILE_OPTIONS = ("data_path", "corpus_path", "qrels_path", "data")
"""Options that name files of data, as of `mine`, `merge` and `evaluate` together."""
MODEL_OPTIONS = ("query_prompt", "document_prompt", "max_length")
"""Options that say how a model reads inputs."""
MODELS = ("model_name", "model", "models", "base", "retrievers", "judges")
MODELS_IN_USE = {
    "mine": ("retrievers", "model_name"),
    "judge": ("judges",),
    "evaluate": ("model",),
}
"""Kind of a command stage -> the options that name its models. Without them it takes that of the stage before, or the
config's."""
COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
# An optional comparison and a decimal number, also `.5` and `1e-3`.
CONDITION = re.compile(r"\s*(>=|<=|>|<)?\s*([+-]?\d*\.?\d+(?:[eE][+-]?\d+)?)\s*")


def _with_names(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value of an option with each path and name in it changed: a text, a list, or entries with a path or a
    model, unless that is the model of an endpoint."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_with_names(entry, change) for entry in value]
    if isinstance(value, Mapping) and "base_url" not in value:
        for key in ("path", "model"):
            if key in value:
                return {**value, key: _with_names(value[key], change)}
    return value


def _names_in(value: Any) -> list[str]:
    """Return the paths and names in the value of an option."""
    names = []

    def add(name: str) -> str:
        names.append(name)
        return name

    _with_names(value, add)
    return names


def _with_shared_options(shared: OptionValues, stage: PipelineStage) -> Options:
    """Return the options of a stage. `mine` reads the data of the whole config unless it names its own, and `judge` what
    was mined of them. The config's own model is mined with as it is trained. `shared`: the options outside of the stages."""
    options = dict(stage.options)
    if stage.kind not in ("mine", "judge"):
        return options
    names: list[str] = []
    path = shared.get("data_path")
    # How records are read belongs to these data.
    if path is not None and options.get("data_path", path.value) == path.value:
        names += READING_OPTIONS
    if stage.kind == "mine":
        names.append("data_path")
        # A trained model brings its own.
        if stage.model_stage is None and _takes_model(stage.kind, options):
            names += MODEL_OPTIONS
    for name in names:
        if name in shared:
            value = shared[name].value
            if isinstance(value, list):
                value = [
                    entry.model_dump(exclude_unset=True)
                    if isinstance(entry, DataSource)
                    else entry
                    for entry in value
                ]
            options.setdefault(name, value)
    return options


def _takes_model(kind: str, options: Options) -> bool:
    """Return whether a command stage uses a model and names none of its own."""
    names = MODELS_IN_USE.get(kind, ())
    return kind in MODELS_IN_USE and not any(map(options.get, names))


def _parse(name: str, condition: Any) -> tuple[str, float]:
    """Return the comparison and the limit. A plain number is the least that is required."""
    match = CONDITION.fullmatch(str(condition))
    if match is None:
        raise UserError(
            f'require: {name}: {condition!r} is no condition; write it as ">= 0.60"'
        )
    return match[1] or ">=", float(match[2])


# ---- fingerprints: what a stage depends on ------------------------------------------------------------------------

COUNTED = (
    "data_path",
    "epochs",
    "max_steps",
    "max_train_minutes",
    "load_best_model_at_end",
    "save_merged",
    "on_nonfinite",
    "val_data_path",
    "eval_metric",
    "eval_steps",
    "patience",
    "guards",
)
"""Options that a resumed run may change, and that change what comes out."""


def _contents(value: Any) -> Any:
    """Return a value with the files and folders that it names replaced by their fingerprints, at any depth."""
    if isinstance(value, list):
        return [_contents(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _contents(entry) for key, entry in value.items()}
    return of_local(value) if isinstance(value, str) else value


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
