"""Accelerate config files and presets, and the environment variables that `accelerate launch` sets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import vembed
from vembed.config.options import (
    FIXED_IN_FSDP,
    Layer,
    Level,
    as_bool,
    join_words,
    quoted,
    target_of,
    yaml_word,
)
from vembed.config.parsing import read_tree
from vembed.config.schema import Options
from vembed.config.values import Environment
from vembed.errors import UserError, did_you_mean
from vembed.files import existing

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
NOT_COUNTED = " is what Accelerate writes where nobody has answered, so it does not count here; the training config can say it"
UNUSED = " has no effect: vembed does not use it"


@dataclass(frozen=True)
class AccelerateFile:
    """Contents of an Accelerate config."""

    place: str
    """The file as messages name it: its path, or configs/NAME.yaml for a preset."""
    distribution: Distribution
    options: Options
    """Values of vembed's options: fsdp_*, mixed_precision, and the numbers of machines and of processes on each."""
    main_process_ip: str | None
    main_process_port: int | None
    use_cpu: bool
    gpu_ids: str | None
    notes: tuple[str, ...]


PRESETS_FOLDER = Path(vembed.__file__).parent / "configs"
TRAINING_CONFIGS = ("free_transformer",)
"""Files beside the presets that are training configs."""


def preset_names() -> list[str]:
    """Return the names of the presets that `accelerate_config` accepts."""
    names = {path.stem for path in PRESETS_FOLDER.glob("*.yaml")}
    return sorted(names.difference(TRAINING_CONFIGS))


def find_accelerate_file(name: str) -> Path:
    """Return the file of a preset name or a path. Raise UserError with the known names if there is none."""
    path = Path(name)
    presets = preset_names()
    if existing(name) and path.is_file() and name not in presets:
        return path
    # `configs/accelerate_fsdp.yaml` names the preset even without a checkout.
    is_in_checkout = path.stem in presets and path.parent.name == "configs"
    if name in presets or is_in_checkout:
        return PRESETS_FOLDER / f"{path.stem}.yaml"
    hint = did_you_mean(path.stem, presets)
    raise UserError(
        f"accelerate_config: {quoted(name)} is neither a file nor a preset ({join_words(presets)}){hint}"
    )


def read_accelerate_file(file_name: str) -> AccelerateFile:
    """Read a preset or a file. Unknown keys are errors, also inside fsdp_config, where Accelerate ignores them."""
    path = find_accelerate_file(file_name)
    place = str(path)
    if path.parent == PRESETS_FOLDER:
        place = f"configs/{path.name}"
    notes = []
    keys = dict(read_tree(path).value)
    if "compute_device" in keys:
        device = keys.pop("compute_device")
        notes.append(
            f"compute_device: {device.plain()} in {place} has no effect, and `accelerate launch` refuses the file "
            "because of it: remove the line (the processes take the GPUs that they see)"
        )
    for key, node in keys.items():
        if key not in TOP_KEYS:
            hint = did_you_mean(key, TOP_KEYS)
            raise UserError(f"{node.place(place)}: unknown key {key!r}{hint}")
        if key in IGNORED and node.plain():
            notes.append(f"{key} in {place}{UNUSED}")
    value = {key: node.plain() for key, node in keys.items()}
    distribution = DISTRIBUTIONS.get(str(value.get("distributed_type")).upper())
    if distribution is None:
        raise UserError(
            f"{place}: distributed_type must be FSDP, MULTI_GPU, MULTI_CPU or NO for vembed, but is "
            f"{quoted(value.get('distributed_type'))}"
        )
    layer = Layer(place)
    for key in ("mixed_precision", "num_machines", "num_processes"):
        if value.get(key) is not None:
            layer.add_key([key], keys[key], keys[key].place(place))
    if value.get("fsdp_config"):
        block = keys["fsdp_config"]
        if not isinstance(block.value, dict):
            raise UserError(
                f"{block.place(place)}: fsdp_config must hold keys with values"
            )
        options_of_fsdp = {}
        for key, node in block.value.items():
            name = key.removeprefix("fsdp_")
            word = yaml_word(node.plain())
            if name in LAUNCHER_ONLY:
                notes.append(f"{key} in {place}{UNUSED}")
            elif name in FIXED_IN_FSDP:
                if word != yaml_word(FIXED_IN_FSDP[name]):
                    reason = target_of(key, "fsdp")
                    notes.append(f"{key}: {word} in {place} has no effect: {reason}")
            elif node.plain() is not None:
                options_of_fsdp[key] = node
        layer.add_keys(options_of_fsdp, block="fsdp_config")
    if layer.problems:
        raise UserError(layer.problems[0])
    options = {name: value.value for name, value in layer.values.items()}
    if distribution == "fsdp" and "fsdp_version" not in options:
        options["fsdp_version"] = 1
        notes.append(
            f"{place} gives no fsdp_version, which means 1 to Accelerate, and so it does here: fsdp_version: 2 in "
            "the file or in the training config chooses the newer one"
        )
    # bf16 is what `auto` means on a GPU that has it, and the same file is to run on a CPU too. "no" is what Accelerate
    # writes where nobody has answered. Neither is a decision.
    precision = options.get("mixed_precision")
    if precision == "no":
        notes.append(f"mixed_precision: no in {place}{NOT_COUNTED}")
    if precision != "fp16":
        options.pop("mixed_precision", None)
    # Accelerate counts the processes of all machines together.
    machines = options.get("num_machines", 1)
    processes = options.pop("num_processes", "auto")
    if processes != "auto":
        if processes % machines:
            raise UserError(
                f"{place}: num_processes: {processes} (over all machines) must be a multiple of num_machines: {machines}"
            )
        options["num_processes"] = processes // machines
    port = value.get("main_process_port")
    address = value.get("main_process_ip")
    gpu_ids = str(value.get("gpu_ids", "all"))
    return AccelerateFile(
        place=place,
        distribution=distribution,
        options=options,
        main_process_ip=str(address) if address else None,
        main_process_port=None if port is None else int(port),
        use_cpu=as_bool(value.get("use_cpu") or False),
        gpu_ids=None if gpu_ids in ("all", "None") else gpu_ids,
        notes=tuple(notes),
    )


def launcher_layer(env: Environment) -> tuple[Layer, list[str]]:
    """Return the layer of what `accelerate launch` has set in the environment, and notes for the log.

    Accelerate exports its defaults too. Defaults that only switch something off, and options that FSDP2 does not have,
    are left out: they cannot be told from the user's own settings.
    """
    layer = Layer(LAUNCHER, Level.LAUNCHER)
    notes = []
    precision = env.get("ACCELERATE_MIXED_PRECISION")
    if precision == "fp16":
        layer.add_option("mixed_precision", "fp16", "mixed_precision", LAUNCHER)
    if precision == "no":
        notes.append(f"mixed_precision: no, set by {LAUNCHER},{NOT_COUNTED}")
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
    for name, text in variables.items():
        is_off = text.lower() == "false"
        if is_off and name in (
            "fsdp_forward_prefetch",
            "fsdp_activation_checkpointing",
        ):
            notes.append(f"{name}: false, set by {LAUNCHER},{NOT_COUNTED}")
        else:
            layer.add_key([name], text, LAUNCHER)
    layer.notes.clear()
    # Accelerate exports a size with every policy; layers are units whatever their size unless somebody asks otherwise.
    if layer.value("fsdp_auto_wrap_policy") != "SIZE_BASED_WRAP":
        layer.values.pop("fsdp_min_num_params", None)
    listed = ", ".join(f"{name}: {value.value}" for name, value in layer.values.items())
    notes.append(f"FSDP options set by {LAUNCHER}: {listed}")
    if layer.value("fsdp_min_num_params") == ACCELERATE_MIN_NUM_PARAMS:
        notes.append(
            f"fsdp_min_num_params: {ACCELERATE_MIN_NUM_PARAMS:,d} is what accelerate launch sets when its file does "
            "not say; smaller modules do not become units"
        )
    layer.add_option("strategy", "fsdp", "strategy", LAUNCHER)
    return layer, notes
