"""Presets that a config brings itself: `distributed_examples`, chosen by name."""

import pytest

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
    assert (
        config.parallel.strategy,
        config.parallel.num_processes,
        config.parallel.num_machines,
    ) == (
        "auto",
        "auto",
        1,
    )


@pytest.mark.promise("C18")
def test_a_block_is_chosen_by_name_and_overridden_by_the_command_line(path):
    resolved = resolve_run(path, ["fsdp_config=my_cluster", "devices=3"], env={})
    config = resolved.config
    assert (
        config.parallel.strategy,
        config.parallel.num_processes,
        config.parallel.num_machines,
    ) == (
        "fsdp",
        3,
        2,
    )
    assert config.parallel.fsdp_sharding_strategy == "SHARD_GRAD_OP"
    assert resolved.origins["num_machines"] == f"{path}:6"
    path.write_text(CONFIG + "accelerate_config: small\n")
    assert resolve_run(path, env={}).config.parallel.strategy == "ddp"
    assert (
        resolve_run(
            path, ["accelerate_config=single_node_fsdp"], env={}
        ).config.parallel.num_processes
        == 8
    )


@pytest.mark.promise("C18")
def test_an_unknown_name_lists_all(path):
    with pytest.raises(
        UserError,
        match=r"'nope' is neither a file nor a preset .accelerate_ddp",
    ):
        resolve_run(path, ["fsdp_config=nope"], env={})
