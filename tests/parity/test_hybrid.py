"""HYBRID_SHARD with gradients reduced after every micro-batch: between machines they are summed once per step."""

import os

import pytest
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from tests.harness import run_ranks
from tests.parity.engine import assert_equal_gradients
from tests.parity.test_families_parity import BY_NAME, on_ranks, wanted
from vembed.parallel import placement


class Counting:
    """torch.distributed as FSDP2 sees it, with a count of its all-reduces."""

    def __init__(self):
        self.count = 0

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_reduce(self, *args, **options):
        """Count and pass on."""
        self.count += 1
        return dist.all_reduce(*args, **options)


def step_between_machines():
    """On every rank, of two machines with two each: a step without and one with Gradient Cache; sums between them."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    # So that gradients are reduced after every micro-batch.
    placement.UNSHARDED_SHARE = 1e-9
    counting = Counting()
    _fsdp_collectives.dist = counting
    try:
        config = BY_NAME["clip"].config(
            strategy="fsdp", fsdp_sharding_strategy="HYBRID_SHARD"
        )
        return on_ranks([config]), counting.count
    finally:
        _fsdp_collectives.dist = dist


@pytest.mark.promise("A24")
def test_machines_were_summed_after_every_micro_batch():
    """Of CLIP, whose root unit holds parameters of both towers, while a micro-batch uses one."""
    plain = wanted("clip")
    for results, count in run_ranks(step_between_machines, 4):
        # The layers, the token embeddings and the root.
        num_units = results[0]["units"][0] + 2
        assert all(result["calls"] > 2 for result in results)
        assert count == 2 * num_units, "each unit once in each of the two steps"
        for result in results:
            ours = {**result["gradients"], "loss": plain["loss"]}
            assert_equal_gradients(ours, plain, BY_NAME["clip"].tolerance)
