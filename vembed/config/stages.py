"""Stages of a config: the steps of `stages:` or `training_stages:` in order, and the block of each that trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vembed.config.aliases import BLOCKS, option_of
from vembed.config.parsing import Node, read_tree, tree_of_mapping
from vembed.errors import UserError

STAGES = "stages"
TRAINING_STAGES = "training_stages"
DEFAULT_ROOT = "output"
DATA_FILES = {"mine": "mined.jsonl", "judge": "judged.jsonl"}
"""Kind of a step that leaves training data -> their file in its folder."""

Kind = Literal["train", "mine", "judge", "merge", "evaluate"]
OTHER_KINDS: tuple[Kind, ...] = ("mine", "judge", "merge", "evaluate")


@dataclass(frozen=True)
class Step:
    """One step: a training stage, or a mining, a judgement, a merge or an evaluation between stages."""

    name: str
    kind: Kind
    block: dict[str, Node]
    """Its options."""
    start: str | None = None
    """The step whose model it starts from, where that is not the last one before it that has a model of its task."""
    task: str = "embed"
    """Task of the model that it trains, or starts from."""

    @property
    def has_model(self) -> bool:
        """True if the step leaves a model in `final/` of its folder."""
        return self.kind in ("train", "merge")

    def option(self, option: str) -> Node | None:
        """Return what the step says itself for an option, a training under any of its names; None where it says
        nothing."""
        # Names of options of the steps between mean other things: `output_path` of a mining is a file.
        return (
            option_in(self.block, option)
            if self.kind == "train"
            else self.block.get(option)
        )

    def options(self) -> dict[str, Any]:
        """Return the options without their lines."""
        return {key: node.plain() for key, node in self.block.items()}


@dataclass(frozen=True)
class Pipeline:
    """The steps of a config in order."""

    source: str
    root: str
    """Folder of the folders of all steps."""
    steps: tuple[Step, ...] = field(default=())
    has_own_class: bool = False
    """True if a training of it names a `model_class`."""

    def folder(self, name: str) -> Path:
        """Return the folder of a step."""
        for step in self.steps:
            folder = step.option("output_dir") if step.name == name else None
            if folder is not None:
                return Path(str(folder.plain()))
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


def option_in(keys: Mapping[str, Node], option: str) -> Node | None:
    """Return the value of an option among keys, under any of its names; None where it is not there."""
    for key, node in keys.items():
        if option_of(key) == option:
            return node
        block = key.strip().replace("-", "_")
        if block in BLOCKS and isinstance(node.value, dict):
            for name, inner in node.value.items():
                if isinstance(inner, Node) and option_of(f"{block}.{name}") == option:
                    return inner
    return None


def read_pipeline(
    source: str | Path | Mapping[str, Any], root: str | None = None
) -> Pipeline | None:
    """Return the steps of a config file or dict; None where it has no stages. `root`: instead of its output_dir."""
    if isinstance(source, Mapping):
        tree = tree_of_mapping(source)
        name = "the config"
    else:
        tree = read_tree(Path(source))
        name = str(source)
    return pipeline_of(dict(tree.value), name, root)


def pipeline_of(
    keys: Mapping[str, Node], name: str, root: str | None = None
) -> Pipeline | None:
    """Return the steps of the keys of a config; None where it has no stages."""
    if STAGES not in keys and TRAINING_STAGES not in keys:
        return None
    if STAGES in keys and TRAINING_STAGES in keys:
        raise UserError(
            f"{name}: {STAGES} and {TRAINING_STAGES} are two lists of stages; keep one"
        )
    if root is None:
        named = option_in(keys, "output_dir")
        root = DEFAULT_ROOT if named is None else str(named.plain())
    task = option_in(keys, "task")
    shared_task = "embed" if task is None else str(task.plain())
    steps: list[Step] = []
    for number, (step_name, block) in enumerate(_blocks(keys, name), start=1):
        earlier = [step.name for step in steps]
        step = _step(step_name, block, number, name, earlier, shared_task)
        steps.append(step)
    blocks = [keys, *(step.block for step in steps if step.kind == "train")]
    has_own_class = any(option_in(block, "model_class") for block in blocks)
    return Pipeline(name, root, tuple(steps), has_own_class)


def training_blocks(keys: Mapping[str, Node], name: str) -> Node | None:
    """Return `stages:` as the mapping of blocks that `training_stages:` is: of the training stages alone, each with
    what the steps before it give it. None where the config has no `stages:`."""
    if STAGES not in keys:
        return None
    pipeline = pipeline_of(keys, name)
    assert pipeline is not None
    blocks: dict[str, Node] = {}
    for step in pipeline.steps:
        if step.kind != "train":
            continue
        block = dict(step.block)
        before = pipeline.model_before(step.name)
        data_step = pipeline.data_step_before(step.name)
        trainings = [
            step for step in pipeline.before(step.name) if step.kind == "train"
        ]
        start_model = option_in(keys, "model_name")
        # What the block says itself holds. A training stage right before is found by those who read the blocks, and
        # named as the place of the model.
        if step.option("model_name") is None and trainings[-1:] != [before]:
            if before is not None:
                folder = str(pipeline.folder(before.name) / "final")
                block["model_name"] = Node(folder, keys[STAGES].line)
            elif trainings and start_model is not None:
                # The stages before it train models of the other task.
                block["model_name"] = start_model
        if data_step is not None and step.option("data_path") is None:
            path = str(pipeline.data_of(data_step))
            block["data_path"] = Node(path, keys[STAGES].line)
        blocks[step.name] = Node(block, keys[STAGES].line)
    return Node(blocks, keys[STAGES].line)


def _blocks(
    keys: Mapping[str, Node], name: str
) -> list[tuple[str | None, dict[str, Node]]]:
    """Return (name or None, options) of each step."""
    node = keys.get(STAGES) or keys[TRAINING_STAGES]
    if isinstance(node.value, dict):
        for known, block in node.value.items():
            if not isinstance(block.value, dict):
                raise UserError(
                    f"{name}, line {block.line}: stage {known} must hold options"
                )
        return [(known, dict(block.value)) for known, block in node.value.items()]
    if not isinstance(node.value, list) or not node.value:
        raise UserError(f"{name}, line {node.line}: {STAGES} must be a list of stages")
    blocks: list[tuple[str | None, dict[str, Node]]] = []
    for number, entry in enumerate(node.value, start=1):
        if not isinstance(entry, dict):
            raise UserError(
                f"{name}, line {node.line}: stage {number} of {STAGES} must hold options"
            )
        block = dict(tree_of_mapping(entry).value)
        step_name = block.pop("name", None)
        blocks.append((None if step_name is None else str(step_name.plain()), block))
    return blocks


def _mines_within(node: Node) -> bool:
    """Return whether these are options of mining within training."""
    return isinstance(node.value, dict) and "every_epochs" in node.value


def _step(
    given_name: str | None,
    block: dict[str, Node],
    number: int,
    name: str,
    earlier: list[str],
    shared_task: str,
) -> Step:
    # A step between has its kind as its only key, beside `from`; among other keys `mine` is the option of a training.
    kinds = [
        kind
        for kind in OTHER_KINDS
        if kind in block and (len(block) == 1 or "from" in block)
    ]
    if kinds == ["mine"] and _mines_within(block["mine"]):
        kinds = []
    kind: Kind = kinds[0] if kinds else "train"
    step_name = given_name or (
        f"{kind}{number}" if kind == "train" else f"{kind}-{number}"
    )
    if step_name in earlier:
        raise UserError(
            f"{name}: two stages are called {step_name}; give each a name of its own"
        )
    if "/" in step_name or step_name.startswith("."):
        raise UserError(
            f"{name}: stage {step_name}: a name is that of a folder, without / and not beginning with ."
        )
    start = block.pop("from", None)
    start_name = None if start is None else str(start.plain())
    if start_name is not None and start_name not in earlier:
        raise UserError(
            f"{name}: stage {step_name} starts from {start_name}, and the stages before it are "
            f"{', '.join(earlier) or 'none'}"
        )
    if kind != "train":
        inner = block[kind]
        if not isinstance(inner.value, dict):
            raise UserError(f"{name}: stage {step_name}: {kind} must hold options")
        block = dict(inner.value)
    task = shared_task
    if kind == "train" and (option := option_in(block, "task")) is not None:
        task = str(option.plain())
    if kind in ("mine", "evaluate"):
        task = "embed"
    if kind == "judge":
        task = "rerank"
    return Step(step_name, kind, block, start_name, task)
