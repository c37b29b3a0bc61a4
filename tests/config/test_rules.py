"""Each rule across options: one sentence, with both values, the way out and where they were set; and remarks."""

import pytest

from vembed.config import rules
from vembed.config.loading import load_config, resolve_run
from vembed.config.schema import TrainConfig, option_fields
from vembed.errors import UserError


def config(**values):
    return TrainConfig(model_name="m", data_path="d", **values)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "loss: cosine\nmine: {every_epochs: 1}",
            "mine adds hard negatives, and loss: cosine reads none",
        ),
        (
            "loss: kl\nteacher: scores\nmine: {}",
            "mine adds negatives that have no scores in the data",
        ),
        (
            "mine: {top_k: 3}",
            "mine: top_k: 3 must be at least skip_first + num_negatives: 0 + 5",
        ),
        (
            "mine: {every_epochs: 0}",
            "mine: every_epochs must be greater than 0, but is 0",
        ),
        (
            "mine: {every_epoch: 1}",
            "mine: unknown key 'every_epoch', did you mean 'every_epochs'?",
        ),
        (
            "batch_size: 8\nglobal_batch_size: 64",
            "batch_size: 8 (per process) and global_batch_size: 64",
        ),
        (
            "warmup_ratio: 0.2\nwarmup_steps: 5",
            "both set warmup_steps: keep one",
        ),
        (
            "warmup_steps: 50\nmax_steps: 10",
            "warmup_steps: 50 is more than max_steps: 10",
        ),
        (
            "use_mrl: true\nmrl_dims: [8, 4]\nmrl_weights: [1]",
            "mrl_weights has 1 entries and mrl_dims has 2",
        ),
        ("use_mrl: true\nmrl_weights: [1]", "needs mrl_dims"),
        ("use_mrl: true\nmrl_dims: []", "mrl_dims must be auto or a list"),
        ("use_lora: false\nuse_qlora: true", "set use_lora: true"),
        (
            "model_family: composed",
            "model_family: composed and image_model_name: null: a composed model has both",
        ),
        (
            "model_family: clip\nimage_model_name: x",
            "image_model_name: x: a composed model has both",
        ),
        ("loss: triplet\nmax_negatives: 0", "max_negatives: 0 leaves none"),
        (
            "use_fsdp: true\nstrategy: ddp",
            "both set strategy: keep one",
        ),
        (
            "fsdp: {enabled: false}\nstrategy: fsdp",
            "both set strategy: keep one",
        ),
        (
            "fsdp_offload_params: true\nfsdp_cpu_offload: false",
            "both set fsdp_offload_params: keep one",
        ),
        (
            "gradient_checkpointing: true\nfsdp_activation_checkpointing: false",
            "both set gradient_checkpointing: keep one",
        ),
        (
            "fsdp_mixed_precision: true\nmixed_precision: no",
            "both set mixed_precision: keep one",
        ),
        ("load_best_model_at_end: true\nsave_steps: 5", "give val_data_path too"),
        (
            "load_best_model_at_end: true\neval_steps: 10\nsave_steps: 25\nval_data_path: v",
            "save_steps: 25 must be a multiple of eval_steps: 10",
        ),
        ("profile_steps: [12, 10]", "profile_steps: [12, 10] must be two numbers"),
        ("profile_steps: 3", "profile_steps: [3] must be two numbers"),
        (
            "log_file: ../x.log",
            "log_file: '../x.log' must be the name of a file in output_dir",
        ),
        (
            "learn_temperature: true\ntemperature: 2",
            "temperature: 2 is where a learned temperature starts",
        ),
        (
            "loss: sigmoid\ntemperature: 0.001",
            "it is kept from 0.005 to 1: start inside",
        ),
        ("output_dir: ''", "output_dir is empty"),
        ("loss: kl", "loss: kl follows a teacher, and the config names none"),
        (
            "losses: [{loss: infonce}]\nloss: triplet",
            "losses and loss: triplet are two ways to say one thing",
        ),
        ("losses: []", "losses must have at least 1 item"),
        (
            "loss: relational\nteacher: scores",
            "loss: relational needs vectors",
        ),
        (
            "losses: [{loss: kl, teacher: scores, distill_candidates: batch}]",
            "loss: kl needs vectors",
        ),
        ("guide: scores", "guide: scores"),
        ("teachers: [a, {model: b, name: a}]", "teachers: a is named twice"),
        (
            "teachers: [{model: b, name: scores}]",
            "the name 'scores' stands for scores in the data",
        ),
        (
            "loss: angle\nuse_mrl: true\nmrl_dims: [9, 4]",
            "mrl_dims has 9: give even sizes",
        ),
        (
            "losses: [{loss: infonce, learn_temperature: true, temperature: 2}]",
            "temperature: 2 is where a learned",
        ),
    ],
)
@pytest.mark.promise("B06")
def test_rule(write_config, text, sentence):
    with pytest.raises(UserError) as caught:
        load_config(write_config(text + "\n"))
    assert sentence in str(caught.value)
    assert "cfg.yaml, line" in str(caught.value), "where it was set"


def test_a_good_config_breaks_no_rule(write_config):
    text = "use_mrl: true\nmrl_dims: [128, 256]\nmrl_weights: [1, 2]\nload_best_model_at_end: true\neval_steps: 5\n"
    resolved = resolve_run(
        write_config(text + "save_steps: 10\nval_data_path: v\neval_metric: ndcg@10\n")
    )
    assert rules.violations(resolved.config, {}) == []
    assert resolved.notes == ()


@pytest.mark.parametrize(("world_size", "rows"), [(1, 96), (2, 48), (3, 32)])
def test_global_batch_is_divided_among_processes(world_size, rows):
    assert config(global_batch_size=96).batch.examples_per_process(world_size) == rows
    assert config(batch_size=7).batch.examples_per_process(world_size) == 7


@pytest.mark.promise("E26")
def test_global_batch_that_cannot_be_divided():
    with pytest.raises(
        UserError,
        match="global_batch_size: 100 cannot be divided among 3 processes",
    ):
        config(global_batch_size=100).batch.examples_per_process(3)


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        (
            {"loss": "triplet", "temperature": 0.1},
            "temperature: 0.1 has no effect with loss: triplet",
        ),
        (
            {"loss": "cosine", "bidirectional": True},
            "bidirectional: true has no effect with loss: cosine",
        ),
        (
            {"loss": "sigmoid", "bidirectional": True},
            "bidirectional: true has no effect with loss: sigmoid",
        ),
        (
            {"margin": 0.5},
            "margin: 0.5 has no effect with loss: infonce",
        ),
        ({"loss": "cosent", "guide": "g"}, "guide: g has no effect with loss: cosent"),
        (
            {
                "losses": [
                    {"loss": "infonce"},
                    {"loss": "spread_out", "hardness_alpha": 2.0},
                ]
            },
            "losses, entry 2: hardness_alpha: 2.0 has no effect with loss: spread_out",
        ),
        (
            {"losses": [{"loss": "cosine"}], "temperature": 0.1},
            "temperature: 0.1 has no effect with losses: cosine",
        ),
        ({"lora_r": 8}, "lora_r: 8 has no effect without use_lora"),
        (
            {"val_data_path": "val.jsonl", "eval_steps": None, "patience": 3},
            "patience: 3 has no effect with eval_steps: null",
        ),
        (
            {"mrl_projection": "pca"},
            "mrl_projection: pca has no effect without mrl_dims",
        ),
        ({"eval_steps": 5}, "eval_steps: 5 has no effect without val_data_path"),
        (
            {"max_steps": 5, "epochs": 2},
            "max_steps: 5 decides the length of the run, epochs: 2 does not",
        ),
        (
            {"homogeneous_batches": True},
            "homogeneous_batches: true has no effect with a single source in data_path",
        ),
        (
            {"sampling": "weights"},
            "sampling: weights has no effect with a single source in data_path",
        ),
        (
            {"wandb_project": "x"},
            "wandb_project: x has no effect with report_to: tensorboard",
        ),
        (
            {"strategy": "ddp", "fsdp_version": 1},
            "fsdp_version: 1 (TrainConfig) has no effect with strategy: ddp",
        ),
        ({"val_data_path": "d"}, "val_data_path is the training data"),
        (
            {"use_lora": True, "learning_rate": 2e-5},
            "learning_rate: 2e-05 is a rate for training all weights",
        ),
        ({"patience": 3}, "patience: 3 has no effect without val_data_path"),
        (
            {"eval_before": False},
            "eval_before: false has no effect without val_data_path",
        ),
        (
            {"eval_metric": "ndcg@10"},
            "eval_metric: ndcg@10 has no effect without val_data_path",
        ),
        ({"save_merged": False}, "save_merged: false has no effect without use_lora"),
        (
            {"tokenizer_name": "other"},
            "tokenizer_name: other has no effect without model_class",
        ),
        (
            {"query_prompt": "Instruct: find\\nQuery:"},
            "query_prompt: Instruct: find\\nQuery: holds a backslash and an n where a line break is usual",
        ),
    ],
)
def test_what_has_no_effect_is_said(values, remark):
    notes = resolve_run(config(**values), env={}).notes
    assert [line for line in notes if line.startswith(remark)], notes


def test_defaults_cause_no_remark():
    assert rules.remarks(config()) == []
    assert rules.remarks(config(use_lora=True, learning_rate=2e-4)) == []
    assert rules.remarks(config(query_prompt="Instruct: find\nQuery:")) == []


def test_tables_name_options():
    names = {name for row in rules.NEEDED_BY.values() for name in row.split()}
    assert names | set(rules.NEEDED_BY) <= set(option_fields())
