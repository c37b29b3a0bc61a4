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
from vembed.config.fsdp import FSDP1_ONLY, FSDP2_ONLY
from vembed.config.layers import (
    COMMAND_LINE,
    RESULT_OF,
    SAME_SWITCH,
    Given,
    Layer,
    Level,
    command_line_layer,
    file_layer,
    launcher_layer,
    over_the_stage,
    own_preset,
    source_layers,
)
from vembed.config.options import all_options
from vembed.config.output_folder import expand_output_dir
from vembed.config.parsing import CoreDumper
from vembed.config.resolved import DEFAULT, ResolvedRun, decide
from vembed.config.schema import TrainConfig
from vembed.errors import UserError

UNSAID = ("use_fsdp", "temperature")
"""Options that are not written to config.yaml unless somebody has given them: `use_fsdp: false` rules FSDP out, and a
given temperature is where a learned one starts, in place of the model's own."""

DEFAULT_PRESET = "accelerate_fsdp"
"""Base of the FSDP options if no file is named."""

Source = str | Path | Mapping[str, Any] | TrainConfig

DECIDED_BY = {
    "global_batch_size": "batch_size",
    "warmup_steps": "warmup_ratio",
    "max_steps": "epochs",
    "gradient_cache_chunk_size": "micro_batch_tokens",
}
"""Map from an option to the one that it makes meaningless. The second is not written to config.yaml."""


def load_config(
    source: Source | ResolvedRun, overrides: Sequence[str] = ()
) -> TrainConfig:
    """Return the config of a file, a dict or a TrainConfig, with `key=value` overrides; UserError on anything wrong."""
    return resolve_run(source, overrides).config


def resolve_run(
    source: Source | ResolvedRun,
    overrides: Sequence[str] = (),
    *,
    stage: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> ResolvedRun:
    """Resolve a run from all its sources. The strongest first: the command line, the training config (a stage's block
    before the rest), what `accelerate launch` has set, the Accelerate file that is named, the defaults."""
    if isinstance(source, ResolvedRun):
        if not overrides:
            return source
        source = source.config
    command_line, chosen = command_line_layer(overrides)
    notes: list[str] = []
    configs = source_layers(source, stage or chosen)
    if isinstance(source, str | Path):
        for layer in configs:
            # This path first: the Accelerate file is read below, before the layers are merged.
            _beside_the_file(layer.given, ("accelerate_config",), Path(source), notes)
    configs += own_preset(source, [command_line, *reversed(configs)])
    launcher, launcher_notes = launcher_layer(env)
    file, weaker, stronger = _accelerate_layers(configs, command_line, launcher)
    notes += [*(file.notes if file is not None else ()), *launcher_notes]
    # Weakest first: in `_merge` a later layer wins.
    layers = [*weaker, launcher, *configs, *stronger, command_line]
    problems = [sentence for layer in layers for _, sentence in sorted(layer.problems)]
    given = _merge(layers, notes)
    _imply(given, problems)
    notes += _moved_stage(given)
    if isinstance(source, str | Path):
        _beside_the_file(
            given,
            ("data_path", "val_data_path", "image_root", *CODE),
            Path(source),
            notes,
        )
    own = given.get("model_class")
    if own is not None and own.value and "model_name" not in given:
        given["model_name"] = replace(own, option="model_name")
    _expand_output_dir(given, env, notes, problems)
    refused = set().union(*(layer.refused for layer in layers))
    for name, option in all_options().items():
        if option.is_required and name not in given and name not in refused:
            if source == {}:
                problems.append(
                    f"{name} is missing: give a config file, or {name}=... ({option.accepts})"
                )
            else:
                place = source if isinstance(source, str | Path) else "the config"
                problems.append(
                    f"{place}: {name} is missing: add `{name}: ...` ({option.accepts})"
                )
    if problems:
        raise _user_error(problems)
    # The default preset is no part of the config: nobody has named it, and `decide` uses it only where FSDP is on.
    named = {name: one for name, one in given.items() if one.level > Level.PRESET}
    config = TrainConfig(**{name: one.value for name, one in named.items()})
    problems = [
        broken.text({name: one.where for name, one in named.items()})
        for broken in rules.violations(config)
    ]
    if problems:
        raise _user_error(problems)
    return decide(
        config,
        given,
        origins={
            name: named[name].source if name in named else DEFAULT
            for name in all_options()
        },
        translated=tuple(line for layer in layers for line in layer.translated),
        notes=[*notes, *rules.remarks(config)],
        file=file,
        # `weaker` is empty only beside a launcher with FSDP options (`_accelerate_layers`).
        base=launcher.name if "use_fsdp" in launcher.given else weaker[0].name,
        env=env,
    )


def _accelerate_layers(
    configs: Sequence[Layer], command_line: Layer, launcher: Layer
) -> tuple[AccelerateFile | None, list[Layer], list[Layer]]:
    """Return the Accelerate file that is named, the layers that it gives below the training config, and those above.

    Where nobody names one, FSDP starts from the default preset, unless `accelerate launch` has brought FSDP options.
    """
    naming = next(
        (
            layer
            for layer in (command_line, *reversed(configs))
            if "accelerate_config" in layer.given
        ),
        None,
    )
    name = naming.given["accelerate_config"].value if naming is not None else None
    file = None if name is None else read_accelerate_file(name)
    named = [] if file is None else [file_layer(file, Level.FILE)]
    above = (
        [over_the_stage(named[0], configs[-1])]
        if naming is command_line and named and len(configs) > 1
        else []
    )
    if "use_fsdp" in launcher.given or (
        file is not None and file.distribution == "fsdp"
    ):
        return file, named, above
    return (
        file,
        [file_layer(read_accelerate_file(DEFAULT_PRESET), Level.PRESET), *named],
        above,
    )


def require_earlier_stage(resolved: ResolvedRun) -> None:
    """Raise UserError where a stage starts from an earlier one's result that is not there.

    Otherwise the folder would be asked for on the Hub.
    """
    origin, folder = resolved.origins["model_name"], resolved.config.model.model_name
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
    """Return the config as YAML, in the order of the schema, with the origins as comments. `only_given`: without the
    options that have their default."""
    values = config.to_dict()
    for kept, dropped in DECIDED_BY.items():
        if values[kept] is not None:
            del values[dropped]
    lines, section = [], ""
    for name, option in all_options().items():
        if name not in values or (values[name] is None and option.default is None):
            continue
        if name in UNSAID and name not in config.given:
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


def _merge(layers: Sequence[Layer], notes: list[str]) -> dict[str, Given]:
    """Let the stronger layers, which come later, override the weaker ones, and note each value that loses."""
    version = next(
        (
            one.given["fsdp_version"].value
            for one in reversed(layers)
            if "fsdp_version" in one.given
        ),
        2,
    )
    merged: dict[str, Given] = {}
    for layer in layers:
        for new in _of_version(layer, version, notes):
            # A stronger source also displaces the other spelling of the same switch (SAME_SWITCH).
            rivals = [
                new.option,
                *(
                    other
                    for pair in SAME_SWITCH
                    for other in pair
                    if new.option in pair
                ),
            ]
            for name in dict.fromkeys(rivals):
                old = merged.get(name)
                if old is None or (
                    name != new.option
                    and (name in layer.given or _agree(new.value, old.value))
                ):
                    continue
                if new.value == "auto" and old.level < Level.CONFIG:
                    break  # `auto` leaves it to what the file or the launcher says
                is_other_source = name != new.option or old.level != new.level
                if (
                    old.value != new.value
                    and old.level > Level.PRESET
                    and is_other_source
                ):
                    notes.append(f"{new} overrides {old}")
                del merged[name]
            else:
                # Unless the loop was left by `break`: then the weaker source keeps the option.
                merged[new.option] = new
    return merged


def _of_version(layer: Layer, version: int, notes: list[str]) -> list[Given]:
    """Return a layer's options; of a file or a launcher that speaks of the other FSDP version, those of both."""
    if layer.level >= Level.CONFIG or layer.given.get("fsdp_version") is None:
        return list(layer.given.values())
    if layer.given["fsdp_version"].value == version:
        return list(layer.given.values())
    special = sorted(set(layer.given) & (FSDP1_ONLY.keys() | FSDP2_ONLY.keys()))
    if special and layer.level > Level.PRESET:
        notes.append(
            f"{', '.join(special)} of {layer.name} not used: the run has fsdp_version: {version}"
        )
    return [one for name, one in layer.given.items() if name not in special]


def _agree(one: Any, other: Any) -> bool:
    """Return True if two switches for one option agree."""
    # Words of two spellings of one switch: strategy: fsdp is use_fsdp: true, FULL_SHARD is reshard_after_forward: true.
    meanings = {
        "fsdp": True,
        "FULL_SHARD": True,
        "HYBRID_SHARD": True,
        "SHARD_GRAD_OP": False,
    }
    means = [
        meanings.get(value, value) if isinstance(value, str) else value
        for value in (one, other)
    ]
    return "auto" in means or (
        all(isinstance(value, bool) for value in means) and means[0] == means[1]
    )


CODE = ("model_class", "wrap_policy")
"""Options that name a class or function in a file."""


def _imply(given: dict[str, Given], problems: list[str]) -> None:
    """Set the options that follow from another option, so that no other module has to derive them."""
    qlora = given.get("use_qlora")
    if qlora is not None and qlora.value and "use_lora" not in given:
        given["use_lora"] = Given(
            "use_lora", True, "use_qlora", f"implied by use_qlora, {qlora.where}"
        )
    batch, parts = (
        given.get("global_batch_size"),
        given.get("gradient_accumulation_steps"),
    )
    # Elsewhere an effective batch counts the accumulated batches; here a step takes the global batch at once.
    if (
        batch is not None
        and batch.key.endswith("effective_batch_size")
        and parts is not None
    ):
        if batch.value % parts.value:
            problems.append(
                f"{batch.where}: {batch.key}: {batch.value} must be a multiple of gradient_accumulation_steps: "
                f"{parts.value} ({parts.where})"
            )
        else:
            where = (
                f"{batch.where}, {batch.value} over {parts.value} accumulated batches"
            )
            given["global_batch_size"] = Given(
                "global_batch_size", batch.value // parts.value, batch.key, where
            )


def _moved_stage(given: Mapping[str, Given]) -> list[str]:
    """Return a note where the command line moves a stage's folder, and the folder of the stage before stays."""
    model, folder = given.get("model_name"), given.get("output_dir")
    if (
        model is None
        or RESULT_OF not in model.where
        or folder is None
        or folder.where != COMMAND_LINE
    ):
        return []
    return [
        f"output_dir: {folder.value} ({COMMAND_LINE}) is this stage's folder alone: it starts from {model.value} "
        f"({model.where}); model_name=FOLDER/final starts from another run of that stage"
    ]


def _expand_output_dir(
    given: dict[str, Given],
    env: Mapping[str, str],
    notes: list[str],
    problems: list[str],
) -> None:
    one = given.get("output_dir")
    if one is None:
        return
    resume = given["resume"].value if "resume" in given else False
    try:
        folder = expand_output_dir(
            one.value,
            {name: other.value for name, other in given.items()},
            env,
            resume=resume,
        )
    except ValueError as error:
        problems.append(f"output_dir: {one.value}: {error} ({one.where})")
        return
    if folder != one.value:
        notes.append(f"output_dir: {one.value} -> {folder}")
        given["output_dir"] = Given("output_dir", folder, one.key, one.where)


def _beside_the_file(
    given: dict[str, Given], names: Sequence[str], file: Path, notes: list[str]
) -> None:
    """Resolve relative paths in the current directory, else in the folder of the config file."""

    def found(name: str, path: str) -> str:
        try:
            if (
                Path(path).is_absolute()
                or Path(path).exists()
                or not (file.parent / path).exists()
            ):
                return path
        except (
            OSError,
            ValueError,
        ):  # not a valid file name: the reader of the data reports it
            return path
        notes.append(
            f"{name}: {path} is not in the current directory; using the one beside {file.name}"
        )
        return str(file.parent / path)

    def located(name: str, value: Any) -> Any:
        if name in CODE:
            place, _, what = str(value).rpartition(":")
            return f"{found(name, place)}:{what}" if place.endswith(".py") else value
        if isinstance(value, list):
            return [located(name, entry) for entry in value]
        if isinstance(value, DataSource):
            places = {"path": value.path, "val_data_path": value.val_data_path}
            return value.model_copy(
                update={
                    key: found(name, path)
                    for key, path in places.items()
                    if path is not None
                }
            )
        return found(name, value)

    for name in names:
        one = given.get(name)
        # Words of the command line are typed in the current directory, and a preset's name is no path.
        if (
            one is None
            or one.value is None
            or one.level is Level.COMMAND_LINE
            or one.value in preset_names()
        ):
            continue
        given[name] = replace(one, value=located(name, one.value))
