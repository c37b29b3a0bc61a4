"""However many micro-batches a step has, the ranks exchange embeddings once and gradients once."""

import pytest
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.harness import run_ranks
from tests.parallel.steps import REDUCE_SCATTER
from tests.parity.engine import Case, prepared_step
from tests.tiny import shared, tiny_bert
from vembed.parallel import collectives
from vembed.parallel.session import start_session


def count_rounds(folder, strategy, cases):
    """On every rank: what a step of each case sends, by the counters of vembed and of torch."""
    actual = []
    reduced = []
    finished = []

    def counted(original):
        def micro_batch(*args, **options):
            reduced.append(1)
            return original(*args, **options)

        return micro_batch

    setattr(dist, REDUCE_SCATTER, counted(getattr(dist, REDUCE_SCATTER)))
    finalize = FSDPParamGroup.finalize_backward

    def finalize_backward(group):
        finished.append(group)
        finalize(group)

    setattr(FSDPParamGroup, "finalize_backward", finalize_backward)  # noqa: B010 - mypy
    with start_session(cases[0].config(folder, strategy=strategy)) as session:
        for case in cases:
            options = {"strategy": strategy, "gradient_checkpointing": False}
            config = case.config(folder, **options)
            step, rank_batch = prepared_step(case, config, session)
            collectives.calls.clear()
            reduced.clear()
            finished.clear()
            result = step.accumulate(rank_batch, 0, weight=1.0, is_last_batch=True)
            step.synchronise(0.0)
            actual.append(
                {
                    "calls": result.num_forwards,
                    "ours": dict(collectives.calls),
                    "reduce_scatters": len(reduced),  # those of FSDP alone
                    "waits": len(finished),
                }
            )
    return actual


@pytest.mark.promise("E01")
def test_one_round_of_gradients_per_step():
    cases = [Case("rows", micro="row"), Case("whole", micro="whole")]
    folder = shared(tiny_bert)
    copies = run_ranks(count_rounds, 2, folder, "ddp", cases)[0]
    shards = run_ranks(count_rounds, 2, folder, "fsdp", cases)[0]
    for rows, whole in (copies, shards):
        assert rows["calls"] > 20 and whole["calls"] == 2
        assert rows["ours"] == whole["ours"]
        assert rows["reduce_scatters"] == whole["reduce_scatters"]
        # FSDP2 waits for its reductions in the last backward pass alone.
        assert rows["waits"] == whole["waits"]
    once = ("all_gather_ints", "reduce_scatter_parts", "sum_scalars")
    # The embeddings, and how the rows refer to them.
    expected = {"all_gather_parts": 2, **dict.fromkeys(once, 1)}
    assert shards[0]["ours"] == expected
    assert copies[0]["ours"] == {**expected, "all_reduce_gradients": 1}
    num_units = 2 + 1 + 1  # layers, input embeddings, the rest
    assert shards[0]["reduce_scatters"] in (num_units, num_units + 1)
