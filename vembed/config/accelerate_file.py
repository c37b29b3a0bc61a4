"""Accelerate config files and presets, and the environment variables that `accelerate launch` sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import vembed
from vembed.config.aliases import FIXED_IN_FSDP, NoEffect, as_bool, normalise, target_of
from vembed.config.layers import Layer, Level, plain_layer
from vembed.config.options import all_options, join_words, quoted
from vembed.config.parsing import Node, read_tree
from vembed.errors import UserError
from vembed.names import nearest

Distribution = Literal["single", "ddp", "fsdp"]

_TOP_KEYS = """
    command_file commands compute_environment debug deepspeed_config distributed_type downcast_bf16 dynamo_config
    enable_cpu_affinity fp8_config fsdp_config gpu_ids machine_rank main_process_ip main_process_port
    main_training_function megatron_lm_config mixed_precision mpirun_config num_machines num_processes
    parallelism_config rdzv_backend same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone use_cpu
"""
TOP_KEYS = frozenset(_TOP_KEYS.split())
"""Keys that Accelerate's own reader accepts; a test compares them with the installed version."""
LAUNCHER_ONLY = frozenset({"activation_checkpointing_offload", "ignored_modules"})
"""Keys of fsdp_config that Accelerate accepts and vembed ignores."""
IGNORED = (
    "dynamo_config",
    "fp8_config",
    "megatron_lm_config",
    "mpirun_config",
    "deepspeed_config",
    "parallelism_config",
)
DISTRIBUTIONS: dict[str, Distribution] = {
    "FSDP": "fsdp",
    "NO": "single",
    # An unquoted NO that another tool has read by YAML 1.1 and written again.
    "FALSE": "single",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "MULTI_XPU": "ddp",
    "MULTI_NPU": "ddp",
    "MULTI_MLU": "ddp",
    "MULTI_HPU": "ddp",
}
ACCELERATE_MIN_NUM_PARAMS = 100_000_000
"""Size that `accelerate launch` exports if its file gives none."""
LAUNCHER = "accelerate launch"


@dataclass(frozen=True, slots=True)
class AccelerateFile:
    """Contents of an Accelerate config, in vembed's option names and values."""

    source: str
    distribution: Distribution
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    """Values of the fsdp_* options."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    num_processes: int | None = None
    """Per machine; None: one per device."""
    num_machines: int | None = None
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    use_cpu: bool = False
    gpu_ids: str | None = None
    notes: tuple[str, ...] = ()


def presets_folder() -> Path:
    """Return the folder of the presets."""
    return Path(vembed.__file__).parent / "configs"


TRAINING_CONFIGS = ("free_transformer",)
"""Files beside the presets that are training configs."""


def preset_names() -> list[str]:
    """Return the names of the presets that `accelerate_config` accepts."""
    return sorted(
        path.stem
        for path in presets_folder().glob("*.yaml")
        if path.stem not in TRAINING_CONFIGS
    )


def find_accelerate_file(name: str) -> Path:
    """Return the file of a preset name or a path. Raise UserError with the known names if there is none."""
    if name in preset_names():
        return presets_folder() / f"{name}.yaml"
    path = Path(name)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise UserError(
            f"accelerate_config: {quoted(name)} cannot be read: {error.strerror}"
        ) from None
    # `configs/accelerate_fsdp.yaml` names the preset even without a checkout.
    if path.stem in preset_names() and path.parent.name == "configs":
        return presets_folder() / path.name
    near = nearest(path.stem, preset_names())
    hint = f", did you mean {near!r}?" if near else ""
    raise UserError(
        f"accelerate_config: {name!r} is neither a file nor a preset ({join_words(preset_names())}){hint}"
    )


def read_accelerate_file(name: str) -> AccelerateFile:
    """Read a preset or a file. Unknown keys are errors, also inside fsdp_config, where Accelerate ignores them."""
    path = find_accelerate_file(name)
    source = str(path)
    if path.parent == presets_folder():
        source = f"configs/{path.name}"
    notes: list[str] = []
    keys = _known_keys(read_tree(path), source, notes)
    value = {key: node.plain() for key, node in keys.items()}
    distribution = DISTRIBUTIONS.get(str(value.get("distributed_type")).upper())
    if distribution is None:
        raise UserError(
            f"{source}: distributed_type must be FSDP, MULTI_GPU, MULTI_CPU or NO for vembed, but is "
            f"{quoted(value.get('distributed_type'))}"
        )
    fsdp = {}
    if value.get("fsdp_config"):
        fsdp = _fsdp_options(keys["fsdp_config"], source, notes)
    if distribution == "fsdp" and "fsdp_version" not in fsdp:
        fsdp["fsdp_version"] = 1
        notes.append(
            f"{source} gives no fsdp_version, which means 1 to Accelerate, and so it does here: fsdp_version: 2 in "
            "the file or in the training config chooses the newer one"
        )
    precision = value.get("mixed_precision")
    if precision is not None:
        precision = normalise("mixed_precision", precision)
        if precision not in ("no", "bf16", "fp16"):
            raise UserError(
                f"{source}: mixed_precision must be no, bf16 or fp16, but is {quoted(precision)}"
            )
    if precision == "no":
        notes.append(_not_counted(f"mixed_precision: no in {source}"))
    numbers: dict[str, int | None] = {}
    for key in ("num_machines", "machine_rank", "main_process_port", "num_processes"):
        number = value.get(key)
        if key == "num_processes" and str(number) in ("auto", "gpu", "-1"):
            number = None
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_number and 0 <= number < 2**20):
            raise UserError(
                f"{source}: {key} must be a whole number, but is {quoted(number)}"
            )
        numbers[key] = number
    # Accelerate counts the processes of all machines together.
    machines = numbers["num_machines"] or 1
    processes = numbers["num_processes"]
    if processes is not None and (processes < 1 or processes % machines):
        raise UserError(
            f"{source}: num_processes: {processes} (over all machines) must be a multiple of num_machines: {machines}"
        )
    try:
        use_cpu = as_bool(value.get("use_cpu") or False)
    except ValueError as error:
        raise UserError(f"{source}: use_cpu {error}") from None
    address = value.get("main_process_ip")
    gpu_ids = str(value.get("gpu_ids", "all"))
    return AccelerateFile(
        source=source,
        distribution=distribution,
        fsdp=fsdp,
        mixed_precision=precision,
        num_processes=None if processes is None else processes // machines,
        num_machines=numbers["num_machines"] or None,
        machine_rank=numbers["machine_rank"] or 0,
        main_process_ip=str(address) if address else None,
        main_process_port=numbers["main_process_port"],
        use_cpu=use_cpu,
        gpu_ids=None if gpu_ids in ("all", "None") else gpu_ids,
        notes=tuple(notes),
    )


def file_layer(file: AccelerateFile, level: Level) -> Layer:
    """Return the layer of an Accelerate file. bf16 is what `auto` means on a GPU that has it, and the same file is to
    run on a CPU too; "no" is what Accelerate writes where nobody has answered: neither is a decision."""
    options: dict[str, Any] = dict(file.fsdp)
    if level is not Level.PRESET:
        options["strategy"] = file.distribution
        if file.mixed_precision == "fp16":
            options["mixed_precision"] = "fp16"
        if file.num_processes is not None:
            options["num_processes"] = file.num_processes
        if file.num_machines is not None:
            options["num_machines"] = file.num_machines
    return plain_layer(file.source, level, options)


def launcher_layer(env: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """Return the layer of what `accelerate launch` has set in the environment, and notes for the log.

    Accelerate exports its defaults too. Defaults that only switch something off, and options that FSDP2 does not have,
    are left out: they cannot be told from the user's own settings.
    """
    layer = Layer(LAUNCHER, Level.LAUNCHER)
    notes = []
    precision = env.get("ACCELERATE_MIXED_PRECISION")
    if precision == "fp16":
        layer.enter("mixed_precision", "fp16", "mixed_precision", LAUNCHER)
    if precision == "no":
        notes.append(_not_counted(f"mixed_precision: no, set by {LAUNCHER},"))
    if env.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return layer, notes
    variables = {}
    for variable, text in env.items():
        name = variable.lower()
        if variable.startswith("FSDP_") and text and target_of(name) is not None:
            variables[name] = text
    # As Accelerate itself does where the variable is missing.
    version = variables.setdefault("fsdp_version", "1")
    reshard = variables.get("fsdp_reshard_after_forward", "").lower()
    if reshard == "true" or (version == "1" and reshard == "false"):
        del variables["fsdp_reshard_after_forward"]
    elif reshard and variables.get("fsdp_sharding_strategy") == "FULL_SHARD":
        # The default that nobody has changed, beside the newer spelling.
        del variables["fsdp_sharding_strategy"]
    for name in ("fsdp_forward_prefetch", "fsdp_activation_checkpointing"):
        if variables.get(name, "").lower() == "false":
            del variables[name]
            notes.append(_not_counted(f"{name}: false, set by {LAUNCHER},"))
    for name, text in variables.items():
        try:
            layer.take([name], text)
        except UserError as error:
            raise UserError(f"{LAUNCHER}: {name}: {error}") from None
    layer.translated.clear()
    # Accelerate exports a size with every policy; layers are units whatever their size unless somebody asks otherwise.
    policy = layer.values.get("fsdp_auto_wrap_policy")
    if policy is None or policy.value != "SIZE_BASED_WRAP":
        layer.values.pop("fsdp_min_num_params", None)
    options = {name: value.value for name, value in layer.values.items()}
    listed = ", ".join(f"{name}: {value}" for name, value in options.items())
    notes.append(f"FSDP options set by {LAUNCHER}: {listed}")
    if options.get("fsdp_min_num_params") == ACCELERATE_MIN_NUM_PARAMS:
        notes.append(
            f"fsdp_min_num_params: {ACCELERATE_MIN_NUM_PARAMS:,d} is what accelerate launch sets when its file does "
            "not say; smaller modules do not become units"
        )
    layer.enter("strategy", "fsdp", "strategy", LAUNCHER)
    return layer, notes


def _not_counted(setting: str) -> str:
    return (
        f"{setting} is what Accelerate writes where nobody has answered, so it does not count here; the training "
        "config can say it"
    )


def _known_keys(tree: Node, source: str, notes: list[str]) -> dict[str, Node]:
    keys = dict(tree.value)
    if "compute_device" in keys:
        device = keys.pop("compute_device")
        notes.append(
            f"compute_device: {device.plain()} in {source} has no effect, and `accelerate launch` refuses the file "
            "because of it: remove the line (the processes take the GPUs that they see)"
        )
    for key, node in keys.items():
        if key not in TOP_KEYS:
            near = nearest(key, TOP_KEYS)
            hint = f", did you mean {near!r}?" if near else ""
            if key.startswith("fsdp_") and target_of(key):
                hint = ", it belongs under fsdp_config"
            raise UserError(f"{source}, line {node.line}: unknown key {key!r}{hint}")
        if key in IGNORED and node.plain():
            notes.append(f"{key} in {source} has no effect: vembed does not use it")
    return keys


def _fsdp_options(block: Node, source: str, notes: list[str]) -> dict[str, Any]:
    if not isinstance(block.value, dict):
        raise UserError(
            f"{source}, line {block.line}: fsdp_config must hold keys with values"
        )
    layer = Layer(source)
    for key, node in block.value.items():
        name = key if key.startswith("fsdp_") else f"fsdp_{key}"
        if name.removeprefix("fsdp_") in LAUNCHER_ONLY:
            notes.append(f"{key} in {source} has no effect: vembed does not use it")
            continue
        target = target_of(key, "fsdp")
        if isinstance(target, NoEffect):
            fixed = FIXED_IN_FSDP[name.removeprefix("fsdp_")]
            if str(node.plain()).lower() != str(fixed).lower():
                notes.append(
                    f"{key}: {node.plain()} in {source} has no effect: {target}"
                )
            continue
        is_known = name == "fsdp_reshard_after_forward" or (
            target == "gradient_checkpointing" or str(target).startswith("fsdp_")
        )
        if not is_known:
            names = [option for option in all_options() if option.startswith("fsdp_")]
            near = nearest(name, names)
            hint = f", did you mean {near!r}?" if near else ""
            raise UserError(
                f"{source}, line {node.line}: unknown key {key!r} in fsdp_config{hint}"
            )
        if node.plain() is not None:
            layer.take([key], node, node.line or 0, block="fsdp")
    if layer.problems:
        raise UserError(layer.problems[0][1])
    return {name: value.value for name, value in layer.values.items()}
