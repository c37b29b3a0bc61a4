"""Each rule across options: one sentence, with both values, the way out and where they were set; and remarks."""

import pytest

from vembed.config import rules
from vembed.config.loading import resolve_run
from vembed.config.schema import TrainConfig, option_fields


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
            "mine adds negatives that have no scores in the data, and loss: kl",
        ),
        (
            "loss: listwise\ntask: rerank\nin_batch_negatives: 3",
            "in_batch_negatives adds negatives that have no scores in the data, and loss: listwise",
        ),
        (
            "mine: {top_k: 3}",
            "mine: top_k: 3 must be at least skip_first + num_negatives: 0 + 5",
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
            "warmup_steps: 50\nmax_steps: 10",
            "warmup_steps: 50 is more than max_steps: 10",
        ),
        (
            "use_mrl: true\nmrl_dims: [8, 4]\nmrl_weights: [1]",
            "mrl_weights has 1 entries and mrl_dims has 2",
        ),
        ("use_mrl: true\nmrl_weights: [1]", "needs mrl_dims"),
        (
            "from_scratch: true\nuse_lora: true\nsave_merged: false",
            "the initial weights of from_scratch: true would be lost",
        ),
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
        ("load_best_model_at_end: true\nsave_steps: 5", "give val_data_path too"),
        (
            "load_best_model_at_end: true\neval_steps: 10\nsave_steps: 25\nval_data_path: v",
            "save_steps: 25 must be a multiple of eval_steps: 10",
        ),
        ("profile_steps: [12, 10]", "profile_steps: [12, 10] must be two numbers"),
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
            "task: rerank\nfirst_stage: run.trec\nguards: [other.jsonl]",
            "other.jsonl has others",
        ),
        ("loss: anchor\nfrom_scratch: true", "random weights know nothing"),
        (
            "loss: anchor\nmrl_dims: [8]\nmrl_projection: pca",
            "mrl_projection: pca turns them",
        ),
        (
            "losses: [{loss: infonce}]\nloss: triplet",
            "losses and loss: triplet are two ways to say one thing",
        ),
        ("loss: relational\nteacher: scores", "loss: relational needs vectors"),
        ("guide: scores", "guide: scores"),
        ("teachers: [a, {model: b, name: a}]", "teachers: a is named twice"),
        (
            "teachers: [{model: b, name: scores}]",
            "the name 'scores' stands for scores in the data",
        ),
        (
            "loss: angle\nuse_mrl: true\nmrl_dims: [9, 4]",
            "mrl_dims has 9: give even dims",
        ),
    ],
)
@pytest.mark.promise("B06")
def test_rule(refused, text, sentence):
    message = refused(text + "\n")
    assert sentence in message
    assert "cfg.yaml, line" in message, "where it was set"


@pytest.mark.parametrize(("world_size", "rows"), [(1, 96), (2, 48), (3, 32)])
def test_global_batch_is_divided_among_processes(world_size, rows):
    assert config(global_batch_size=96).batch.examples_per_process(world_size) == rows
    assert config(batch_size=7).batch.examples_per_process(world_size) == 7


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        (
            {"loss": "triplet", "temperature": 0.1},
            "temperature: 0.1 has no effect with loss: triplet",
        ),
        (
            {
                "losses": [
                    {"loss": "infonce"},
                    {"loss": "spread_out", "hardness_alpha": 2.0},
                ]
            },
            "losses, entry 2: hardness_alpha: 2.0 has no effect with loss: spread_out",
        ),
        ({"lora_r": 8}, "lora_r: 8 has no effect without use_lora"),
        (
            {"val_data_path": "val.jsonl", "eval_steps": None, "patience": 3},
            "patience: 3 has no effect with eval_steps: null",
        ),
        (
            {"max_steps": 5, "epochs": 2},
            "max_steps: 5 decides the length of the run, epochs: 2 does not",
        ),
        (
            {"homogeneous_batches": True},
            "homogeneous_batches: true has no effect with a single source in data_path",
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
