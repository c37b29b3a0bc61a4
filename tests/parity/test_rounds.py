"""However many micro-batches a step has, the ranks exchange embeddings once and gradients once."""

import pytest
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.harness import run_ranks
from tests.parity.engine import Case, build, examples, step_of
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

    # In torch's namespace, where FSDP and vembed find it.
    name = "reduce_scatter_single"
    if not hasattr(dist, name):
        name = "reduce_scatter_tensor"
    setattr(dist, name, counted(getattr(dist, name)))
    finalize = FSDPParamGroup.finalize_backward

    def finalize_backward(group):
        finished.append(group)
        finalize(group)

    setattr(FSDPParamGroup, "finalize_backward", finalize_backward)  # noqa: B010 - mypy
    with start_session(cases[0].config(folder, strategy=strategy)) as session:
        for case in cases:
            options = {"strategy": strategy, "gradient_checkpointing": False}
            config = case.config(folder, **options)
            embedder, loss, featuriser = build(config)
            model = session.prepare(embedder, embedder.description.layer_classes)
            step, rank_batch = step_of(
                model, loss, featuriser, session, examples(case), case.budget()
            )
            collectives.calls.clear()
            reduced.clear()
            finished.clear()
            result = step.accumulate(rank_batch, 0, weight=1.0, is_last=True)
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
        assert rows["ours"]["all_gather_ints"] == 1
        # The embeddings, and how the rows refer to them.
        assert rows["ours"]["all_gather_rows"] == 2
        assert rows["ours"]["reduce_scatter_rows"] == 1
        assert rows["reduce_scatters"] == whole["reduce_scatters"]
        # FSDP2 waits for its reductions in the last backward pass alone.
        assert rows["waits"] == whole["waits"]
    assert copies[0]["ours"]["all_reduce_gradients"] == 1
    assert "all_reduce_gradients" not in shards[0]["ours"]
    num_units = 2 + 1 + 1  # layers, input embeddings, the rest
    assert shards[0]["reduce_scatters"] in (num_units, num_units + 1)
