"""Precedence (defaults, file, launcher, command line), where each value comes from, and the config that is saved."""

from itertools import combinations
from pathlib import Path

import pytest
import yaml

from tests.config.conftest import NEEDED, assert_options
from vembed.config.loading import config_yaml, load_config, resolve_run, save_config
from vembed.config.schema import DataSource, TrainConfig, option_fields
from vembed.errors import UserError

LAUNCHER = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer,ViTLayer",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
}


def test_each_value_says_where_it_comes_from(resolved):
    text = "batch_size: 8\nfsdp_sharding_strategy: SHARD_GRAD_OP\nepochs: 2\n"
    run = resolved(text, "epochs=3", env=LAUNCHER)
    for option, origin in (
        ("batch_size", "cfg.yaml:3"),
        ("fsdp_sharding_strategy", "cfg.yaml:4"),
        ("fsdp_version", "accelerate launch"),
        ("epochs", "command line"),
        ("learning_rate", "default"),
    ):
        assert run.origins[option] == origin
    assert set(run.origins) == set(option_fields())
    assert_options(run.config, epochs=3.0, fsdp_sharding_strategy="SHARD_GRAD_OP")


def test_false_of_the_launcher_is_no_statement(resolved):
    # Accelerate exports "false" for what its file does not mention.
    text = "fsdp_version: 2\nfsdp_forward_prefetch: true\nmixed_precision: bf16\n"
    assert_options(
        resolved(text, env=LAUNCHER).config,
        strategy="fsdp",
        fsdp_version=2,
        fsdp_transformer_layer_cls_to_wrap=["BertLayer", "ViTLayer"],
        fsdp_forward_prefetch=True,
        fsdp_min_num_params=None,
        gradient_checkpointing=None,
    )


def test_one_switch_under_two_names_over_several_sources(resolved):
    text = "fsdp_offload_params: false\nepochs: 3\nuse_fsdp: true\n"
    run = resolved(text, "fsdp-cpu-offload=true", "max_steps=5", "strategy=ddp")
    assert_options(run.config, fsdp_offload_params=True, max_steps=5, strategy="ddp")
    said = "max_steps: 5 (command line) overrides epochs: 3.0 (cfg.yaml, line 4)"
    assert said in run.notes


def test_an_option_can_be_said_in_python():
    needed = {"model_name": "m", "data_path": "d"}
    config = load_config({**needed, "training": {"lr": 1e-4}})
    assert config.optimizer.learning_rate == 1e-4
    sources = [DataSource(path="d", weight=2)]
    options = {"use_lora": True, "quantize_weights": "nf4", "data_path": sources}
    run = resolve_run(TrainConfig(**needed | options), ["epochs=2"])
    assert_options(run.config, epochs=2, data_path=sources, use_lora=True)
    assert run.origins["quantize_weights"] == "TrainConfig"
    assert resolve_run(run) is run
    with pytest.raises(UserError, match=r"the config: .*'learning_rate'"):
        load_config({**needed, "lerning_rate": 1})


def test_paths_start_here_or_else_beside_the_file(write_config):
    file = write_config("val_data_path: val.jsonl\n", name="recipes/cfg.yaml")
    for name in ("recipes/train.jsonl", "recipes/val.jsonl", "val.jsonl"):
        Path(name).touch()
    run = resolve_run(file)
    beside = "recipes/train.jsonl"
    assert_options(run.config, data_path=beside, val_data_path="val.jsonl")
    (note,) = run.notes
    assert "data_path: train.jsonl is not in the current directory" in note
    assert load_config(file, ["data_path=train.jsonl"]).data.data_path == "train.jsonl"
    sources = "data_path: [train.jsonl, {path: val.jsonl}, other.jsonl]\n"
    sources += "guards: [train.jsonl, {path: train.jsonl, name: b}]\n"
    sources += "mine: {every_epochs: 1, corpus_path: [train.jsonl, val.jsonl]}\n"
    sources += "val_data_path: val.jsonl\neval_steps: 2\nsave_steps: 2\n"
    file = write_config(sources, name="recipes/b.yaml", needed="model_name: m\n")
    config = load_config(file)
    other = [DataSource(path="val.jsonl"), "other.jsonl"]
    assert config.data.data_path == [beside, *other]
    first, second = config.evaluation.guards
    assert first == second.path == beside
    assert config.data.mine.corpus_path == [beside, "val.jsonl"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "global_batch_size: 64\nwarmup_steps: 5\nmax_steps: 10\n",
        "save_total_limit: null\nquery_prompt: '2e-5'\nrun_name: 'no'\ndocument_prompt: 'query: '\n",
        "column_mapping: {a: query, 'b c': positive}\nreport_to: none\nmixed_precision: no\nquery_prompt: a  # b\n",
        "data_path: [a.jsonl, {path: b.jsonl, weight: 2, column_mapping: {q: query}}]\n",
        "use_fsdp: true\nfsdp_transformer_layer_cls_to_wrap: [A, B]\nwandb_tags: ['1', '0x1', '1:2', 'null', '~']\n",
    ],
)
def test_the_written_config_repeats_the_run(resolved, text):
    run = resolved(text, needed="model_name: m\n" if "data_path" in text else NEEDED)
    save_config(run.config, "again.yaml")
    assert load_config("again.yaml").to_dict() == run.config.to_dict()
    Path("shown.yaml").write_text(config_yaml(run.config, run.origins))
    again = resolve_run("shown.yaml")
    assert again.config.to_dict() == run.config.to_dict()
    assert set(again.notes) <= set(run.notes)


@pytest.mark.parametrize("limit", ["", ", relative_margin: 0.05"])
def test_the_written_config_repeats_how_negatives_are_chosen(read, limit):
    """Claimed candidates come first only where no limit is given, even if it is the default."""
    config = read(f"mine: {{every_epochs: 2{limit}}}\n")
    save_config(config, "again.yaml")
    again = load_config("again.yaml").data.mine
    assert again == config.data.mine
    assert again.takes_claimed == config.data.mine.takes_claimed == (not limit)


@pytest.mark.parametrize(
    ("precision", "value"), [("fp16", "fp16"), ("bf16", "auto"), ("no", "auto")]
)
def test_precision_of_a_file_and_of_the_launcher(write_config, precision, value):
    file = write_config("accelerate_config: accelerate.yaml\n")
    text = f"distributed_type: MULTI_GPU\nmixed_precision: '{precision}'\n"
    Path("accelerate.yaml").write_text(text)
    by_file = resolve_run(file, env={})
    env = {"ACCELERATE_MIXED_PRECISION": precision}
    for run in (by_file, resolve_run(write_config(), env=env)):
        assert run.precision.value == value
        said = [note for note in run.notes if note.startswith("mixed_precision: no")]
        assert len(said) == (precision == "no")


@pytest.mark.promise("E33")
def test_the_timeout_comes_from_the_config_or_from_the_environment(resolved, refused):
    env = {"NCCL_TIMEOUT": "90"}
    assert resolved(env=env).timeout_minutes.value == 1.5
    run = resolved("dist_timeout_minutes: 7\n", env=env)
    assert run.timeout_minutes.value == 7
    (note,) = run.notes
    assert "dist_timeout_minutes: 7.0 (cfg.yaml, line 3) overrides NCCL_TIMEOUT" in note
    said = "NCCL_TIMEOUT=soon must be a number of seconds"
    assert said in refused(env={"NCCL_TIMEOUT": "soon"})


@pytest.mark.parametrize(
    ("text", "strategy"),
    {
        "": "auto",
        "use_fsdp: false\n": "ddp",
        "strategy: fsdp\n": "fsdp",
        "temperature: 0.05\n": "auto",
    }.items(),
)
@pytest.mark.promise("B03")
def test_use_fsdp_false_rules_sharding_out_only_where_it_is_written(
    resolved, text, strategy
):
    run = resolved(text)
    assert run.strategy.value == strategy
    assert run.strategy.origin == ("cfg.yaml:3" if "fsdp" in text else "default")
    save_config(run.config, "again.yaml")
    again = resolve_run("again.yaml", env={})
    assert again.strategy.value == strategy
    is_given = "temperature" in again.config.given_options()
    assert is_given == ("temperature" in text)


WAYS = {
    "accelerate file": 2,
    "launcher": 3,
    "config": 4,
    "stage": 5,
    "file on the command line": 6,
    "command line": 7,
}
"""Every way in for one option, weakest first, and the value that it gives; the default is none."""
PAIRS = [
    (weaker, stronger)
    for weaker, stronger in combinations(WAYS, 2)
    if stronger != "file on the command line"
    or weaker == "stage"  # else it is an Accelerate file as any other
]


def given_by(ways, write_config):
    """The run in which `fsdp_min_num_params` is given in these ways."""
    for way in ("accelerate file", "file on the command line"):
        block = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": WAYS[way],
        }
        settings = {"distributed_type": "FSDP", "fsdp_config": block}
        Path(f"{way.replace(' ', '_')}.yaml").write_text(yaml.safe_dump(settings))
    text = "use_fsdp: true\n"
    if "accelerate file" in ways:
        text += "accelerate_config: accelerate_file.yaml\n"
    if "config" in ways:
        text += f"fsdp_min_num_params: {WAYS['config']}\n"
    if "stage" in ways:
        text += f"training_stages:\n  one:\n    fsdp_min_num_params: {WAYS['stage']}\n"
    words = []
    if "file on the command line" in ways:
        words.append("accelerate_config=file_on_the_command_line.yaml")
    if "command line" in ways:
        words.append(f"fsdp_min_num_params={WAYS['command line']}")
    env = {}
    if "launcher" in ways:
        env = {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
            "FSDP_MIN_NUM_PARAMS": str(WAYS["launcher"]),
        }
    return resolve_run(write_config(text), words, env=env)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_is_stronger_than_the_default(way, write_config):
    run = given_by((way,), write_config)
    assert run.config.parallel.fsdp_min_num_params == WAYS[way]
    assert run.origins["fsdp_min_num_params"] != "default"
    assert given_by((), write_config).origins["fsdp_min_num_params"] == "default"


@pytest.mark.parametrize(("weaker", "stronger"), PAIRS)
def test_of_two_ways_in_the_more_specific_one_counts_and_the_other_is_named(
    weaker, stronger, write_config
):
    run = given_by((weaker, stronger), write_config)
    assert run.config.parallel.fsdp_min_num_params == WAYS[stronger]
    notes = [note for note in run.notes if " overrides " in note]
    # A stage is part of the config, and made to differ from the rest.
    if (weaker, stronger) == ("config", "stage"):
        assert notes == []
        return
    option = "fsdp_min_num_params"
    (note,) = [note for note in notes if option in note]
    winner, _, loser = note.partition(" overrides ")
    assert f"{option}: {WAYS[stronger]} (" in winner
    assert f"{option}: {WAYS[weaker]} (" in loser
