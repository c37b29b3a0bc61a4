"""Accelerate config files and presets, and the environment variables that `accelerate launch` sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import vembed
from vembed.config.aliases import WeakDefault, target_of
from vembed.config.options import all_options, checked, join_words, nearest, quoted
from vembed.config.parsing import Node, parse_value, read_tree
from vembed.config.spelling import as_bool, normalise
from vembed.errors import UserError

Distribution = Literal["single", "ddp", "fsdp"]

TOP_KEYS = frozenset(
    {
        *(
            "command_file",
            "commands",
            "compute_environment",
            "debug",
            "deepspeed_config",
            "distributed_type",
        ),
        *(
            "downcast_bf16",
            "dynamo_config",
            "enable_cpu_affinity",
            "fp8_config",
            "fsdp_config",
            "gpu_ids",
        ),
        *(
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "megatron_lm_config",
        ),
        *(
            "mixed_precision",
            "mpirun_config",
            "num_machines",
            "num_processes",
            "parallelism_config",
            "rdzv_backend",
        ),
        *(
            "same_network",
            "tpu_env",
            "tpu_name",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_zone",
            "use_cpu",
        ),
    }
)
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

ACCELERATE_MIN_NUM_PARAMS = 100_000_000
"""Size that `accelerate launch` exports if its file gives none."""

ENVIRONMENT = {
    "FSDP_VERSION": "fsdp_version",
    "FSDP_SHARDING_STRATEGY": "fsdp_sharding_strategy",
    "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params",
    "FSDP_AUTO_WRAP_POLICY": "fsdp_auto_wrap_policy",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
    "FSDP_MIN_NUM_PARAMS": "fsdp_min_num_params",
    "FSDP_BACKWARD_PREFETCH": "fsdp_backward_prefetch",
    "FSDP_FORWARD_PREFETCH": "fsdp_forward_prefetch",
    "FSDP_STATE_DICT_TYPE": "fsdp_state_dict_type",
    "FSDP_USE_ORIG_PARAMS": "fsdp_use_orig_params",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "fsdp_cpu_ram_efficient_loading",
    "FSDP_SYNC_MODULE_STATES": "fsdp_sync_module_states",
    "FSDP_ACTIVATION_CHECKPOINTING": "gradient_checkpointing",
}
"""Map from the launcher's environment variables to the options that they set."""


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
    shown_path = (
        f"configs/{path.name}" if path.parent == presets_folder() else str(path)
    )
    tree = read_tree(path)
    notes: list[str] = []
    keys = _known_keys(tree, shown_path, notes)
    value = {key: node.plain() for key, node in keys.items()}
    distribution = _distribution(value.get("distributed_type"), shown_path)
    num_machines = _number(value, "num_machines", shown_path) or None
    fsdp = (
        _fsdp_options(keys["fsdp_config"], shown_path, notes)
        if value.get("fsdp_config")
        else {}
    )
    if distribution == "fsdp" and "fsdp_version" not in fsdp:
        fsdp["fsdp_version"] = 1
        notes.append(
            f"{shown_path} gives no fsdp_version, which means 1 to Accelerate, and so it does here: fsdp_version: 2 in "
            "the file or in the training config chooses the newer one"
        )
    precision = _mixed_precision(value.get("mixed_precision"), shown_path)
    if precision == "no":
        notes.append(
            f"mixed_precision: no in {shown_path} is what Accelerate writes where nobody has answered, so it does not "
            "count here; the training config can say it"
        )
    return AccelerateFile(
        source=shown_path,
        distribution=distribution,
        fsdp=fsdp,
        mixed_precision=precision,
        num_processes=_processes_per_machine(value, num_machines or 1, shown_path),
        num_machines=num_machines,
        machine_rank=_number(value, "machine_rank", shown_path) or 0,
        main_process_ip=str(value["main_process_ip"])
        if value.get("main_process_ip")
        else None,
        main_process_port=_number(value, "main_process_port", shown_path),
        use_cpu=_switch(value.get("use_cpu"), shown_path),
        gpu_ids=None
        if str(value.get("gpu_ids", "all")) in ("all", "None")
        else str(value["gpu_ids"]),
        notes=tuple(notes),
    )


def file_options(file: AccelerateFile) -> dict[str, Any]:
    """The options of the schema that a file decides. bf16 is what `auto` means on a GPU that has it, and the same file
    is to run on a CPU too; "no" is what Accelerate writes where nobody has answered: neither is a decision."""
    options: dict[str, Any] = {"strategy": file.distribution, **file.fsdp}
    if file.mixed_precision == "fp16":
        options["mixed_precision"] = "fp16"
    if file.num_processes is not None:
        options["num_processes"] = file.num_processes
    if file.num_machines is not None:
        options["num_machines"] = file.num_machines
    return options


def launcher_options(env: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The options that `accelerate launch` has set in the environment, and notes for the log.

    Accelerate exports its defaults too. Defaults that only switch something off, and options that FSDP2 does not have,
    are left out: they cannot be told from the user's own settings.
    """
    options: dict[str, Any] = {}
    if env.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        options["mixed_precision"] = "fp16"
    defaults = (
        ["mixed_precision: no"] if env.get("ACCELERATE_MIXED_PRECISION") == "no" else []
    )
    if env.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return options, _unsaid(defaults)
    for variable, name in ENVIRONMENT.items():
        if env.get(variable):
            value = parse_value(
                env[variable],
                f"{variable}={env[variable][:60]}, set by accelerate launch",
            )
            try:
                options[name] = checked(name, normalise(name, value))
            except ValueError as error:
                raise UserError(
                    f"{variable}={env[variable]}, set by accelerate launch: {error}"
                ) from None
    options["strategy"] = "fsdp"
    # As Accelerate itself does where the variable is missing.
    version = options.setdefault("fsdp_version", 1)
    reshard = env.get("FSDP_RESHARD_AFTER_FORWARD", "").lower()
    # Under FSDP2 Accelerate has the switch alone, and FULL_SHARD in the environment is the default that nobody has
    # changed.
    if version == 2:
        if options.get("fsdp_sharding_strategy") == "FULL_SHARD" and reshard == "false":
            options["fsdp_sharding_strategy"] = "SHARD_GRAD_OP"
        for name in (
            "fsdp_use_orig_params",
            "fsdp_sync_module_states",
            "fsdp_backward_prefetch",
        ):
            options.pop(name, None)
    elif reshard in (
        "shard_grad_op",
        "no_shard",
        "hybrid_shard",
    ):  # Accelerate's newer spelling for FSDP1
        options["fsdp_sharding_strategy"] = reshard.upper()
    # Accelerate exports a size with every policy; layers are units whatever their size unless somebody asks otherwise.
    if options.get("fsdp_auto_wrap_policy") != "SIZE_BASED_WRAP":
        options.pop("fsdp_min_num_params", None)
    unsaid = [
        name
        for name in ("fsdp_forward_prefetch", "gradient_checkpointing")
        if options.get(name) is False
    ]
    for name in unsaid:
        del options[name]
    said = ", ".join(
        f"{name}: {value}" for name, value in options.items() if name != "strategy"
    )
    notes = [f"FSDP options set by accelerate launch: {said}"]
    defaults += [f"{name}: false" for name in unsaid]
    defaults += (
        ["fsdp_reshard_after_forward: true"]
        if version == 2 and reshard == "true"
        else []
    )
    notes += _unsaid(defaults)
    if options.get("fsdp_min_num_params") == ACCELERATE_MIN_NUM_PARAMS:
        notes.append(
            f"fsdp_min_num_params: {ACCELERATE_MIN_NUM_PARAMS:,d} is what accelerate launch sets when its file does "
            "not say; smaller modules do not become units"
        )
    return options, notes


def _unsaid(defaults: Sequence[str]) -> list[str]:
    if not defaults:
        return []
    return [
        f"{', '.join(defaults)}: accelerate launch sets this also where nobody has asked for it, so it does not count "
        "here; the training config can say it"
    ]


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


def _distribution(kind: Any, source: str) -> Distribution:
    # FALSE: an unquoted NO that another tool has read by YAML 1.1 and written again.
    known: dict[str, Distribution] = {"FSDP": "fsdp", "NO": "single", "FALSE": "single"}
    known |= dict.fromkeys(
        ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU"),
        "ddp",
    )
    if str(kind).upper() not in known:
        raise UserError(
            f"{source}: distributed_type must be FSDP, MULTI_GPU, MULTI_CPU or NO for vembed, but is {quoted(kind)}"
        )
    return known[str(kind).upper()]


def _mixed_precision(value: Any, source: str) -> Literal["no", "bf16", "fp16"] | None:
    if value is None:
        return None
    precision = normalise("mixed_precision", value)
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(
            f"{source}: mixed_precision must be no, bf16 or fp16, but is {quoted(value)}"
        )
    return precision  # type: ignore[no-any-return]


def _number(value: Mapping[str, Any], key: str, source: str) -> int | None:
    number = value.get(key)
    if number is None:
        return None
    if (
        isinstance(number, bool)
        or not isinstance(number, int)
        or not 0 <= number < 2**20
    ):
        raise UserError(
            f"{source}: {key} must be a whole number, but is {quoted(number)}"
        )
    return number


def _switch(value: Any, source: str) -> bool:
    try:
        return as_bool(value or False)
    except ValueError as error:
        raise UserError(f"{source}: use_cpu {error}, but is {quoted(value)}") from None


def _processes_per_machine(
    value: Mapping[str, Any], num_machines: int, source: str
) -> int | None:
    if str(value.get("num_processes", "auto")) in ("auto", "gpu", "-1", "None"):
        return None
    # Accelerate counts the processes of all machines together.
    total = _number(value, "num_processes", source) or 0
    if total < 1 or total % num_machines:
        raise UserError(
            f"{source}: num_processes: {total} (over all machines) must be a multiple of num_machines: {num_machines}"
        )
    return total // num_machines


def _fsdp_options(block: Node, source: str, notes: list[str]) -> dict[str, Any]:
    if not isinstance(block.value, dict):
        raise UserError(
            f"{source}, line {block.line}: fsdp_config must hold keys with values"
        )
    options: dict[str, Any] = {}
    for key, node in block.value.items():
        where = f"{source}, line {node.line}"
        if key.removeprefix("fsdp_") in LAUNCHER_ONLY:
            notes.append(f"{key} in {source} has no effect: vembed does not use it")
            continue
        name = target_of(key, "fsdp")
        value = node.plain()
        if key.removeprefix("fsdp_") == "reshard_after_forward" and callable(name):
            [(name, value)] = name(value)
            if isinstance(name, WeakDefault) and name in options:
                continue
        is_known = name == "gradient_checkpointing" or str(name).startswith("fsdp_")
        if not isinstance(name, str) or not is_known:
            names = [option for option in all_options() if option.startswith("fsdp_")]
            near = nearest(key if key.startswith("fsdp_") else f"fsdp_{key}", names)
            raise UserError(
                f"{where}: unknown key {key!r} in fsdp_config"
                + (f", did you mean {near!r}?" if near else "")
            )
        name = str(name)
        if value is None:
            continue
        try:
            options[name] = checked(name, normalise(name, value))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
    return options
