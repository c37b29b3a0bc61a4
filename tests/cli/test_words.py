"""The words after `vembed train`: flags in kebab or snake case, key=value, and what only the launcher needs."""

import pytest

from tests.commands import train_arguments
from vembed.cli.arguments import TrainArguments
from vembed.errors import UserError


@pytest.mark.parametrize(
    ("words", "overrides"),
    {
        "--use-fsdp true --batch-size 8": ["use_fsdp=true", "batch_size=8"],
        "--use_fsdp=false --fsdp-sharding-strategy SHARD_GRAD_OP": [
            "use_fsdp=false",
            "fsdp_sharding_strategy=SHARD_GRAD_OP",
        ],
        "--use-fsdp --debug": ["use_fsdp=true", "debug=true"],
        "--set epochs=2 --set=lr=1e-5": ["epochs=2", "lr=1e-5"],
        "--resume output/checkpoint-5": ["resume=output/checkpoint-5"],
        "--use-gradient-cache auto --mrl-projection epochs=1": [
            "use_gradient_cache=auto",
            "mrl_projection=true",
            "epochs=1",
        ],
        "--query-prompt=--x": ["query_prompt=--x"],
        "--fsdp.cpu-offload true": ["fsdp.cpu_offload=true"],
    }.items(),
)
@pytest.mark.promise("A17", "A18", "B19", "B25")
def test_flags_become_options(words, overrides):
    before = train_arguments(["cfg.yaml", *words.split()])
    after = train_arguments([*words.split(), "cfg.yaml"])
    assert (
        before == after == TrainArguments(source="cfg.yaml", overrides=tuple(overrides))
    )


@pytest.mark.promise("A10", "C20")
def test_what_only_the_launcher_needs():
    words = "--config cfg.toml --machine-rank 1 --main-process-ip 10.0.0.1 --main_process_port 1234"
    words += " --stage stage2 --run-id a --dry-run"
    assert train_arguments(words.split()) == TrainArguments(
        source="cfg.toml",
        stage="stage2",
        machine_rank=1,
        main_process_ip="10.0.0.1",
        main_process_port=1234,
        run_id="a",
        is_dry_run=True,
    )


def test_the_words_for_other_processes_mean_the_same():
    arguments = train_arguments(
        ["a b.yaml", "query_prompt=--set x=1", "--stage", "two", "--lr", "1e-5"]
    )
    assert train_arguments(arguments.command_line()) == arguments


@pytest.mark.parametrize(
    ("words", "sentence"),
    {
        "": "which config\\? Give its file",
        "a.yaml b.yaml": "unexpected 'b.yaml' beside the config 'a.yaml'",
        "a.yaml --batch-size --debug": "--batch-size needs a value",
        "a.yaml --set epochs": "--set 'epochs': it sets an option",
    }.items(),
)
def test_mistakes_are_one_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence):
        train_arguments(words.split())
