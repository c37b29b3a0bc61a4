"""What the FSDP options come to: file, training YAML and launcher together, and what each means in FSDP1 and FSDP2."""

from pathlib import Path

import pytest

from vembed.config.accelerate_file import AccelerateFile, read_accelerate_file
from vembed.config.decisions import FsdpConfig
from vembed.config.loading import resolve_run
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


def resolved(write_config, text="", **env):
    run = resolve_run(write_config(text), env=env)
    assert run.fsdp is not None
    return run.fsdp, list(run.fsdp_notes)


def refusal(write_config, text):
    with pytest.raises(UserError) as caught:
        resolve_run(write_config(text), env={})
    return str(caught.value)


@pytest.mark.promise("B03")
def test_off_by_default(write_config):
    run = resolve_run(write_config(), env={})
    assert run.config.parallel.strategy == "auto"
    assert run.strategy.value == "auto"


@pytest.mark.promise("B04", "B05", "B06", "B07", "D06", "D07", "D08")
def test_use_fsdp_reads_the_packaged_file(write_config):
    settings, notes = resolved(write_config, "use_fsdp: true\n")
    assert settings == FsdpConfig(source="configs/accelerate_fsdp.yaml")
    assert (settings.version, settings.sharding_strategy, settings.offload) == (
        2,
        "FULL_SHARD",
        False,
    )
    assert (settings.wrap_policy, settings.min_num_params) == (
        "TRANSFORMER_BASED_WRAP",
        1_000_000,
    )
    assert notes == []


@pytest.mark.promise("D07", "D08", "D09", "D10", "D11", "D12", "D13", "D14", "D15")
def test_the_documents_file(write_config):
    write_config()
    Path("accelerate.yaml").write_text(DOCUMENT_D)
    settings, notes = resolved(
        write_config, "use_fsdp: true\naccelerate_config: accelerate.yaml\n"
    )
    assert (settings.sharding_strategy, settings.offload) == ("FULL_SHARD", True)
    assert settings.source == "accelerate.yaml"
    # Accelerate takes a file without a version for FSDP1, and so does vembed, under `accelerate launch` or not.
    assert settings.version == 1
    assert notes == []
    newer, notes = resolved(
        write_config,
        "use_fsdp: true\naccelerate_config: accelerate.yaml\nfsdp_version: 2\n",
    )
    assert (newer.version, newer.offload) == (2, True)
    assert notes == []
    assert read_accelerate_file("accelerate.yaml").options["num_processes"] == 8
    # bf16 in that file is for GPUs: the same file also runs on a CPU.
    run = resolve_run(write_config("accelerate_config: accelerate.yaml\n"), env={})
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
def test_what_is_always_so_is_accepted_and_said_once(write_config, line, version):
    text = f"strategy: fsdp\nfsdp_version: {version}\n{line}\n"
    (said,) = resolve_run(write_config(text), env={}).notes
    assert "has no effect: " in said and "cfg.yaml, line" in said


@pytest.mark.promise("E12")
def test_local_state_dict(write_config):
    message = refusal(
        write_config, "use_fsdp: true\nfsdp_state_dict_type: local_state_dict\n"
    )
    assert (
        "LOCAL_STATE_DICT does not exist in FSDP2" in message
        and "SHARDED_STATE_DICT" in message
    )
    settings, _ = resolved(
        write_config,
        "use_fsdp: true\nfsdp_version: 1\nfsdp_state_dict_type: local_state_dict\n",
    )
    assert settings.state_dict_type == "LOCAL_STATE_DICT"


@pytest.mark.promise("C08")
def test_no_shard_is_ddp_and_says_so(write_config):
    run = resolve_run(
        write_config("use_fsdp: true\nfsdp_sharding_strategy: no_shard\n"), env={}
    )
    assert run.strategy.value == "ddp"
    assert run.fsdp is None
    said = "fsdp_sharding_strategy: NO_SHARD shards nothing: the run uses ddp (a copy on each process)"
    assert run.fsdp_notes == (said,)


@pytest.mark.parametrize("count", ["0", "null"])
@pytest.mark.promise("B09")
def test_no_size_is_a_million(write_config, count):
    text = f"use_fsdp: true\nfsdp_auto_wrap_policy: size_based_wrap\nfsdp_min_num_params: {count}\n"
    settings, notes = resolved(write_config, text)
    assert settings.min_num_params == 1_000_000
    assert "counts as 1,000,000" in notes[0]
    assert (
        resolved(write_config, text.replace(count, "500000"))[0].min_num_params
        == 500_000
    )


@pytest.mark.promise("B08")
def test_layer_classes(write_config):
    assert resolved(write_config, "use_fsdp: true\n")[0].layer_classes is None
    for text, classes in (
        ("BertLayer", ("BertLayer",)),
        ("[A, b.C]", ("A", "b.C")),
        ("A,B", ("A", "B")),
    ):
        line = f"use_fsdp: true\nfsdp_transformer_layer_cls_to_wrap: {text}\n"
        assert resolved(write_config, line)[0].layer_classes == classes


@pytest.mark.promise("E13")
def test_mixed_precision_of_fsdp(write_config):
    text = "use_fsdp: true\nfsdp_mixed_precision: true\nfsdp_param_dtype: bf16\nfsdp_reduce_dtype: fp32\n"
    run = resolve_run(write_config(text), env={})
    assert run.fsdp is not None and run.fsdp.reduce_dtype == "float32"
    assert run.precision.value == "bf16"
    text = "use_fsdp: true\nfsdp_mixed_precision: false\n"
    assert resolve_run(write_config(text), env={}).precision.value == "no"


@pytest.mark.promise("C02")
def test_strategies(write_config):
    def strategy(text):
        return resolve_run(write_config(text), env={}).strategy.value

    assert strategy("distributed: {strategy: auto, fsdp: {enabled: true}}\n") == "fsdp"
    assert strategy("strategy: fsdp\n") == "fsdp"
    assert strategy("strategy: ddp\n") == "ddp"
    assert strategy("strategy: auto\n") == "auto"
    assert strategy("accelerate_config: single_node_fsdp\n") == "fsdp"
    assert strategy("accelerate_config: accelerate_ddp\n") == "ddp"


def test_use_fsdp_with_a_file_that_does_not_shard(write_config):
    message = refusal(
        write_config, "use_fsdp: true\naccelerate_config: accelerate_ddp\n"
    )
    assert "use_fsdp: true, but configs/accelerate_ddp.yaml is for ddp" in message


def test_the_launchers_values_hold_and_are_said(write_config):
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_USE_ORIG_PARAMS": "true",
    }
    run = resolve_run(write_config("fsdp_state_dict_type: full\n"), env=env)
    settings = run.fsdp
    assert settings is not None and settings.source == "accelerate launch"
    assert settings.state_dict_type == "FULL_STATE_DICT", (
        "which the launcher has not set"
    )
    assert settings.sharding_strategy == "SHARD_GRAD_OP"
    assert run.notes[0].startswith(
        "FSDP options set by accelerate launch: fsdp_version: 2, "
    )
    assert "is what accelerate launch sets when its file does not say" in run.notes[1]
    with pytest.raises(
        UserError,
        match="accelerate launch: fsdp_version must be 1 or 2",
    ):
        resolve_run(write_config(), env=env | {"FSDP_VERSION": "3"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_limit_all_gather: true}\n",
            "unknown option 'fsdp_limit_all_gather'",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  min_num_parms: 3\n",
            "line 3: unknown option 'min_num_parms' in fsdp_config",
        ),
        (
            "distributed_type: FSDP\nnum_proceses: 3\n",
            "line 2: unknown key 'num_proceses', did you mean 'num_processes'",
        ),
        (
            "distributed_type: DEEPSPEED\n",
            "distributed_type must be FSDP, MULTI_GPU, MULTI_CPU or NO",
        ),
        (
            "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 3\n",
            "must be a multiple of num_machines: 2",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD}\n",
            "fsdp_sharding_strategy must be",
        ),
    ],
)
def test_mistakes_in_the_accelerate_file(write_config, text, words):
    write_config()
    Path("accelerate.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_accelerate_file("accelerate.yaml")
    assert words in str(caught.value)
    assert "accelerate.yaml" in str(caught.value)


@pytest.mark.promise("D30")
def test_compute_device_is_accepted_with_a_warning(write_config):
    write_config()
    Path("accelerate.yaml").write_text("distributed_type: FSDP\ncompute_device: gpu\n")
    assert (
        "compute_device: gpu in accelerate.yaml has no effect"
        in read_accelerate_file("accelerate.yaml").notes[0]
    )


def test_keys_that_only_accelerate_uses_are_named(write_config):
    write_config()
    Path("accelerate.yaml").write_text(
        "distributed_type: FSDP\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
        "fsdp_config: {fsdp_ignored_modules: x, fsdp_reshard_after_forward: SHARD_GRAD_OP}\n"
        "use_cpu: true\ngpu_ids: 0,1\n"
    )
    file = read_accelerate_file("accelerate.yaml")
    assert file == AccelerateFile(
        source="accelerate.yaml",
        distribution="fsdp",
        options={"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        use_cpu=True,
        gpu_ids="0,1",
        notes=file.notes,
    )
    assert [note.split(" ")[0] for note in file.notes] == [
        "dynamo_config",
        "fsdp_ignored_modules",
        "accelerate.yaml",
    ]
    assert "gives no fsdp_version, which means 1 to Accelerate" in file.notes[2]


@pytest.mark.promise("C18")
def test_a_name_that_is_no_preset(write_config):
    with pytest.raises(UserError) as caught:
        resolve_run(write_config("accelerate_config: single_node_fdsp\n"))
    assert "neither a file nor a preset" in str(caught.value)
    assert "did you mean 'single_node_fsdp'" in str(caught.value)
    assert "large_scale_fsdp, multi_node_fsdp or single_node_fsdp" in str(caught.value)
    with pytest.raises(UserError, match="neither a file nor a preset"):
        read_accelerate_file("x" * 5000)
