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


def test_each_value_says_where_it_comes_from(write_config):
    file = write_config(
        "batch_size: 8\nfsdp_sharding_strategy: SHARD_GRAD_OP\nepochs: 2\n"
    )
    resolved = resolve_run(file, ["epochs=3"], env=LAUNCHER)
    assert resolved.origins["batch_size"] == "cfg.yaml:3"
    assert resolved.origins["fsdp_sharding_strategy"] == "cfg.yaml:4"
    assert resolved.origins["fsdp_version"] == "accelerate launch"
    assert resolved.origins["epochs"] == "command line"
    assert resolved.origins["learning_rate"] == "default"
    assert set(resolved.origins) == set(option_fields())
    assert_options(resolved.config, epochs=3.0, fsdp_sharding_strategy="SHARD_GRAD_OP")


def test_the_file_overrides_the_launcher_and_the_command_line_the_file_and_both_are_said(
    write_config,
):
    file = write_config(
        "fsdp_version: 2\nfsdp_forward_prefetch: true\nmixed_precision: bf16\n"
    )
    resolved = resolve_run(file, env=LAUNCHER)
    assert (
        "fsdp_version: 2 (cfg.yaml, line 3) overrides fsdp_version: 1 (accelerate launch)"
        in resolved.notes
    )
    # Accelerate exports "false" for what its file does not mention: that is no statement.
    assert_options(
        resolved.config,
        strategy="fsdp",
        fsdp_version=2,
        fsdp_transformer_layer_cls_to_wrap=["BertLayer", "ViTLayer"],
        fsdp_forward_prefetch=True,
        fsdp_min_num_params=None,
        gradient_checkpointing=None,
    )
    stronger = resolve_run(file, ["fsdp_version=1"], env=LAUNCHER)
    assert stronger.config.parallel.fsdp_version == 1
    assert (
        "fsdp_version: 1 (command line) overrides fsdp_version: 2 (cfg.yaml, line 3)"
        in stronger.notes
    )


def test_one_switch_under_two_names_over_several_sources(write_config):
    file = write_config("fsdp_offload_params: false\nepochs: 3\nuse_fsdp: true\n")
    resolved = resolve_run(
        file, ["fsdp-cpu-offload=true", "max_steps=5", "strategy=ddp"]
    )
    assert_options(
        resolved.config, fsdp_offload_params=True, max_steps=5, strategy="ddp"
    )
    assert (
        "max_steps: 5 (command line) overrides epochs: 3.0 (cfg.yaml, line 4)"
        in resolved.notes
    )


def test_an_option_can_be_said_in_python(write_config):
    write_config()
    from_dict = load_config(
        {"model_name": "m", "data_path": "d", "training": {"lr": 1e-4}}
    )
    assert from_dict.optimizer.learning_rate == 1e-4
    configured = TrainConfig(
        model_name="m",
        data_path=[DataSource(path="d", weight=2)],
        use_lora=True,
        quantize_weights="nf4",
    )
    resolved = resolve_run(configured, ["epochs=2"])
    assert resolved.config.optimizer.epochs == 2 and resolved.config.data.data_path == [
        DataSource(path="d", weight=2)
    ]
    assert resolved.config.adapters.use_lora is True
    assert resolved.origins["quantize_weights"] == "TrainConfig"
    assert resolve_run(resolved) is resolved
    with pytest.raises(
        UserError,
        match="the config: unknown option 'lerning_rate', did you mean 'learning_rate'",
    ):
        load_config({"model_name": "m", "data_path": "d", "lerning_rate": 1})


def test_paths_start_here_or_else_beside_the_file(write_config):
    file = write_config("val_data_path: val.jsonl\n", name="recipes/cfg.yaml")
    Path("recipes/train.jsonl").touch()
    Path("recipes/val.jsonl").touch()
    Path("val.jsonl").touch()
    resolved = resolve_run(file)
    assert resolved.config.data.data_path == "recipes/train.jsonl"
    assert resolved.config.data.val_data_path == "val.jsonl"
    assert resolved.notes == (
        "data_path: train.jsonl is not in the current directory; using the one beside cfg.yaml",
    )
    assert load_config(file, ["data_path=train.jsonl"]).data.data_path == "train.jsonl"
    sources = write_config(
        "data_path: [train.jsonl, {path: val.jsonl}, other.jsonl]\n",
        name="recipes/b.yaml",
        needed="model_name: m\n",
    )
    assert load_config(sources).data.data_path == [
        "recipes/train.jsonl",
        DataSource(path="val.jsonl"),
        "other.jsonl",
    ]
    guarded = write_config(
        "guards: [train.jsonl, {path: train.jsonl, name: b}]\n"
        "mine: {every_epochs: 1, corpus_path: [train.jsonl, val.jsonl]}\n"
        "val_data_path: val.jsonl\neval_steps: 2\nsave_steps: 2\n",
        name="recipes/c.yaml",
        needed="model_name: m\ndata_path: train.jsonl\n",
    )
    config = load_config(guarded)
    first, second = config.evaluation.guards
    assert first == second.path == "recipes/train.jsonl"
    assert config.data.mine.corpus_path == ["recipes/train.jsonl", "val.jsonl"]


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
def test_the_written_config_repeats_the_run(write_config, text):
    needed = "model_name: m\n" if "data_path" in text else NEEDED
    resolved = resolve_run(write_config(text, needed=needed))
    save_config(resolved.config, "again.yaml")
    assert load_config("again.yaml").to_dict() == resolved.config.to_dict()
    Path("shown.yaml").write_text(config_yaml(resolved.config, resolved.origins))
    again = resolve_run("shown.yaml")
    assert again.config.to_dict() == resolved.config.to_dict()
    assert not [note for note in again.notes if note not in resolved.notes]


@pytest.mark.parametrize("limit", ["", ", relative_margin: 0.05"])
def test_the_written_config_repeats_how_negatives_are_chosen(write_config, limit):
    """Claimed candidates come first only where no limit is given, even if it is the default."""
    config = load_config(write_config(f"mine: {{every_epochs: 2{limit}}}\n"))
    save_config(config, "again.yaml")
    again = load_config("again.yaml").data.mine
    assert again == config.data.mine
    assert again.takes_claimed == config.data.mine.takes_claimed == (not limit)


def test_precision_of_a_file_and_of_the_launcher(write_config):
    write_config()
    for precision, value in (("fp16", "fp16"), ("bf16", "auto"), ("no", "auto")):
        Path("accelerate.yaml").write_text(
            f"distributed_type: MULTI_GPU\nmixed_precision: '{precision}'\n"
        )
        by_file = resolve_run(
            write_config("accelerate_config: accelerate.yaml\n"), env={}
        )
        launched = resolve_run(
            write_config(), env={"ACCELERATE_MIXED_PRECISION": precision}
        )
        assert by_file.precision.value == launched.precision.value == value
        said = [
            note
            for note in (*by_file.notes, *launched.notes)
            if note.startswith("mixed_precision: no")
        ]
        assert len(said) == (2 if precision == "no" else 0)


@pytest.mark.promise("E33")
def test_the_timeout_comes_from_the_config_or_from_the_environment(write_config):
    env = {"NCCL_TIMEOUT": "90"}
    assert resolve_run(write_config(), env=env).timeout_minutes.value == 1.5
    configured = resolve_run(write_config("dist_timeout_minutes: 7\n"), env=env)
    assert configured.timeout_minutes.value == 7
    assert (
        "dist_timeout_minutes: 7.0 (cfg.yaml, line 3) overrides NCCL_TIMEOUT=90 (environment)"
        in configured.notes
    )
    with pytest.raises(
        UserError, match="NCCL_TIMEOUT=soon must be a number of seconds"
    ):
        resolve_run(write_config(), env={"NCCL_TIMEOUT": "soon"})


def test_use_fsdp_false_rules_sharding_out_only_where_it_is_written(write_config):
    assert resolve_run(write_config(), env={}).strategy.value == "auto"
    never = resolve_run(write_config("use_fsdp: false\n"), env={})
    assert (never.strategy.value, never.strategy.origin) == ("ddp", "cfg.yaml:3")
    for text in ("", "use_fsdp: false\n", "strategy: fsdp\n", "temperature: 0.05\n"):
        run = resolve_run(write_config(text), env={})
        save_config(run.config, "again.yaml")
        again = resolve_run("again.yaml", env={})
        assert again.strategy.value == run.strategy.value
        assert ("temperature" in again.config.given_options()) == (
            "temperature" in text
        )


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
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    }
    env = (
        env | {"FSDP_MIN_NUM_PARAMS": str(WAYS["launcher"])}
        if "launcher" in ways
        else {}
    )
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
    notes = [
        note
        for note in run.notes
        if " overrides " in note and "fsdp_min_num_params" in note
    ]
    if (weaker, stronger) == (
        "config",
        "stage",
    ):  # which is part of it, and made to differ from the rest
        assert notes == []
        return
    (note,) = notes
    assert (
        f"fsdp_min_num_params: {WAYS[stronger]} (" in note.partition(" overrides ")[0]
    )
    assert f"fsdp_min_num_params: {WAYS[weaker]} (" in note.partition(" overrides ")[2]
