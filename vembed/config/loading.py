"""Loading of a TrainConfig from files, dicts, the launcher's environment and the command line, with value origins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from vembed.config import rules
from vembed.config.accelerate_file import (
    AccelerateFile,
    preset_names,
    read_accelerate_file,
)
from vembed.config.entries import DataSource
from vembed.config.fsdp import FSDP1_ONLY
from vembed.config.layers import (
    COMMAND_LINE,
    RESULT_OF,
    SLOTS,
    Layer,
    Level,
    OptionValue,
    command_line_layer,
    file_layer,
    launcher_layer,
    over_the_stage,
    slot_of,
    source_layers,
    user_preset_layers,
)
from vembed.config.options import all_options
from vembed.config.output_folder import expand_output_dir
from vembed.config.parsing import CoreDumper
from vembed.config.resolved import DEFAULT, ResolvedRun, decide
from vembed.config.schema import TrainConfig
from vembed.errors import UserError

DEFAULT_PRESET = "accelerate_fsdp"
"""Base of the FSDP options if no file is named."""
CODE_OPTIONS = ("model_class", "fsdp_auto_wrap_policy")
"""Options that name a class or function in a file."""
PATH_OPTIONS = ("data_path", "val_data_path", "image_root", *CODE_OPTIONS)

Source = str | Path | Mapping[str, Any] | TrainConfig


def load_config(
    source: Source | ResolvedRun, overrides: Sequence[str] = ()
) -> TrainConfig:
    """Return the checked config of a file, a dict or a `TrainConfig`, with `key=value` overrides.

    Raises:
        UserError: a key is unknown, a value has the wrong type, or options contradict each other.
    """
    return resolve_run(source, overrides).config


def resolve_run(
    source: Source | ResolvedRun,
    overrides: Sequence[str] = (),
    *,
    stage: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> ResolvedRun:
    """Resolve a run from all its sources.

    The strongest first: the command line, the training config (a stage's block before the
    rest), what `accelerate launch` has set, the Accelerate file that is named, the defaults.
    """
    if isinstance(source, ResolvedRun):
        if not overrides:
            return source
        source = source.config
    file_path = Path(source) if isinstance(source, str | Path) else None
    notes: list[str] = []
    command_line, chosen_stage = command_line_layer(overrides)
    configs = source_layers(source, stage or chosen_stage)
    if file_path is not None:
        # Before the layers are merged, since the Accelerate file is read for that.
        for layer in configs:
            find_beside_file(layer.values, ("accelerate_config",), file_path, notes)
    strongest_first = [command_line, *reversed(configs)]
    configs += user_preset_layers(source, strongest_first)
    launcher, launcher_notes = launcher_layer(env)
    file, weaker, stronger = _accelerate_layers(configs, command_line, launcher)
    if file is not None:
        notes += file.notes
    notes += launcher_notes
    # Weakest first: in `_merge` a later layer wins.
    layers = [*weaker, launcher, *configs, *stronger, command_line]
    problems = []
    translated: list[str] = []
    for layer in layers:
        problems += [sentence for _, sentence in sorted(layer.problems)]
        translated += layer.translated
    values = _merge(layers, notes)
    _add_implied_options(values, problems)
    notes += _moved_stage_notes(values)
    if file_path is not None:
        find_beside_file(values, PATH_OPTIONS, file_path, notes)
    # After its path is resolved: without weights, the class is the model's name too.
    model_class = values.get("model_class")
    if model_class is not None and model_class.value and "model_name" not in values:
        values["model_name"] = replace(model_class, option="model_name")
    _expand_output_dir(values, env, notes, problems)
    problems += _missing_options(source, layers, values)
    if problems:
        raise _user_error(problems)
    # Nobody has named the default preset. `decide` uses it only where FSDP is on.
    named = {}
    for name, value in values.items():
        if value.level > Level.PRESET:
            named[name] = value
    config = TrainConfig(**{name: value.value for name, value in named.items()})
    places = {name: value.place for name, value in named.items()}
    problems = [violation.text(places) for violation in rules.violations(config)]
    if problems:
        raise _user_error(problems)
    origins = dict.fromkeys(all_options(), DEFAULT)
    for name, value in named.items():
        origins[name] = value.source
    # `weaker` is empty only beside a launcher with FSDP options.
    base = launcher.name if _shards(launcher) else weaker[0].name
    return decide(
        config,
        values,
        origins=origins,
        translated=tuple(translated),
        notes=[*notes, *rules.remarks(config)],
        file=file,
        base=base,
        env=env,
    )


def _shards(launcher: Layer) -> bool:
    strategy = launcher.values.get("strategy")
    return strategy is not None and strategy.value == "fsdp"


def _accelerate_layers(
    configs: Sequence[Layer], command_line: Layer, launcher: Layer
) -> tuple[AccelerateFile | None, list[Layer], list[Layer]]:
    """Return the named Accelerate file, the layers of it below the config, and those above.

    Where nobody names a file, FSDP starts from the default preset, unless `accelerate
    launch` has brought FSDP options.
    """
    naming = None
    for layer in (command_line, *reversed(configs)):
        if naming is None and "accelerate_config" in layer.values:
            naming = layer
    name = None if naming is None else naming.values["accelerate_config"].value
    file = None
    weaker: list[Layer] = []
    stronger: list[Layer] = []
    if name is not None:
        file = read_accelerate_file(name)
        weaker = [file_layer(file, Level.FILE)]
        if naming is command_line and len(configs) > 1:
            stronger = [over_the_stage(weaker[0], configs[-1])]
    is_base_known = file is not None and file.distribution == "fsdp"
    if not is_base_known and not _shards(launcher):
        preset = file_layer(read_accelerate_file(DEFAULT_PRESET), Level.PRESET)
        weaker = [preset, *weaker]
    return file, weaker, stronger


def _missing_options(
    source: Source, layers: Sequence[Layer], values: Mapping[str, OptionValue]
) -> list[str]:
    refused: set[str] = set()
    for layer in layers:
        refused |= layer.refused
    problems = []
    for name, option in all_options().items():
        if not option.is_required or name in values or name in refused:
            continue
        if source == {}:
            way_out = f"give a config file, or {name}=... ({option.accepts})"
            problems.append(f"{name} is missing: {way_out}")
        else:
            place = source if isinstance(source, str | Path) else "the config"
            way_out = f"add `{name}: ...` ({option.accepts})"
            problems.append(f"{place}: {name} is missing: {way_out}")
    return problems


def require_earlier_stage(resolved: ResolvedRun) -> None:
    """Raise UserError where a stage starts from an earlier one's result that is not there.

    Otherwise the folder would be asked for on the Hub.
    """
    origin = resolved.origins["model_name"]
    folder = resolved.config.model.model_name
    if RESULT_OF in origin and not Path(folder).is_dir():
        raise UserError(
            f"{folder} ({origin}) is not there: train that stage first, or give this one a model_name"
        )


def render(
    config: TrainConfig,
    origins: Mapping[str, str] | None = None,
    *,
    only_given: bool = False,
) -> str:
    """Return the config as YAML, in the order of the schema, with the origins as comments.

    `only_given`: without the options that have their default.
    """
    values = config.to_dict()
    # Of two options for one thing, only the one that counts.
    for name, replaced in SLOTS.items():
        if values[name] is not None:
            del values[replaced]
    if "temperature" not in config.given:
        # A learned temperature starts from the model's own, unless this option is given.
        del values["temperature"]
    lines: list[str] = []
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
        + render(config),
        "utf-8",
    )


def one_line_yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    if value is None or isinstance(
        value, bool | int
    ):  # as the dumper writes them, without its cost for each option
        return "null" if value is None else str(value).lower()
    text = yaml.dump(
        value,
        Dumper=CoreDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
    )
    return text.removesuffix("...\n").strip()


def _user_error(problems: Sequence[str]) -> UserError:
    first, *others = problems
    return UserError("\n".join([first, *(f"also: {problem}" for problem in others)]))


def _merge(layers: Sequence[Layer], notes: list[str]) -> dict[str, OptionValue]:
    """Let the stronger layers, which come later, override the weaker ones.

    Each value that loses gets a note.
    """
    version = 2
    for layer in layers:
        if "fsdp_version" in layer.values:
            version = layer.values["fsdp_version"].value
    merged: dict[str, OptionValue] = {}
    for layer in layers:
        for new in _values_of_version(layer, version, notes):
            old = merged.get(new.option)
            # `auto` leaves an option to what the file or the launcher says.
            if old is not None and new.value == "auto" and old.level < Level.CONFIG:
                continue
            for name in list(merged):
                old = merged[name]
                if slot_of(name) != slot_of(new.option):
                    continue
                is_same_option = name == new.option
                is_auto = "auto" in (new.value, old.value)
                if not is_same_option and (name in layer.values or is_auto):
                    continue
                is_other_source = not is_same_option or old.level != new.level
                is_seen = old.level > Level.PRESET and is_other_source
                if old.value != new.value and is_seen:
                    notes.append(f"{new} overrides {old}")
                del merged[name]
            merged[new.option] = new
    return merged


def _values_of_version(
    layer: Layer, version: int, notes: list[str]
) -> list[OptionValue]:
    """Return a layer's values. Of a file for the other FSDP version, those that both have."""
    values = list(layer.values.values())
    version_of_layer = layer.values.get("fsdp_version")
    if layer.level >= Level.CONFIG or version_of_layer is None:
        return values
    if version_of_layer.value == version:
        return values
    special = sorted(layer.values.keys() & FSDP1_ONLY.keys())
    if special and layer.level > Level.PRESET:
        notes.append(
            f"{', '.join(special)} of {layer.name} not used: the run has fsdp_version: "
            f"{version}"
        )
    return [value for value in values if value.option not in special]


def _add_implied_options(values: dict[str, OptionValue], problems: list[str]) -> None:
    """Set the options that follow from another option, so that nothing derives them later."""
    qlora = values.get("use_qlora")
    if qlora is not None and qlora.value and "use_lora" not in values:
        place = f"implied by use_qlora, {qlora.place}"
        values["use_lora"] = OptionValue("use_lora", True, "use_qlora", place)
    batch = values.get("global_batch_size")
    parts = values.get("gradient_accumulation_steps")
    if batch is None or parts is None or not batch.key.endswith("effective_batch_size"):
        return
    # Elsewhere an effective batch counts the accumulated batches. Here it is one of them.
    if batch.value % parts.value:
        problems.append(
            f"{batch.place}: {batch.key}: {batch.value} must be a multiple of "
            f"gradient_accumulation_steps: {parts.value} ({parts.place})"
        )
        return
    place = f"{batch.place}, {batch.value} over {parts.value} accumulated batches"
    values["global_batch_size"] = replace(
        batch, value=batch.value // parts.value, place=place
    )


def _moved_stage_notes(values: Mapping[str, OptionValue]) -> list[str]:
    """Return a note where the command line moves a stage's folder, but not the one before."""
    model = values.get("model_name")
    folder = values.get("output_dir")
    if model is None or RESULT_OF not in model.place:
        return []
    if folder is None or folder.place != COMMAND_LINE:
        return []
    return [
        f"output_dir: {folder.value} ({COMMAND_LINE}) is this stage's folder alone: it "
        f"starts from {model.value} ({model.place}); model_name=FOLDER/final starts from "
        "another run of that stage"
    ]


def _expand_output_dir(
    values: dict[str, OptionValue],
    env: Mapping[str, str],
    notes: list[str],
    problems: list[str],
) -> None:
    template = values.get("output_dir")
    if template is None:
        return
    plain = {name: value.value for name, value in values.items()}
    resume = plain.get("resume", False)
    try:
        folder = expand_output_dir(template.value, plain, env, resume=resume)
    except ValueError as error:
        problems.append(f"output_dir: {template.value}: {error} ({template.place})")
        return
    if folder != template.value:
        notes.append(f"output_dir: {template.value} -> {folder}")
        values["output_dir"] = replace(template, value=folder)


def find_beside_file(
    values: dict[str, OptionValue], names: Sequence[str], file: Path, notes: list[str]
) -> None:
    """Resolve relative paths in the current directory, else in the config file's folder."""

    def find(name: str, path: str) -> str:
        beside = file.parent / path
        try:
            is_clear = Path(path).is_absolute() or Path(path).exists()
            if is_clear or not beside.exists():
                return path
        except (OSError, ValueError):
            return path  # not a valid file name: the reader of the data reports it
        notes.append(
            f"{name}: {path} is not in the current directory; using the one beside "
            f"{file.name}"
        )
        return str(beside)

    def find_all(name: str, value: Any) -> Any:
        if name in CODE_OPTIONS:
            path, _, attribute = str(value).rpartition(":")
            return f"{find(name, path)}:{attribute}" if path.endswith(".py") else value
        if isinstance(value, list):
            return [find_all(name, entry) for entry in value]
        if isinstance(value, DataSource):
            paths = {"path": find(name, value.path)}
            if value.val_data_path is not None:
                paths["val_data_path"] = find(name, value.val_data_path)
            return value.model_copy(update=paths)
        return find(name, value)

    for name in names:
        value = values.get(name)
        if value is None or value.value is None or value.value in preset_names():
            continue
        # Arguments of the command line are typed in the current directory.
        if value.level is not Level.COMMAND_LINE:
            values[name] = replace(value, value=find_all(name, value.value))
