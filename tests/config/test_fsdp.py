"""What the FSDP options come to: file, training YAML and launcher together, and what each means in FSDP1 and FSDP2."""

from pathlib import Path

import pytest

from vembed.config.accelerate_file import AccelerateFile, read_accelerate_file
from vembed.config.decisions import FsdpConfig
from vembed.errors import UserError

DOCUMENT_D = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP    # Wrap transformer layers
  fsdp_sharding_strategy: FULL_SHARD               # Shard everything
  fsdp_cpu_ram_efficient_loading: true             # Use CPU for inactive params
  fsdp_offload_params: true                        # Offload to CPU if needed
  fsdp_backward_prefetch: BACKWARD_PRE             # Prefetch gradients
  fsdp_limit_all_gathers: true                     # Limit concurrent ops
  fsdp_min_num_params: 1000000                     # Min size for sharding
  fsdp_use_orig_params: true                       # Use original param objects

mixed_precision: bf16                               # Use bfloat16 for efficiency
num_processes: 8                                    # Number of GPUs (auto-detected)
"""


@pytest.fixture
def fsdp(resolved):
    """The FSDP options of a config, and what is said of them."""

    def run(text=""):
        run = resolved(text)
        return run.fsdp, list(run.fsdp_notes)

    return run


@pytest.fixture
def accelerate_file(write_config):
    """Writes accelerate.yaml, and reads it."""
    write_config()

    def run(text):
        Path("accelerate.yaml").write_text(text)
        return read_accelerate_file("accelerate.yaml")

    return run


@pytest.mark.promise("B04", "B05", "B06", "B07", "D06", "D07", "D08")
def test_use_fsdp_reads_the_packaged_file(fsdp):
    settings, notes = fsdp("use_fsdp: true\n")
    assert settings == FsdpConfig(origin="configs/accelerate_fsdp.yaml")
    assert settings.version == 2
    assert settings.sharding_strategy == "FULL_SHARD"
    assert settings.offload is False
    assert settings.wrap_policy == "TRANSFORMER_BASED_WRAP"
    assert settings.min_num_params == 1_000_000
    assert notes == []


@pytest.mark.promise("D07", "D08", "D09", "D10", "D11", "D12", "D13", "D14", "D15")
def test_the_documents_file(accelerate_file, fsdp, resolved):
    assert accelerate_file(DOCUMENT_D).options["num_processes"] == 8
    text = "use_fsdp: true\naccelerate_config: accelerate.yaml\n"
    # Accelerate takes a file without a version for FSDP1, and so does vembed, under `accelerate launch` or not.
    for line, version in (("", 1), ("fsdp_version: 2\n", 2)):
        settings, notes = fsdp(text + line)
        assert settings.version == version
        assert settings.sharding_strategy == "FULL_SHARD"
        assert settings.offload is True
        assert settings.origin == "accelerate.yaml"
        assert notes == []
    # bf16 in that file is for GPUs: the same file also runs on a CPU.
    run = resolved("accelerate_config: accelerate.yaml\n")
    assert run.precision.value == "auto"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "line",
    [
        "fsdp_backward_prefetch: NONE",
        "fsdp_limit_all_gathers: true",
        "fsdp: {use_orig_params: false}",
        "fsdp_buffer_dtype: float32",
    ],
)
@pytest.mark.promise("C09", "C11", "C13", "E08", "E13")
def test_what_is_always_so_is_accepted_and_said_once(resolved, line, version):
    run = resolved(f"strategy: fsdp\nfsdp_version: {version}\n{line}\n")
    (said,) = run.notes
    assert "has no effect: " in said and "cfg.yaml, line" in said


@pytest.mark.promise("E12")
def test_local_state_dict(fsdp, refused):
    text = "use_fsdp: true\nfsdp_state_dict_type: local_state_dict\n"
    message = refused(text)
    assert "LOCAL_STATE_DICT does not exist in FSDP2" in message
    assert "SHARDED_STATE_DICT" in message
    settings, _ = fsdp(text + "fsdp_version: 1\n")
    assert settings.state_dict_type == "LOCAL_STATE_DICT"


@pytest.mark.promise("C08")
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_no_shard_is_ddp_and_says_so(resolved, strategy):
    run = resolved(f"strategy: {strategy}\nfsdp_sharding_strategy: no_shard\n")
    assert run.strategy.value == "ddp"
    assert run.fsdp is None
    (note,) = run.fsdp_notes
    assert "NO_SHARD shards nothing: the run uses ddp" in note


@pytest.mark.parametrize("count", ["0", "null"])
@pytest.mark.promise("B09")
def test_no_size_is_a_million(fsdp, count):
    text = (
        "use_fsdp: true\nfsdp_auto_wrap_policy: size_based_wrap\nfsdp_min_num_params: "
    )
    settings, notes = fsdp(f"{text}{count}\n")
    assert settings.min_num_params == 1_000_000
    assert "counts as 1,000,000" in notes[0]
    assert fsdp(f"{text}500000\n")[0].min_num_params == 500_000


@pytest.mark.parametrize(
    ("text", "classes"),
    {
        "null": None,
        "BertLayer": ("BertLayer",),
        "[A, b.C]": ("A", "b.C"),
        "A,B": ("A", "B"),
    }.items(),
)
@pytest.mark.promise("B08")
def test_layer_classes(fsdp, text, classes):
    line = f"use_fsdp: true\nfsdp_transformer_layer_cls_to_wrap: {text}\n"
    assert fsdp(line)[0].layer_classes == classes


@pytest.mark.promise("E13")
def test_mixed_precision_of_fsdp(resolved):
    text = "use_fsdp: true\nfsdp_mixed_precision: "
    run = resolved(text + "true\nfsdp_param_dtype: bf16\nfsdp_reduce_dtype: fp32\n")
    assert run.fsdp.reduce_dtype == "float32"
    assert run.precision.value == "bf16"
    assert resolved(text + "false\n").precision.value == "no"


@pytest.mark.parametrize(
    ("line", "strategy"),
    {
        "distributed: {strategy: auto, fsdp: {enabled: true}}": "fsdp",
        "strategy: fsdp": "fsdp",
        "strategy: ddp": "ddp",
        "strategy: auto": "auto",
        "accelerate_config: single_node_fsdp": "fsdp",
        "accelerate_config: accelerate_ddp": "ddp",
    }.items(),
)
@pytest.mark.promise("C02")
def test_strategies(resolved, line, strategy):
    assert resolved(f"{line}\n").strategy.value == strategy


def test_use_fsdp_with_a_file_that_does_not_shard(refused):
    message = refused("use_fsdp: true\naccelerate_config: accelerate_ddp\n")
    assert "use_fsdp: true, but configs/accelerate_ddp.yaml is for ddp" in message


def test_the_launchers_values_hold_and_are_said(resolved, refused):
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_USE_ORIG_PARAMS": "true",
    }
    # Which the launcher has not set.
    run = resolved("fsdp_state_dict_type: full\n", env=env)
    assert run.fsdp.origin == "accelerate launch"
    assert run.fsdp.state_dict_type == "FULL_STATE_DICT"
    assert run.fsdp.sharding_strategy == "SHARD_GRAD_OP"
    first, second, *_ = run.notes
    assert "FSDP options set by accelerate launch: fsdp_version: 2, " in first
    assert "is what accelerate launch sets when its file does not say" in second
    message = refused(env=env | {"FSDP_VERSION": "3"})
    assert "accelerate launch: fsdp_version must be 1 or 2" in message


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "fsdp_config: {fsdp_limit_all_gather: true}": "unknown option 'fsdp_limit_all_gather'",
        "fsdp_config:\n  min_num_parms: 3": "line 3: unknown option 'min_num_parms' in fsdp_config",
        "num_proceses: 3": "line 2: unknown key 'num_proceses', did you mean 'num_processes'",
        "num_machines: 2\nnum_processes: 3": "must be a multiple of num_machines: 2",
        "fsdp_config: {fsdp_sharding_strategy: SHARD}": "fsdp_sharding_strategy must be",
    }.items(),
)
def test_mistakes_in_the_accelerate_file(accelerate_file, text, words):
    with pytest.raises(UserError) as caught:
        accelerate_file(f"distributed_type: FSDP\n{text}\n")
    assert words in str(caught.value)
    assert "accelerate.yaml" in str(caught.value)


def test_a_distribution_that_is_none(accelerate_file):
    with pytest.raises(UserError, match="must be FSDP, MULTI_GPU, MULTI_CPU or NO"):
        accelerate_file("distributed_type: DEEPSPEED\n")


@pytest.mark.promise("D30")
def test_compute_device_is_accepted_with_a_warning(accelerate_file):
    file = accelerate_file("distributed_type: FSDP\ncompute_device: gpu\n")
    said = "compute_device: gpu in accelerate.yaml has no effect"
    assert said in file.notes[0]


def test_keys_that_only_accelerate_uses_are_named(accelerate_file):
    file = accelerate_file(
        "distributed_type: FSDP\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
        "fsdp_config: {fsdp_ignored_modules: x, fsdp_reshard_after_forward: SHARD_GRAD_OP}\n"
        "use_cpu: true\ngpu_ids: 0,1\n"
    )
    assert file == AccelerateFile(
        place="accelerate.yaml",
        distribution="fsdp",
        options={"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        main_process_ip=None,
        main_process_port=None,
        use_cpu=True,
        gpu_ids="0,1",
        notes=file.notes,
    )
    dynamo, ignored, version = file.notes
    assert dynamo.startswith("dynamo_config ")
    assert ignored.startswith("fsdp_ignored_modules ")
    assert "gives no fsdp_version, which means 1 to Accelerate" in version


@pytest.mark.promise("C18")
def test_a_name_that_is_no_preset(refused):
    message = refused("accelerate_config: single_node_fdsp\n")
    assert "neither a file nor a preset" in message
    assert "did you mean 'single_node_fsdp'" in message
    assert "large_scale_fsdp, multi_node_fsdp or single_node_fsdp" in message
    with pytest.raises(UserError, match="neither a file nor a preset"):
        read_accelerate_file("x" * 5000)
