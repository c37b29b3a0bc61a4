"""Loading of a TrainConfig from files, dicts, the launcher's environment and the command line, with value origins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vembed.config import rules
from vembed.config.accelerate_file import preset_names
from vembed.config.layers import (
    COMMAND_LINE,
    LAUNCHER,
    RESULT_OF,
    Given,
    Layer,
    command_line_layer,
    launcher_layer,
    source_layers,
)
from vembed.config.options import all_options, shown
from vembed.config.parsing import CoreDumper
from vembed.config.schema import DataSource, TrainConfig
from vembed.errors import UserError

Source = str | Path | Mapping[str, Any] | TrainConfig

SAME_SWITCH = (
    ("batch_size", "global_batch_size"),
    ("warmup_ratio", "warmup_steps"),
    ("epochs", "max_steps"),
    ("micro_batch_tokens", "gradient_cache_chunk_size"),
    ("strategy", "use_fsdp"),
    ("fsdp_offload_params", "fsdp_cpu_offload"),
    ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"),
    ("gradient_checkpointing", "fsdp_activation_checkpointing"),
)
"""Pairs of options for one setting. An option of a later layer overrides its counterpart of an earlier layer."""

DECIDED_BY = {
    "global_batch_size": "batch_size",
    "warmup_steps": "warmup_ratio",
    "max_steps": "epochs",
    "gradient_cache_chunk_size": "micro_batch_tokens",
}
"""Map from an option to the one that it makes meaningless. The second is not written to config.yaml."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A config with the origin of each value."""

    config: TrainConfig
    origins: Mapping[str, str]
    """Map from option to origin: `cfg.yaml:7`, `command line`, `accelerate launch` or `default`."""
    translated: tuple[str, ...] = ()
    """Translations of aliases and foreign values, one line each."""
    notes: tuple[str, ...] = ()
    """Lines for the log: values that were overridden or have no effect."""


def load_config(source: Source | ResolvedConfig, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the config of a file, a dict or a TrainConfig with `key=value` overrides. Raise UserError if invalid."""
    return resolve_config(source, overrides).config


def resolve_config(
    source: Source | ResolvedConfig,
    overrides: Sequence[str] = (),
    *,
    stage: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> ResolvedConfig:
    """Return the config with the origin of each value.

    Precedence, lowest first: defaults, file, launcher, command line.
    """
    if isinstance(source, ResolvedConfig):
        if not overrides:
            return source
        source = source.config
    command_line, chosen = command_line_layer(overrides)
    layers = [*source_layers(source, stage or chosen), launcher_layer(env), command_line]
    problems = [sentence for layer in layers for _, sentence in sorted(layer.problems)]
    notes: list[str] = []
    given = _merge(layers, notes)
    _imply(given, problems)
    notes += _moved_stage(given)
    if isinstance(source, str | Path):
        _beside_the_file(given, Path(source), notes)
    refused = set().union(*(layer.refused for layer in layers))
    for name, option in all_options().items():
        if option.is_required and name not in given and name not in refused:
            if source == {}:
                problems.append(f"{name} is missing: give a config file, or {name}=... ({option.accepts})")
            else:
                file = source if isinstance(source, str | Path) else "the config"
                problems.append(f"{file}: {name} is missing: add `{name}: ...` ({option.accepts})")
    if problems:
        raise _user_error(problems)
    config = TrainConfig.model_validate({name: one.value for name, one in given.items()})
    problems = [broken.text({name: one.where for name, one in given.items()}) for broken in rules.violations(config)]
    if problems:
        raise _user_error(problems)
    origins = {
        name: given[name].where.replace(", line ", ":") if name in given else "default" for name in all_options()
    }
    translated = tuple(line for layer in layers for line in layer.translated)
    return ResolvedConfig(config, origins, translated, (*notes, *rules.remarks(config)))


def require_earlier_stage(resolved: ResolvedConfig) -> None:
    """Raise UserError where a stage starts from an earlier one's result that is not there.

    Otherwise the folder would be asked for on the Hub.
    """
    origin, folder = resolved.origins["model_name"], resolved.config.model_name
    if RESULT_OF in origin and not Path(folder).is_dir():
        raise UserError(f"{folder} ({origin}) is not there: train that stage first, or give this one a model_name")


def render(config: TrainConfig, origins: Mapping[str, str] | None = None) -> str:
    """Return the config as YAML, in the order of the schema, with the origins as comments."""
    values = config.to_dict()
    for kept, dropped in DECIDED_BY.items():
        if values[kept] is not None:
            del values[dropped]
    lines, section = [], ""
    for name, option in all_options().items():
        if name not in values or (values[name] is None and option.default is None):
            continue
        if option.section != section:
            section = option.section
            lines += ["", f"# {section}"]
        text = f"{name}: {one_line_yaml(values[name])}"
        lines.append(f"{text}  # {origins[name]}" if origins else text)
    return "\n".join(lines[1:]) + "\n"


def save_config(config: TrainConfig, path: str | Path) -> None:
    """Write the config as a file that repeats the run with `vembed train PATH`."""
    Path(path).write_text(
        "# Every option of this run; `vembed train` with this file repeats it.\n" + render(config), "utf-8"
    )


def one_line_yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = yaml.dump(
        value, Dumper=CoreDumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return text.removesuffix("...\n").strip()


def _user_error(problems: Sequence[str]) -> UserError:
    first, *others = problems
    return UserError("\n".join([first, *(f"also: {problem}" for problem in others)]))


def _merge(layers: Sequence[Layer], notes: list[str]) -> dict[str, Given]:
    """Merge the layers. Later layers take precedence, also over the counterparts in SAME_SWITCH."""
    merged: dict[str, Given] = {}
    for layer in layers:
        for pair in SAME_SWITCH:
            for name, other in (pair, pair[::-1]):
                if name in layer.given and other not in layer.given and other in merged:
                    new, old = layer.given[name], merged[other]
                    if not _agree(new.value, old.value):
                        del merged[other]
                        notes.append(f"{_said(new)} overrides {_said(old)}")
        for name, new in layer.given.items():
            if layer.name == LAUNCHER and name in merged and merged[name].value != new.value:
                notes.append(f"{_said(new)} holds over {_said(merged[name])}")
            merged[name] = new
    return merged


def _agree(one: Any, other: Any) -> bool:
    """Return True if two switches of one setting are both on or both off."""
    return (one in (True, "fsdp") and other in (True, "fsdp")) or (one is False and other is False)


def _said(one: Given) -> str:
    return f"{one.key}: {shown(one.value)} ({one.where})"


def _imply(given: dict[str, Given], problems: list[str]) -> None:
    """Set the options that follow from another option, so that no other module has to derive them."""
    qlora = given.get("use_qlora")
    if qlora is not None and qlora.value and "use_lora" not in given:
        given["use_lora"] = Given("use_lora", True, "use_qlora", f"implied by use_qlora, {qlora.where}")
    batch, parts = given.get("global_batch_size"), given.get("gradient_accumulation_steps")
    if batch is not None and batch.key.endswith("effective_batch_size") and parts is not None:
        if batch.value % parts.value:
            problems.append(
                f"{batch.where}: {batch.key}: {batch.value} must be a multiple of gradient_accumulation_steps: "
                f"{parts.value} ({parts.where})"
            )
        else:
            where = f"{batch.where}, {batch.value} over {parts.value} accumulated batches"
            given["global_batch_size"] = Given("global_batch_size", batch.value // parts.value, batch.key, where)


def _moved_stage(given: Mapping[str, Given]) -> list[str]:
    """Return a note where the command line moves a stage's folder, and the folder of the stage before stays."""
    model, folder = given.get("model_name"), given.get("output_dir")
    if model is None or RESULT_OF not in model.where or folder is None or folder.where != COMMAND_LINE:
        return []
    return [
        f"output_dir: {folder.value} ({COMMAND_LINE}) is this stage's folder alone: it starts from {model.value} "
        f"({model.where}); model_name=FOLDER/final starts from another run of that stage"
    ]


def _beside_the_file(given: dict[str, Given], file: Path, notes: list[str]) -> None:
    """Resolve relative paths in the current directory, else in the folder of the config file."""

    def found(name: str, path: str) -> str:
        try:
            if Path(path).is_absolute() or Path(path).exists() or not (file.parent / path).exists():
                return path
        except (OSError, ValueError):  # not a valid file name: the reader of the data reports it
            return path
        notes.append(f"{name}: {path} is not in the current directory; using the one beside {file.name}")
        return str(file.parent / path)

    def located(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [located(name, entry) for entry in value]
        if isinstance(value, DataSource):
            return value.model_copy(update={"path": found(name, value.path)})
        return found(name, value)

    for name in ("data_path", "val_data_path", "image_root", "accelerate_config"):
        one = given.get(name)
        if one is None or one.value is None or one.where == COMMAND_LINE or one.value in preset_names():
            continue
        given[name] = Given(name, located(name, one.value), one.key, one.where)
