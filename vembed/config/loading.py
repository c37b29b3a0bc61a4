"""Loading of a TrainConfig: layers of options from files, the launcher and the command line, merged and checked.

The stages of a config are a Pipeline. A training is loaded from the layers of one of them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from vembed.config import rules
from vembed.config.accelerate_file import (
    launcher_layer,
    preset_names,
    read_accelerate_file,
)
from vembed.config.decisions import DEFAULT, ResolvedRun, decide
from vembed.config.options import (
    REPLACES,
    Layer,
    Level,
    OptionValues,
    all_options,
    canonical_layer,
    command_line_layer,
)
from vembed.config.parsing import CoreDumper, Node, source_tree, tree_of_mapping
from vembed.config.schema import Options, TrainConfig, sources_of
from vembed.config.values import RESULT_SEPARATOR, ConfigModel, Environment
from vembed.errors import UserError
from vembed.files import existing, short_name

DEFAULT_PRESET = "accelerate_fsdp"
"""Preset from which FSDP options come if no file for FSDP is named."""
CODE_OPTIONS = ("model_class", "fsdp_auto_wrap_policy")
"""Options that name a class or function in a file."""
PATH_OPTIONS = (
    "data_path",
    "val_data_path",
    "image_root",
    "guards",
    "mine",
    "first_stage",
    *CODE_OPTIONS,
)
"""Options whose paths may start beside the config file. Names of models are not among them: they may be names of the Hub."""
PATHS_OF_ENTRIES = ("path", "val_data_path", "corpus_path")
"""Paths in an entry of `data_path` or `guards`, and in `mine`."""
OUTPUT_DIR_FIELDS = ("model", "data", "seed", "time")
"""Placeholders that a template of output_dir may contain, in braces."""
START_TIME = "VEMBED_START_TIME"
"""Environment variable by which `vembed train` tells its ranks the start of the run."""
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

STAGES = "stages"
"""Key of a config that holds its stages."""
TRAINING_STAGES = "training_stages"
"""Another name of this key."""
USER_PRESETS = "distributed_examples"
"""Key of a config under which it defines presets of its own, for `accelerate_config`."""
DATA_FILE_OF_KIND = {"mine": "mined.jsonl", "judge": "judged.jsonl"}
"""Kind of a stage that leaves training data -> their file in its folder."""

StageKind = Literal["train", "mine", "judge", "merge", "evaluate"]
COMMAND_KINDS: tuple[StageKind, ...] = ("mine", "judge", "merge", "evaluate")
"""Kinds of the command stages. Each is named as the command that it runs. All other stages are trainings."""

ConfigSource = str | Path | Mapping[str, Any] | TrainConfig


def load_config(
    source: ConfigSource | ResolvedRun, overrides: Sequence[str] = ()
) -> TrainConfig:
    """Return the checked config of a file, a dict or a `TrainConfig`, with `key=value` overrides.

    Raises:
        UserError: a key is unknown, a value has the wrong type, or options contradict each other.
    """
    return resolve_run(source, overrides).config


def resolve_run(
    source: ConfigSource | ResolvedRun,
    overrides: Sequence[str] = (),
    *,
    stage: str | None = None,
    env: Environment = os.environ,
) -> ResolvedRun:
    """Resolve a run from all its sources.

    From the weakest to the strongest: the defaults, the Accelerate file that is named, what
    `accelerate launch` has set, the training config (a stage's block after the rest), the command line.
    """
    if isinstance(source, ResolvedRun):
        if not overrides:
            return source
        source = source.config
    config_file = Path(source) if isinstance(source, str | Path) else None
    notes = []
    command_line, chosen_stage = command_line_layer(overrides)
    config_layers, user_presets = source_layers(
        source, stage or chosen_stage, command_line
    )
    for layer in config_layers:
        # Before the layers are merged, since the Accelerate file is read for that.
        if layer.value("accelerate_config") not in user_presets:
            notes += resolve_paths(layer.values, ("accelerate_config",), config_file)
    launcher, launcher_notes = launcher_layer(env)
    naming_layer = _layer_naming_accelerate_file([*config_layers, command_line])
    file_name = None
    own_preset_layers = []
    if naming_layer is not None:
        file_name = naming_layer.value("accelerate_config")
    if file_name is not None and file_name in user_presets:
        # The name is that of a preset that the config itself defines: a block of options, as weak as those of a file. The
        # block may name a file in turn.
        for layer in (*config_layers, command_line):
            layer.values.pop("accelerate_config", None)
        own_preset = Layer(str(config_file or "the config"), Level.ACCELERATE_FILE)
        block = {"distributed": user_presets[file_name]}
        own_preset_layers.append(
            own_preset.add_keys(block, f"{USER_PRESETS}.{file_name}.")
        )
        file_name = own_preset.value("accelerate_config")
    accelerate_file = None
    accelerate_layers = []
    # What the FSDP options start from: the launcher, a named file for FSDP, or the default preset.
    fsdp_origin = ""
    if file_name is not None:
        accelerate_file = read_accelerate_file(file_name)
        notes += accelerate_file.notes
        options = {"strategy": accelerate_file.distribution, **accelerate_file.options}
        accelerate_layers.append(
            canonical_layer(accelerate_file.place, Level.ACCELERATE_FILE, options)
        )
        fsdp_origin = accelerate_file.place
    if "strategy" in launcher.values:
        fsdp_origin = launcher.name
    elif accelerate_file is None or accelerate_file.distribution != "fsdp":
        preset = read_accelerate_file(DEFAULT_PRESET)
        # Nobody has named it: it gives the FSDP options alone.
        options = {}
        for name, value in preset.options.items():
            if name.startswith("fsdp_"):
                options[name] = value
        accelerate_layers.insert(
            0, canonical_layer(preset.place, Level.PRESET, options)
        )
        fsdp_origin = preset.place
    notes += launcher_notes
    accelerate_layers += own_preset_layers

    layers = [*accelerate_layers, launcher, *config_layers, command_line]
    # More than one config layer: the last one is a stage's block. Options outside of the stages are stronger than a file
    # that the command line names. A stage's block is not, since the user names the file for the launch of this stage: where
    # both set an option, the file's value moves to a layer above the stage's.
    if naming_layer is command_line and len(config_layers) > 1:
        accelerate_layer = accelerate_layers[-1]
        stage_layer = config_layers[-1]
        layer_above_stage = Layer(accelerate_layer.name, Level.COMMAND_LINE)
        place = f"{accelerate_layer.name}, named on the command line"
        for name in sorted(accelerate_layer.values.keys() & stage_layer.values):
            value = accelerate_layer.values.pop(name)
            layer_above_stage.values[name] = replace(
                value, place=place, level=layer_above_stage.level
            )
        layers.insert(-1, layer_above_stage)
    problems = []
    for layer in layers:
        problems += layer.problems
        notes += layer.notes
    values, notes_on_overrides = _merge(layers)
    notes += notes_on_overrides
    notes_on_values, problems_of_values = _resolve_values(values, config_file, env)
    notes += notes_on_values
    problems += problems_of_values
    for name, option in all_options().items():
        if option.is_required and name not in values:
            problems.append(
                f"{config_file or 'the config'}: {name} is missing: add `{name}: ...` to a config file, or give "
                f"{name}=... ({option.accepts})"
            )
    if problems:
        raise UserError("\nalso: ".join(problems))

    # The config has what the user has set. The default preset is not part of it: `decide` uses it only if FSDP is on.
    set_options = {}
    # Where each option stands, for messages, and where its value comes from, for `vembed config` and the log.
    places = {}
    origins = dict.fromkeys(all_options(), DEFAULT)
    for name, value in values.items():
        if value.level > Level.PRESET:
            set_options[name] = value.value
            places[name] = value.place
            origins[name] = value.origin
    config = TrainConfig(**set_options)
    problems = rules.violations(config, places)
    if problems:
        raise UserError("\nalso: ".join(problems))
    return decide(
        config,
        values,
        origins=origins,
        notes=[*notes, *rules.remarks(config)],
        accelerate_file=accelerate_file,
        fsdp_origin=fsdp_origin,
        env=env,
    )


def _layer_naming_accelerate_file(layers: Sequence[Layer]) -> Layer | None:
    """Return the strongest layer that sets `accelerate_config`, whose value counts. None if there is none, or if it sets
    null."""
    for layer in reversed(layers):
        if "accelerate_config" in layer.values:
            value = layer.values["accelerate_config"].value
            return None if value is None else layer
    return None


def _merge(layers: Sequence[Layer]) -> tuple[OptionValues, list[str]]:
    """Merge the layers, from the weakest to the strongest. Return the values, and a note for each overridden one.

    A stronger value replaces that of the same option. It also replaces that of the option's twin, which sets the same in
    another unit (REPLACES).
    """
    twins = REPLACES | {twin: name for name, twin in REPLACES.items()}
    values: OptionValues = {}
    notes = []
    for layer in layers:
        for name, new in layer.values.items():
            old = values.get(name)
            # `auto` in the config keeps the value of the Accelerate file or of the launcher.
            if old is not None and old.level < Level.CONFIG and new.value == "auto":
                continue
            overridden = [] if old is None else [old]
            twin = values.get(twins.get(name, ""))
            # The twin is not replaced if either value is `auto` or the new one is null, since these set nothing. Nor if this
            # layer sets both: the rules refuse that.
            if (
                twin is not None
                and twin.option not in layer.values
                and new.value is not None
                and "auto" not in (new.value, twin.value)
            ):
                overridden.append(values.pop(twin.option))
            for value in overridden:
                # The user has not named the default preset, and expects a stage's block to override the rest of its own
                # config: no note about these.
                is_named = value.level > Level.PRESET
                is_other_source = value.level != new.level
                if is_named and is_other_source and value.value != new.value:
                    notes.append(f"{new} overrides {value}")
            values[name] = new
    return values, notes


def _resolve_values(
    values: OptionValues,
    config_file: Path | None,
    env: Environment,
) -> tuple[list[str], list[str]]:
    """Resolve values that depend on other options or on files: batch size, paths, output_dir. Return notes and
    problems."""
    problems = []
    # In other trainers an effective batch includes all accumulated batches. Here global_batch_size is one of them. The
    # key as written tells which of the two the user means.
    batch = values.get("global_batch_size")
    num_accumulated = values.get("gradient_accumulation_steps")
    if (
        batch is not None
        and batch.value is not None
        and num_accumulated is not None
        and batch.key.replace("-", "_").endswith("effective_batch_size")
    ):
        count = num_accumulated.value
        if batch.value % count:
            problems.append(
                f"{batch.place}: {batch.key}: {batch.value} must be a multiple of "
                f"gradient_accumulation_steps: {count} ({num_accumulated.place})"
            )
        else:
            place = f"{batch.place}, {batch.value} over {count} accumulated batches"
            size = batch.value // count
            values["global_batch_size"] = replace(batch, value=size, place=place)

    notes = resolve_paths(values, PATH_OPTIONS, config_file)
    # After the path of the class is resolved. Without a model_name the class starts from new weights, and names the model.
    model_class = values.get("model_class")
    if model_class is not None and model_class.value and "model_name" not in values:
        values["model_name"] = replace(model_class, option="model_name")
    # Last: its name may contain the model and the data.
    output_dir = values.get("output_dir")
    if output_dir is not None:
        plain = {name: value.value for name, value in values.items()}
        template = output_dir.value
        path = template
        try:
            path = expand_output_dir(template, plain, env)
        except ValueError as error:
            problems.append(f"output_dir: {template}: {error} ({output_dir.place})")
        if path != template:
            notes.append(f"output_dir: {template} -> {path}")
            values["output_dir"] = replace(output_dir, value=path)
    return notes, problems


def resolve_paths(
    values: OptionValues,
    names: Sequence[str],
    config_file: Path | None,
) -> list[str]:
    """Replace relative paths that are not in the current directory, but in the config file's folder. Return a note for
    each."""
    notes: list[str] = []
    if config_file is None:
        return notes

    def locate(name: str, value: Any) -> Any:
        """Return the value of an option with all paths in it resolved: a list, an entry of a list or one path.

        A path may also be a Hub name or an address, which stays.
        """
        if isinstance(value, list):
            return [locate(name, entry) for entry in value]
        if isinstance(value, ConfigModel):
            paths = {}
            for field in PATHS_OF_ENTRIES:
                entry = getattr(value, field, None)
                if entry is not None:
                    paths[field] = locate(name, entry)
            return value.model_copy(update=paths)
        path = str(value)
        attribute = ""
        if name in CODE_OPTIONS:
            path, _, attribute = path.rpartition(":")
            if not path.endswith(".py"):  # package.module:Class
                return value
            attribute = f":{attribute}"
        beside = config_file.parent / path
        stays = Path(path).is_absolute() or existing(path)
        if stays or not existing(beside):
            return value
        notes.append(
            f"{name}: {path} is not in the current directory; using the one beside {config_file.name}"
        )
        return f"{beside}{attribute}"

    for name in names:
        value = values.get(name)
        if value is None or value.value is None or value.value in preset_names():
            continue
        # Arguments of the command line are typed in the current directory.
        if value.level is not Level.COMMAND_LINE:
            values[name] = replace(value, value=locate(name, value.value))
    return notes


def expand_output_dir(
    template: str,
    values: Options,
    env: Environment,
) -> str:
    """Return the folder that a template such as ~/runs/{model}-{time} names: the same on every rank.

    `values`: the options that are given, by name. Raise ValueError for a bad template.
    """
    if template.startswith("~"):
        template = str(Path(template).expanduser())
    # Not str.format: other braces, format specs and attributes in a folder's name stay as they are.
    names = _PLACEHOLDER.findall(template)
    if not names:
        return template
    unknown = [name for name in names if name not in OUTPUT_DIR_FIELDS]
    if unknown:
        raise ValueError(
            f"{{{unknown[0]}}} is not known; a folder's name may contain {{{'}, {'.join(OUTPUT_DIR_FIELDS)}}}"
        )
    options = {name: option.default for name, option in all_options().items()}
    options |= values
    start = ""
    if "time" in names:
        resume = options["resume"]
        if resume in (True, "auto", "force"):
            raise ValueError(
                f"{{time}} names a new folder at each start, so resume: {str(resume).lower()} finds no checkpoint "
                "there; give resume the folder of the earlier run, or leave out {time}"
            )
        seconds = float(env.get(START_TIME) or time.time())
        is_rank = env.get("LOCAL_RANK") is not None
        if is_rank and env.get("WORLD_SIZE") != env.get("LOCAL_WORLD_SIZE"):
            raise ValueError(
                "{time} differs between the machines of a run: give the folder without it"
            )
        if is_rank and START_TIME not in env:
            # Ranks of another launcher take the start of the process that started them, which they share.
            import psutil

            seconds = float(psutil.Process(os.getppid()).create_time())
        start = datetime.fromtimestamp(seconds).strftime("%Y%m%d-%H%M%S")
    path = sources_of(options["data_path"] or "")[0].path

    def folder_name(name: str) -> str:
        return re.sub(r"[^\w.-]+", "-", short_name(name)).strip("-.") or "run"

    known = {
        "model": folder_name(str(options["model_name"] or "")),
        "data": folder_name(path).partition(".")[0],
        "seed": str(options["seed"]),
        "time": start,
    }
    return _PLACEHOLDER.sub(lambda match: known[match[1]], template)


# ---- stages


@dataclass(frozen=True)
class PipelineStage:
    """One stage: a training stage, or a command stage, which mines, judges, merges or evaluates."""

    name: str
    kind: StageKind
    layer: Layer
    """Options of a training stage. Empty for a command stage."""
    options: Options
    """Values by option. A command stage has the options of its command, which may mean something else than those of a
    training: `output_path` of a mining is a file."""
    folder: Path
    before: tuple[PipelineStage, ...]
    """The stages before it."""
    model_task: str
    """Option `task` of the model that it trains, or starts from: embed or rerank."""
    model_stage: PipelineStage | None
    """The stage whose model it starts from, by default the last one before it that has a model of the same `model_task`.
    None: it starts from the config's own."""
    data_stage: PipelineStage | None
    """The stage whose data it gets. A training gets those of the last mining or judgement since the training before it. A
    command stage gets those of the last mining or judgement before it."""

    @property
    def has_model(self) -> bool:
        """True if the stage leaves a model in `final/` of its folder."""
        return self.kind in ("train", "merge")

    @property
    def result(self) -> Path:
        """The model of a stage that leaves one, the file of one that leaves training data."""
        return self.folder / DATA_FILE_OF_KIND.get(self.kind, "final")


@dataclass(frozen=True)
class Pipeline:
    """The stages of a config in order."""

    config_name: str
    """Name of the config in messages."""
    root: str
    """Folder of the folders of all stages."""
    shared: Layer
    """Options outside of the stages."""
    stages: tuple[PipelineStage, ...]

    def layers(self, stage: str | None) -> list[Layer]:
        """Return the layers of a training stage: the shared options, those that follow from the order of the stages,
        and its own."""
        trainings = {
            stage.name: stage for stage in self.stages if stage.kind == "train"
        }
        if stage is None and len(trainings) == 1:
            stage = next(iter(trainings))
        if stage not in trainings:
            problem = "there are several stages"
            if stage is not None:
                problem = f"there is no training stage {stage!r}"
            names = ", ".join(trainings) or "none"
            raise UserError(
                f"{self.config_name}: {problem}: choose with --stage NAME: {names}"
            )
        chosen = trainings[stage]
        implied = Layer(self.config_name)
        place = f"{self.config_name}, stage {stage}"
        implied.add_option("output_dir", str(chosen.folder), "output_dir", place)
        earlier_stages = {
            "model_name": chosen.model_stage,
            "data_path": chosen.data_stage,
        }
        for option, earlier in earlier_stages.items():
            if earlier is not None:
                place = f"{self.config_name}{RESULT_SEPARATOR}{earlier.name}"
                implied.add_option(option, str(earlier.result), option, place)
        return [self.shared, implied, chosen.layer]


def source_layers(
    source: ConfigSource,
    stage: str | None,
    command_line: Layer,
) -> tuple[list[Layer], Mapping[str, Node]]:
    """Return the layers of a file, a dict or a TrainConfig, and the presets that it defines (USER_PRESETS), by name.

    With stages, `output_dir` of the command line is the folder of all stages. It is then removed from that layer.
    """
    if isinstance(source, TrainConfig):
        # Only what was set: defaults would win over the launcher and files.
        layer = canonical_layer("TrainConfig", Level.CONFIG, source.given_options())
        return [layer], {}
    tree, config_name = source_tree(source)
    presets = tree.value.get(USER_PRESETS, Node({}, None))
    if not isinstance(presets.value, dict):
        raise UserError(
            f"{presets.place(config_name)}: {USER_PRESETS} must hold blocks like "
            "`distributed`, by name"
        )
    pipeline = _pipeline_of(tree, config_name, command_line)
    if pipeline is not None:
        command_line.values.pop("output_dir", None)
        return pipeline.layers(stage or _stage_of_file(tree)), presets.value
    if stage is not None:
        raise UserError(
            f"{config_name}: stage {stage!r} was asked for, but there is no {TRAINING_STAGES} block "
            "to choose it from"
        )
    keys = {key: node for key, node in tree.value.items() if key != USER_PRESETS}
    return [Layer(config_name).add_keys(keys)], presets.value


def chosen_pipeline(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    stage: str | None = None,
) -> Pipeline | None:
    """Return the pipeline of a config, if stages are to be run. None if it is a single training: the config has no stages,
    or `stage`, the overrides or the file name a training stage."""
    command_line, chosen_stage = command_line_layer(overrides)
    tree, config_name = source_tree(source)
    pipeline = _pipeline_of(tree, config_name, command_line)
    name = stage or chosen_stage or _stage_of_file(tree)
    if pipeline is None or name is None:
        return pipeline
    # An unknown name counts as a training: loading it raises the error that lists the names.
    kinds = {stage.name: stage.kind for stage in pipeline.stages}
    return None if kinds.get(name, "train") == "train" else pipeline


def _stage_of_file(tree: Node) -> str | None:
    """Return the stage that a config itself chooses by its key `stage`; None without the key."""
    return str(tree.value["stage"].plain()) if "stage" in tree.value else None


def _pipeline_of(
    tree: Node,
    config_name: str,
    command_line: Layer,
) -> Pipeline | None:
    """Return the stages of a config. None if it has none. The command line may give the folder of all stages."""
    shared_keys = dict(tree.value)
    lists = [shared_keys.pop(key, None) for key in (STAGES, TRAINING_STAGES)]
    node = lists[0] or lists[1]
    if node is None:
        return None
    if None not in lists:
        raise UserError(
            f"{config_name}: {STAGES} and {TRAINING_STAGES} are two lists of stages; keep one"
        )
    for key in (USER_PRESETS, "stage"):
        shared_keys.pop(key, None)
    shared = Layer(config_name).add_keys(shared_keys)
    entries: list[tuple[str | None, Node]] = []
    if isinstance(node.value, dict):
        entries += node.value.items()
    elif isinstance(node.value, list):
        entries += [(None, tree_of_mapping(entry)) for entry in node.value]
    if not entries or not all(isinstance(entry.value, dict) for _, entry in entries):
        raise UserError(
            f"{node.place(config_name)}: {STAGES} must be a list of stages with their options"
        )
    template = command_line.value("output_dir")
    if template is None:
        template = str(shared.value("output_dir", "output"))
    root = _folder_of_stages(template, shared, command_line)
    stages: list[PipelineStage] = []
    for name, entry in entries:
        stages.append(
            _stage(name, dict(entry.value), config_name, root, stages, shared)
        )
    return Pipeline(config_name, root, shared, tuple(stages))


def _folder_of_stages(template: str, *layers: Layer) -> str:
    """Return the folder that a template names: once for all, so that a stage finds the result that it starts from."""
    values = {}
    for layer in layers:
        for option, value in layer.values.items():
            values[option] = value.value
    try:
        if "{time}" in template:
            raise ValueError("with {time} the stages could not go on at the next start")
        return expand_output_dir(template, values, {})
    except ValueError as error:
        raise UserError(f"output_dir: {template}: {error}") from error


def _stage(
    name: str | None,
    block: dict[str, Node],
    config_name: str,
    root: str,
    before: Sequence[PipelineStage],
    shared: Layer,
) -> PipelineStage:
    """Return one stage. `name`: its key, if stages are written by name. `block`: its keys. `before`: the stages before it.
    `shared`: the options outside of the stages."""
    if not name and "name" in block:
        name = str(block.pop("name").plain())
    start = block.pop("from", None)
    kind = _kind_of(block)
    number = len(before) + 1
    if not name:
        name = f"train{number}" if kind == "train" else f"{kind}-{number}"
    names_before = [stage.name for stage in before]
    if name in names_before or "/" in name or name.startswith("."):
        raise UserError(
            f"{config_name}: stage {name}: give each stage a name of its own, without / and not beginning with ."
        )
    layer = Layer(config_name)
    model_task = str(shared.value("task", "embed"))
    if kind == "train":
        layer.add_keys(block, f"{name}.")
        options = {key: value.value for key, value in layer.values.items()}
        model_task = str(layer.value("task", model_task))
    else:
        options = block[kind].plain()
        if not isinstance(options, dict):
            raise UserError(f"{config_name}: stage {name}: {kind} must hold options")
        # The kind of model that each command uses. A merge has that of the config.
        tasks = {"mine": "embed", "evaluate": "embed", "judge": "rerank"}
        model_task = tasks.get(kind, model_task)
    model_stage = None
    data_stage = None
    for stage in before:
        if stage.has_model and stage.model_task == model_task:
            model_stage = stage
        if stage.kind in DATA_FILE_OF_KIND:
            data_stage = stage
        elif stage.kind == kind == "train":
            data_stage = None
    if start is not None:
        models = {stage.name: stage for stage in before if stage.has_model}
        model_stage = models.get(str(start.plain()))
        if model_stage is None:
            raise UserError(
                f"{config_name}: stage {name} starts from {start.plain()}, and the stages before it that leave a model are "
                f"{', '.join(models) or 'none'}"
            )
    folder = Path(root, name)
    if "output_dir" in options:
        folder = Path(_folder_of_stages(str(options["output_dir"]), shared, layer))
    return PipelineStage(
        name,
        kind,
        layer,
        options,
        folder,
        tuple(before),
        model_task,
        model_stage,
        data_stage,
    )


def _kind_of(block: Mapping[str, Node]) -> StageKind:
    """Return what a stage does. `block`: its options, without `name` and `from`.

    A command stage has one key, its kind. `mine` is also an option of a training: a block is a training if it has other keys
    beside `mine`, or if `mine` has `every_epochs`.
    """
    for kind in COMMAND_KINDS:
        if set(block) != {kind}:
            continue
        options = block[kind].plain()
        is_option = isinstance(options, dict) and "every_epochs" in options
        if kind != "mine" or not is_option:
            return kind
    return "train"


def require_earlier_stage(resolved: ResolvedRun) -> None:
    """Raise UserError where a stage starts from the model or the data of an earlier one, and they are not there.

    Otherwise the folder would be asked for on the Hub.
    """
    config = resolved.config
    results = {
        "model_name": config.model.model_name,
        "data_path": config.data.data_path,
    }
    for option, path in results.items():
        origin = resolved.origins[option]
        _, is_result, name = origin.partition(RESULT_SEPARATOR)
        if is_result and not Path(str(path)).exists():
            raise UserError(
                f"{option}: {path} ({origin}) is not there: run that stage first (--from {name}), or give this one a "
                f"{option}"
            )


# ---- a config as text


def config_yaml(
    config: TrainConfig,
    origins: Mapping[str, str] | None = None,
    *,
    only_given: bool = False,
) -> str:
    """Return the config as YAML, in the order of the schema, with the origins as comments.

    `only_given`: without the options that have their default.
    """
    values = config.to_dict()
    # Of two options with the same meaning, only the one that has an effect.
    for name, replaced in REPLACES.items():
        if values[name] is not None:
            del values[replaced]
    if "temperature" not in config.objective.model_fields_set:
        # In the file it would count as given: learned temperatures, and those of several losses, would start from it.
        del values["temperature"]
    mine = config.data.mine
    if mine is not None:
        # Its other defaults depend on which options are given.
        values["mine"] = mine.model_dump(mode="json", exclude_unset=True)
    lines = []
    section = ""
    for name, option in all_options().items():
        if name not in values or (values[name] is None and option.default is None):
            continue
        if only_given and origins is not None and origins[name] == DEFAULT:
            continue
        if option.section != section:
            section = option.section
            lines += ["", f"# {section}"]
        text = f"{name}: {one_line_yaml(values[name])}"
        lines.append(f"{text}  # {origins[name]}" if origins else text)
    # Without the empty line before the first section.
    return "\n".join(lines[1:]) + "\n"


def save_config(config: TrainConfig, path: str | Path) -> None:
    """Write the config as a file that repeats the run with `vembed train PATH`."""
    Path(path).write_text(
        "# Every option of this run; `vembed train` with this file repeats it.\n"
        + config_yaml(config),
        "utf-8",
    )


def one_line_yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = yaml.dump(
        value,
        Dumper=CoreDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
    )
    return text.removesuffix("...\n").strip()
