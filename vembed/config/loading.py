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
    file_layer,
    launcher_layer,
    preset_names,
    read_accelerate_file,
)
from vembed.config.entries import DataSource
from vembed.config.layers import (
    COMMAND_LINE,
    RESULT_OF,
    SLOTS,
    USER_PRESETS,
    Layer,
    Level,
    OptionValue,
    command_line_layer,
    source_layers,
)
from vembed.config.options import all_options
from vembed.config.output_folder import expand_output_dir
from vembed.config.parsing import CoreDumper, Node
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
    config_file = Path(source) if isinstance(source, str | Path) else None
    notes: list[str] = []
    command_line, chosen_stage = command_line_layer(overrides)
    configs, presets = source_layers(source, stage or chosen_stage)
    for layer in configs:
        # Before the layers are merged, since the Accelerate file is read for that.
        find_beside_file(layer.values, ("accelerate_config",), config_file, notes)
    if presets:
        configs += _user_preset(
            presets, [command_line, *reversed(configs)], config_file
        )

    # Where nobody names a file, FSDP starts from the default preset, unless `accelerate
    # launch` has brought FSDP options.
    launcher, launcher_notes = launcher_layer(env)
    naming = _naming_layer([command_line, *reversed(configs)])
    file = None
    files = []
    if naming is not None:
        file = read_accelerate_file(naming.values["accelerate_config"].value)
        notes += file.notes
        files.append(file_layer(file, Level.FILE))
    base = files[0].name if files else ""
    if "strategy" in launcher.values:
        base = launcher.name
    elif file is None or file.distribution != "fsdp":
        preset = read_accelerate_file(DEFAULT_PRESET)
        files.insert(0, file_layer(preset, Level.PRESET))
        base = preset.source
    notes += launcher_notes
    if naming is command_line and len(configs) > 1:
        _override_stage(files[-1], configs, notes)

    layers = [*files, launcher, *configs, command_line]
    problems = []
    translated: list[str] = []
    refused: set[str] = set()
    for layer in layers:
        problems += [sentence for _, sentence in sorted(layer.problems)]
        translated += layer.translated
        refused |= layer.refused
    values = _merge(layers, notes)
    _divide_effective_batch(values, problems)
    notes += _moved_stage_notes(values)
    find_beside_file(values, PATH_OPTIONS, config_file, notes)
    # After its path is resolved: without weights, the class is the model's name too.
    model_class = values.get("model_class")
    if model_class is not None and model_class.value and "model_name" not in values:
        values["model_name"] = replace(model_class, option="model_name")
    _expand_output_dir(values, env, notes, problems)
    for name, option in all_options().items():
        if option.is_required and name not in values and name not in refused:
            place = f"{config_file or 'the config'}: " if source != {} else ""
            problems.append(
                f"{place}{name} is missing: add `{name}: ...` to a config file, or give {name}=... ({option.accepts})"
            )
    _raise(problems)

    # Nobody has named the default preset. `decide` uses it only where FSDP is on.
    named = {}
    for name, value in values.items():
        if value.level > Level.PRESET:
            named[name] = value
    config = TrainConfig(**{name: value.value for name, value in named.items()})
    places = {name: value.place for name, value in named.items()}
    _raise(rules.violations(config, places))
    origins = dict.fromkeys(all_options(), DEFAULT)
    for name, value in named.items():
        origins[name] = value.source
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


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise UserError("\nalso: ".join(problems))


def _naming_layer(strongest_first: Sequence[Layer]) -> Layer | None:
    """Return the layer that names the Accelerate file."""
    for layer in strongest_first:
        if "accelerate_config" in layer.values:
            value = layer.values["accelerate_config"].value
            return None if value is None else layer
    return None


def _user_preset(
    presets: Mapping[str, Node], strongest_first: Sequence[Layer], file: Path | None
) -> list[Layer]:
    """Return the layer of the block of `distributed_examples` that `accelerate_config` names, which is taken out of
    its layer; none if it names a file."""
    layer = _naming_layer(strongest_first)
    if layer is None:
        return []
    named = layer.values["accelerate_config"]
    if named.value in presets:
        del layer.values["accelerate_config"]
        block = {"distributed": presets[named.value]}
        prefix = f"{USER_PRESETS}.{named.value}."
        return [Layer(str(file or "the config")).take_all(block, prefix)]
    if named.value in preset_names() or Path(str(named.value)).exists():
        return []
    known = ", ".join([*presets, *preset_names()])
    raise UserError(
        f"accelerate_config: {named.value!r} ({named.place}) is neither a file nor "
        f"a preset ({known})"
    )


def _override_stage(file: Layer, configs: Sequence[Layer], notes: list[str]) -> None:
    """Take out of the config what the stage's block and the file give: the command line named the file for this
    launch, and the block is for any."""
    slots = {SLOTS.get(name, name) for name in configs[-1].values}
    for name in file.values:
        if SLOTS.get(name, name) not in slots:
            continue
        new = replace(
            file.values[name], place=f"{file.name}, named on the command line"
        )
        for layer in configs:
            for other in list(layer.values):
                if SLOTS.get(other, other) == SLOTS.get(name, name):
                    notes.append(f"{new} overrides {layer.values.pop(other)}")


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


def _merge(layers: Sequence[Layer], notes: list[str]) -> dict[str, OptionValue]:
    """Let the stronger layers, which come later, override the weaker ones.

    Each value that loses gets a note.
    """
    merged: dict[str, OptionValue] = {}
    for layer in layers:
        for new in layer.values.values():
            old = merged.get(new.option)
            # `auto` leaves an option to what the file or the launcher says.
            if old is not None and new.value == "auto" and old.level < Level.CONFIG:
                continue
            slot = SLOTS.get(new.option, new.option)
            for name in [name for name in merged if SLOTS.get(name, name) == slot]:
                old = merged[name]
                is_other = name != new.option
                is_auto = "auto" in (new.value, old.value)
                if is_other and (name in layer.values or is_auto):
                    continue
                is_seen = old.level > Level.PRESET
                is_stronger = is_other or old.level != new.level
                if is_seen and is_stronger and old.value != new.value:
                    notes.append(f"{new} overrides {old}")
                del merged[name]
            merged[new.option] = new
    return merged


def _divide_effective_batch(
    values: dict[str, OptionValue], problems: list[str]
) -> None:
    """Elsewhere an effective batch counts the accumulated batches. Here it is one of them."""
    batch = values.get("global_batch_size")
    parts = values.get("gradient_accumulation_steps")
    if batch is None or parts is None or not batch.key.endswith("effective_batch_size"):
        return
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
    try:
        folder = expand_output_dir(template.value, plain, env)
    except ValueError as error:
        problems.append(f"output_dir: {template.value}: {error} ({template.place})")
        return
    if folder != template.value:
        notes.append(f"output_dir: {template.value} -> {folder}")
        values["output_dir"] = replace(template, value=folder)


def find_beside_file(
    values: dict[str, OptionValue],
    names: Sequence[str],
    file: Path | None,
    notes: list[str],
) -> None:
    """Resolve relative paths in the current directory, else in the config file's folder."""
    if file is None:
        return

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
