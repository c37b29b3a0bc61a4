"""Stages of a config: the steps of `stages:` or `training_stages:` in order, and the layers of one that trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vembed.config.layers import Layer, Level, option_of, plain_layer
from vembed.config.parsing import Node, source_tree, tree_of_mapping
from vembed.config.schema import TrainConfig
from vembed.config.values import RESULT_OF
from vembed.errors import UserError

STAGES = "stages"
TRAINING_STAGES = "training_stages"
USER_PRESETS = "distributed_examples"
DATA_FILES = {"mine": "mined.jsonl", "judge": "judged.jsonl"}
"""Kind of a step that leaves training data -> their file in its folder."""

StepKind = Literal["train", "mine", "judge", "merge", "evaluate"]
OTHER_KINDS: tuple[StepKind, ...] = ("mine", "judge", "merge", "evaluate")


@dataclass(frozen=True)
class Step:
    """One step: a training stage, or a mining, a judgement, a merge or an evaluation between stages."""

    name: str
    kind: StepKind
    layer: Layer
    """What a training stage gives."""
    options: dict[str, Any]
    """What it gives, by option. Of a step between under the names of its command, which may mean other things:
    `output_path` of a mining is a file."""
    start: str | None = None
    """The step whose model it starts from, where that is not the last one before it that has a model of its task."""
    task: str = "embed"
    """Task of the model that it trains, or starts from."""

    @property
    def has_model(self) -> bool:
        """True if the step leaves a model in `final/` of its folder."""
        return self.kind in ("train", "merge")


@dataclass(frozen=True)
class Pipeline:
    """The steps of a config in order."""

    source: str
    root: str
    """Folder of the folders of all steps."""
    shared: Layer
    """What stands outside of the stages."""
    steps: tuple[Step, ...]

    @property
    def has_own_class(self) -> bool:
        """True if a training of it names a `model_class`."""
        trainings = [step.layer for step in self.steps if step.kind == "train"]
        return any("model_class" in layer.values for layer in [self.shared, *trainings])

    def folder(self, name: str) -> Path:
        """Return the folder of a step."""
        for step in self.steps:
            if step.name == name and "output_dir" in step.options:
                return Path(str(step.options["output_dir"]))
        return Path(self.root, name)

    def before(self, name: str) -> list[Step]:
        """Return the steps before one."""
        names = [step.name for step in self.steps]
        return list(self.steps[: names.index(name)])

    def model_before(self, name: str) -> Step | None:
        """Return the step whose model one starts from; None: from the config's own."""
        by_name = {step.name: step for step in self.steps}
        step = by_name[name]
        if step.start is not None:
            return by_name[step.start]
        for earlier in reversed(self.before(name)):
            if earlier.has_model and earlier.task == step.task:
                return earlier
        return None

    def data_step_before(self, name: str) -> Step | None:
        """Return the step whose data a training stage gets: the last one since the stage before. A judgement gets the
        last of all."""
        is_training = any(
            step.name == name and step.kind == "train" for step in self.steps
        )
        for step in reversed(self.before(name)):
            if step.kind in DATA_FILES:
                return step
            if step.kind == "train" and is_training:
                return None
        return None

    def data_of(self, step: Step) -> Path:
        """Return the file of a step that leaves training data."""
        return self.folder(step.name) / DATA_FILES[step.kind]

    def layers(self, stage: str | None) -> list[Layer]:
        """Return the layers of a training stage: the shared options, those that follow from the order of the steps,
        and its own."""
        trainings = {step.name: step for step in self.steps if step.kind == "train"}
        if stage is None and len(trainings) == 1:
            stage = next(iter(trainings))
        if stage not in trainings:
            problem = "there are several stages"
            if stage is not None:
                problem = f"there is no stage {stage!r}"
            names = ", ".join(trainings) or "none"
            raise UserError(
                f"{self.source}: {problem}: choose with --stage NAME: {names}"
            )
        name = self.source
        implied = Layer(name)
        place = f"{name}, {TRAINING_STAGES}.{stage}"
        implied.enter("output_dir", str(self.folder(stage)), "output_dir", place)
        before = self.model_before(stage)
        if before is not None:
            model = str(self.folder(before.name) / "final")
            place = f"{name}{RESULT_OF}{before.name}"
            implied.enter("model_name", model, "model_name", place)
        data_step = self.data_step_before(stage)
        if data_step is not None:
            path = str(self.data_of(data_step))
            place = f"{name}{RESULT_OF}{data_step.name}"
            implied.enter("data_path", path, "data_path", place)
        return [self.shared, implied, trainings[stage].layer]


def source_layers(
    source: str | Path | Mapping[str, Any] | TrainConfig,
    stage: str | None,
    command_line: Layer,
) -> tuple[list[Layer], Mapping[str, Node]]:
    """Return the layers of a file, a dict or a TrainConfig, and the user's own presets.

    With stages, `output_dir` of the command line is taken from its layer: it is the folder of all stages.
    """
    if isinstance(source, TrainConfig):
        # Only what was set: defaults would win over the launcher and files.
        options = source.options()
        set_options = {
            name: options[name] for name in options if name in source.explicit_options
        }
        return [plain_layer("TrainConfig", Level.CONFIG, set_options)], {}
    tree, name = source_tree(source)
    presets = tree.value.get(USER_PRESETS, Node({}, None))
    if not isinstance(presets.value, dict):
        raise UserError(
            f"{name}, line {presets.line}: {USER_PRESETS} must hold blocks like "
            "`distributed`, by name"
        )
    pipeline = _pipeline_of(tree.value, name)
    if pipeline is not None:
        if stage is None and "stage" in tree.value:
            stage = str(tree.value["stage"].plain())
        moved = command_line.values.pop("output_dir", None)
        if moved is not None:
            pipeline = replace(pipeline, root=str(moved.value))
        return pipeline.layers(stage), presets.value
    if stage is not None:
        raise UserError(
            f"{name}: stage {stage!r} was asked for, but there is no {TRAINING_STAGES} block "
            "to choose it from"
        )
    keys = {key: node for key, node in tree.value.items() if key != USER_PRESETS}
    return [Layer(name).take_all(keys)], presets.value


def values_by_option(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values of `key=value` words by option, whichever of its names is written; of several the last one."""
    values = {}
    for override in overrides:
        key, _, value = override.partition("=")
        values[option_of(key) or key] = value
    return values


def chosen_pipeline(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    stage: str | None = None,
) -> Pipeline | None:
    """Return the steps to run; None where it is one training: no stages, or one of them by name."""
    options = values_by_option(overrides)
    pipeline = read_pipeline(source, options.get("output_dir"))
    name = stage or options.get("stage")
    if pipeline is None or name is None:
        return pipeline
    # A name that no step has counts as a training, which refuses it with the names that there are.
    kinds = [step.kind for step in pipeline.steps if step.name == name]
    return None if kinds in ([], ["train"]) else pipeline


def read_pipeline(
    source: str | Path | Mapping[str, Any], root: str | None = None
) -> Pipeline | None:
    """Return the steps of a config file or dict; None where it has no stages. `root`: instead of its output_dir."""
    tree, name = source_tree(source)
    return _pipeline_of(tree.value, name, root)


def _pipeline_of(
    keys: Mapping[str, Node],
    name: str,
    root: str | None = None,
) -> Pipeline | None:
    shared_keys = dict(keys)
    lists = [shared_keys.pop(key, None) for key in (STAGES, TRAINING_STAGES)]
    node = lists[0] or lists[1]
    if node is None:
        return None
    if None not in lists:
        raise UserError(
            f"{name}: {STAGES} and {TRAINING_STAGES} are two lists of stages; keep one"
        )
    for key in (USER_PRESETS, "stage"):
        shared_keys.pop(key, None)
    shared = Layer(name).take_all(shared_keys)
    if root is None:
        root = str(shared.value("output_dir", "output"))
    steps: list[Step] = []
    for step_name, block in _blocks(node, name):
        steps.append(_step(step_name, block, name, steps, shared))
    return Pipeline(name, root, shared, tuple(steps))


def _blocks(node: Node, name: str) -> list[tuple[str | None, dict[str, Node]]]:
    """Return (name or None, options) of each step."""
    entries: list[tuple[str | None, Node]] = []
    if isinstance(node.value, dict):
        entries += node.value.items()
    elif isinstance(node.value, list):
        entries += [(None, tree_of_mapping(entry)) for entry in node.value]
    if not entries:
        raise UserError(f"{name}, line {node.line}: {STAGES} must be a list of stages")
    blocks = []
    for number, (step_name, entry) in enumerate(entries, start=1):
        if not isinstance(entry.value, dict):
            line = entry.line or node.line
            where = f"{name}, line {line}" if line else name
            raise UserError(f"{where}: stage {step_name or number} must hold options")
        block = dict(entry.value)
        name_node = None if step_name else block.pop("name", None)
        stage_name = step_name if name_node is None else str(name_node.plain())
        blocks.append((stage_name, block))
    return blocks


def _step(
    stage_name: str | None,
    block: dict[str, Node],
    source: str,
    before: list[Step],
    shared: Layer,
) -> Step:
    # A step between has its kind as its only key, beside `from`. Among other keys `mine` is the option of a training,
    # and so it is with `every_epochs` in it.
    kind: StepKind = "train"
    start = block.pop("from", None)
    for other in OTHER_KINDS:
        is_option = other == "mine" and "every_epochs" in str(block.get(other))
        if set(block) == {other} and not is_option:
            kind = other
    number = len(before) + 1
    separator = "" if kind == "train" else "-"
    name = stage_name or f"{kind}{separator}{number}"
    earlier = [step.name for step in before]
    if name in earlier:
        raise UserError(
            f"{source}: two stages are called {name}; give each a name of its own"
        )
    if "/" in name or name.startswith("."):
        raise UserError(
            f"{source}: stage {name}: a name is that of a folder, without / and not beginning with ."
        )
    start_name = None if start is None else str(start.plain())
    if start_name not in (None, *earlier):
        raise UserError(
            f"{source}: stage {name} starts from {start_name}, and the stages before it are "
            f"{', '.join(earlier) or 'none'}"
        )
    layer = Layer(source)
    if kind == "train":
        layer.take_all(block, f"{TRAINING_STAGES}.{name}.")
        options = {key: value.value for key, value in layer.values.items()}
        task = str(layer.value("task", shared.value("task", "embed")))
        return Step(name, kind, layer, options, start_name, task)
    options = block[kind].plain()
    if not isinstance(options, dict):
        raise UserError(f"{source}: stage {name}: {kind} must hold options")
    tasks = {"mine": "embed", "evaluate": "embed", "judge": "rerank"}
    task = tasks.get(kind, str(shared.value("task", "embed")))
    return Step(name, kind, layer, options, start_name, task)
