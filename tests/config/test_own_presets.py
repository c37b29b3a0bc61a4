"""Presets that a config brings itself: `distributed_examples`, chosen by name."""

import pytest

from tests.config.conftest import assert_options
from vembed.config.loading import resolve_run
from vembed.errors import UserError

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


@pytest.fixture
def path(tmp_path):
    (tmp_path / "cfg.yaml").write_text(CONFIG)
    return tmp_path / "cfg.yaml"


def test_examples_alone_change_nothing(path):
    config = resolve_run(path, env={}).config
    assert_options(config, strategy="auto", num_processes="auto", num_machines=1)


@pytest.mark.promise("C18")
def test_a_block_is_chosen_by_name_and_overridden_by_the_command_line(path):
    run = resolve_run(path, ["fsdp_config=my_cluster", "devices=3"], env={})
    assert_options(
        run.config,
        strategy="fsdp",
        num_processes=3,
        num_machines=2,
        fsdp_sharding_strategy="SHARD_GRAD_OP",
    )
    assert run.origins["num_machines"] == f"{path}:6"
    path.write_text(CONFIG + "accelerate_config: small\n")
    assert resolve_run(path, env={}).config.parallel.strategy == "ddp"
    run = resolve_run(path, ["accelerate_config=single_node_fsdp"], env={})
    assert run.config.parallel.num_processes == 8


@pytest.mark.promise("C18")
def test_an_unknown_name_lists_all(path):
    with pytest.raises(
        UserError,
        match=r"'nope' is neither a file nor a preset .accelerate_ddp",
    ):
        resolve_run(path, ["fsdp_config=nope"], env={})
