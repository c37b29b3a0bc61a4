"""Presets that a config brings itself: `distributed_examples`, chosen by name."""

import pytest

from tests.config.conftest import assert_options

CONFIG = """\
model_name: m
data_path: d
distributed_examples:
  my_cluster:
    strategy: "fsdp"
    num_nodes: 2
    devices: 4
    fsdp: {enabled: true, sharding_strategy: "SHARD_GRAD_OP"}
  small: {strategy: ddp, devices: 2}
"""


def test_examples_alone_change_nothing(resolved):
    config = resolved(CONFIG, needed="").config
    assert_options(config, strategy="auto", num_processes="auto", num_machines=1)


@pytest.mark.promise("C18")
def test_a_block_is_chosen_by_name_and_overridden_by_the_command_line(resolved):
    run = resolved(CONFIG, "fsdp_config=my_cluster", "devices=3", needed="")
    assert_options(
        run.config,
        strategy="fsdp",
        num_processes=3,
        num_machines=2,
        fsdp_sharding_strategy="SHARD_GRAD_OP",
    )
    assert run.origins["num_machines"] == "cfg.yaml:6"
    text = CONFIG + "accelerate_config: small\n"
    assert resolved(text, needed="").config.parallel.strategy == "ddp"
    config = resolved(text, "accelerate_config=my_cluster", needed="").config
    assert_options(config, strategy="fsdp", num_machines=2)
    run = resolved(text, "accelerate_config=single_node_fsdp", needed="")
    assert run.config.parallel.num_processes == 8
    # As of a file, its options are weaker than those of the config and of a stage.
    text += "strategy: single\n"
    run = resolved(text, "accelerate_config=my_cluster", needed="")
    assert run.config.parallel.strategy == "single"
    assert any("strategy: single" in note and "overrides" in note for note in run.notes)


@pytest.mark.promise("C18")
def test_an_unknown_name_lists_all(refused):
    message = refused(CONFIG, "fsdp_config=nope", needed="")
    assert "'nope' is neither a file nor a preset (accelerate_ddp" in message
