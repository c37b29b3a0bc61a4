"""Names and spellings of the five documents and of other systems: each reaches the one option, and is reported."""

import pytest

from tests.config.conftest import assert_options
from tests.guides import STAGE_ONE
from vembed.cli.arguments import NO_FLAGS
from vembed.config.loading import chosen_pipeline, load_config, resolve_run
from vembed.config.options import (
    ALIASES,
    BLOCK_PREFIXES,
    OPTION_BLOCKS,
    SPELLINGS,
    TRANSLATED,
    all_options,
    known_names,
    target_of,
)

HERETIC = """\
[model]
model = "meta-llama/Llama-2-7b-chat-hf"
batch_size = 4
data_path = "train.jsonl"

[fsdp]
use_fsdp = true
fsdp_sharding_strategy = "FULL_SHARD"
fsdp_offload_params = false
fsdp_cpu_offload = false
fsdp_auto_wrap_policy = "TRANSFORMER_BASED_WRAP"
fsdp_transformer_layer_cls_to_wrap = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
fsdp_min_num_params = 1000000
"""

MODULAR = (
    """\
model_name: some/model
data_path: train.jsonl
training_stages:
  stage1:
    training: {batch_size: 2, gradient_accumulation_steps: 4}
"""
    + STAGE_ONE
    + """\
  stage2:
    distributed: {strategy: ddp, devices: 2}
logging:
  debug: true
  log_file: "training.log"
wandb:
  use_wandb: true
  project: "accfiy-fsdp"
  tags: ["fsdp", "multi-node"]
"""
)

FREE = """\
model_name: some/model
data_path: train.jsonl
distributed:
  use_fsdp: true
  fsdp_sharding_strategy: "full_shard"
  fsdp_backward_prefetch: "backward_pre"
  fsdp_forward_prefetch: false
  fsdp_auto_wrap_policy: "transformer_auto_wrap"
  fsdp_min_num_params: 1000000
  fsdp_state_dict_type: "full_state_dict"
  fsdp_mixed_precision: true
  fsdp_param_dtype: "bfloat16"
  fsdp_reduce_dtype: "float32"
  fsdp_buffer_dtype: "float32"
training:
  batch_size: 64
  learning_rate: 2e-4
  gradient_checkpointing: true
  bf16: true
  gradient_clip_norm: 1.0
"""


@pytest.mark.promise("A09", "A12", "B20")
def test_document_a_toml(write_config):
    file = write_config(HERETIC, name="config_with_fsdp.toml", needed="")
    assert_options(
        load_config(file, ["batch_size=16"]),
        model_name="meta-llama/Llama-2-7b-chat-hf",
        batch_size=16,
        strategy="fsdp",
        fsdp_sharding_strategy="FULL_SHARD",
        fsdp_offload_params=False,
        fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        fsdp_transformer_layer_cls_to_wrap="transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        fsdp_min_num_params=1_000_000,
    )
    assert load_config(file).batch.batch_size == 4


@pytest.mark.promise(
    "C01",
    "C02",
    "C03",
    "C04",
    "C05",
    "C06",
    "C07",
    "C08",
    "C09",
    "C10",
    "C11",
    "C12",
    "C13",
    "C29",
    "C31",
    "C32",
)
def test_document_c_stage_one(write_config):
    config = resolve_run(write_config(MODULAR, needed=""), stage="stage1").config
    assert_options(
        config,
        strategy="fsdp",
        num_machines=1,
        num_processes=8,
        batch_size=2,
        gradient_accumulation_steps=4,
        sync_batchnorm=False,
        fsdp_offload_params=False,
        fsdp_sharding_strategy="FULL_SHARD",
        fsdp_forward_prefetch=False,
        gradient_checkpointing=True,
        debug=True,
        log_file="training.log",
        wandb_project="accfiy-fsdp",
        wandb_tags=["fsdp", "multi-node"],
        report_to=["tensorboard", "wandb"],
        output_dir="output/stage1",
    )


@pytest.mark.promise("C01", "C20")
def test_stage_two_starts_from_the_result_of_stage_one(write_config, refused):
    file = write_config(MODULAR, needed="")
    for run in (resolve_run(file, stage="stage2"), resolve_run(file, ["stage=stage2"])):
        assert_options(
            run.config,
            model_name="output/stage1/final",
            output_dir="output/stage2",
            strategy="ddp",
            num_processes=2,
        )
        assert run.origins["model_name"] == "cfg.yaml, result of stage1"
    chosen = MODULAR + "stage: stage2\n"
    file = write_config(chosen, needed="", name="chosen.yaml")
    assert resolve_run(file).config.run.output_dir == "output/stage2"
    assert chosen_pipeline(file) is None
    said = "several stages: choose with --stage NAME: stage1, stage2"
    assert said in refused(MODULAR, needed="")
    second = ["stage=stage2", "output_dir=runs/{model}-s{seed}"]
    templated = resolve_run(write_config(MODULAR, needed=""), second).config
    assert templated.model.model_name == "runs/some-s42/stage1/final"
    assert templated.run.output_dir == "runs/some-s42/stage2"
    said = "there is no training stage 'stage3'"
    assert said in refused(MODULAR, "stage=stage3", needed="")
    assert "there is no training_stages block" in refused("", "stage=stage1")


@pytest.mark.promise(
    "E06", "E07", "E08", "E09", "E10", "E12", "E13", "E14", "E15", "E16", "E17", "E18"
)
def test_document_e(read):
    assert_options(
        read(FREE, needed=""),
        strategy="fsdp",
        fsdp_sharding_strategy="FULL_SHARD",
        fsdp_forward_prefetch=False,
        fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        fsdp_state_dict_type="FULL_STATE_DICT",
        fsdp_reduce_dtype="float32",
        mixed_precision="bf16",
        batch_size=64,
        learning_rate=2e-4,
        gradient_checkpointing=True,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        (
            "fsdp_auto_wrap_policy: size_based_auto_wrap",
            "fsdp_auto_wrap_policy",
            "SIZE_BASED_WRAP",
        ),
        ("fsdp_param_dtype: bf16", "mixed_precision", "bf16"),
        ("torch_dtype: torch.bfloat16", "torch_dtype", "bfloat16"),
        ("precision: bf16-mixed", "mixed_precision", "bf16"),
        ("bf16: false", "mixed_precision", "no"),
        ("devices: -1", "num_processes", "auto"),
        ("effective_batch_size: 256", "global_batch_size", 256),
        ("optimizer: {name: adamw_bnb_8bit, lr: 1e-4}", "optim", "adamw_8bit"),
        ("model: {pooling: last_token}", "pooling", "last"),
        ("lora: {enabled: true, r: 8, alpha: 16}", "lora_r", 8),
        ("mrl: {enabled: true, dims: [1024]}", "mrl_dims", [1024]),
        ("scale: 20", "temperature", 0.05),
        ("ddp_timeout: 1800", "dist_timeout_minutes", 30.0),
        ("use_rslora: true", "lora_variant", "rslora"),
        ("precision: bf16-true", "torch_dtype", "pure_bfloat16"),
        ("reshard_after_forward: false", "fsdp_sharding_strategy", "SHARD_GRAD_OP"),
        ("loss: {type: mnrl, temperature: 0.1}", "loss", "infonce"),
        ("report_to: [tb, WandB]", "report_to", ["tensorboard", "wandb"]),
        ("fsdp: full_shard auto_wrap offload", "fsdp_offload_params", True),
        ("fsdp: true", "strategy", "fsdp"),
        ("fsdp_config: single_node_fsdp", "accelerate_config", "single_node_fsdp"),
        (
            "fsdp: {transformer_cls_to_wrap: BertLayer}",
            "fsdp_transformer_layer_cls_to_wrap",
            "BertLayer",
        ),
        ("use-lora: true", "use_lora", True),
    ],
)
@pytest.mark.promise("B19", "C22", "E26", "E27")
def test_names_and_spellings(resolved, line, option, value):
    run = resolved(f"{line}\n")
    assert_options(run.config, **{option: value})
    assert run.origins[option] == "cfg.yaml:3"


@pytest.mark.promise("E26")
def test_effective_batch_counts_accumulated_batches(read, refused):
    for key in ("effective_batch_size", "effective-batch-size"):
        config = read(f"{key}: 256\n", "gradient_accumulation_steps=4")
        assert config.batch.global_batch_size == 64
    nothing = read("effective_batch_size: null\n", "gradient_accumulation_steps=4")
    assert nothing.batch.global_batch_size is None
    message = refused("effective_batch_size: 10\n", "gradient_accumulation_steps=4")
    assert "effective_batch_size: 10" in message
    assert "gradient_accumulation_steps: 4" in message


def test_switches_that_contradict_each_other(read, refused):
    assert read("bf16: true\nfp16: false\n").model.mixed_precision == "bf16"
    assert "both set mixed_precision" in refused("bf16: true\nfp16: true\n")
    config = read("use_wandb: true\nreport_to: [wandb]\n")
    assert config.logging.report_to == ["wandb"]
    assert "both set report_to" in refused("use_wandb: true\nreport_to: none\n")


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("save_strategy", "checkpoints are written every save_steps"),
        # Without the table the nearest name would be train_batch_size.
        ("train_group_size", "max_negatives: 7"),
    ],
)
def test_keys_that_are_known_and_not_used(refused, name, way_out):
    message = refused(f"{name}: 8\n")
    assert f"'{name}' is not used here" in message
    assert way_out in message


@pytest.mark.parametrize("block", ["eval", "evaluation"])
def test_evaluation_has_no_options_of_training(block, read, refused):
    for key in ("batch_size", "max_length", "bf16", "training"):
        assert f"line 3: unknown option '{key}' in {block}" in refused(
            f"{block}: {{{key}: 64}}\n"
        )
    keys = "data: val.jsonl, steps: 5, patience: 2, load_best_model_at_end: false"
    config = read(f"{block}: {{{keys}}}\n")
    expected = {"eval_steps": 5, "patience": 2, "load_best_model_at_end": False}
    assert_options(config, val_data_path="val.jsonl", **expected)


def test_warmup_ratio_is_a_share(read, refused):
    assert "warmup_ratio must be from 0 to 1" in refused("warmup_ratio: 10\n")
    assert read("warmup_ratio: 1\n").optimizer.warmup_steps == 1.0
    assert read("warmup_steps: 10\n").optimizer.warmup_steps == 10


def test_the_table_is_sound():
    options = all_options()
    names = [name for names in ALIASES.values() for name in names.split()]
    assert set(ALIASES) <= set(options)
    assert len(names) == len(set(names)), "one name, one option"
    assert not set(names) & (set(options) | set(TRANSLATED))
    assert set(SPELLINGS) <= set(options)
    assert set(BLOCK_PREFIXES) <= set(OPTION_BLOCKS)
    for block, table in OPTION_BLOCKS.items():
        assert set(table.values()) <= {*options, *TRANSLATED}, block
        assert all(
            target_of(name, block) is not None
            for name in known_names(block)
            if name not in OPTION_BLOCKS
        ), block
    for name, choices in SPELLINGS.items():
        assert set(choices) <= set(options[name].choices) or name in (
            "report_to",
            "sampling",
        )


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (
            ["--fsdp", "full_shard auto_wrap", "cfg.yaml"],
            ("fsdp=full_shard auto_wrap",),
        ),
        (["--fsdp", "cfg.yaml"], ("fsdp=true",)),
    ],
)
def test_flags_of_translated_names_take_their_values(words, overrides):
    parsed = NO_FLAGS.with_words(words)
    assert (parsed.source, parsed.overrides) == ("cfg.yaml", overrides)
