"""Under FSDP2 parameters are gathered once per step, not for every micro-batch, and no digit changes by it."""

import numpy as np
import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import vembed
from tests.harness import run_ranks
from tests.training.test_run import losses_and_norms, settings
from vembed.parallel.placement import Placement
from vembed.training.optimizer import Update

STEPS = 3


def train(options):
    """One run on every rank: gathers of a step and what is still gathered when the optimizer steps; and the losses."""
    gathers = []
    until_update = []
    left = []
    original = _fsdp_param_group.foreach_all_gather
    apply = Update.apply

    def gather(*args, **more):
        gathers.append(1)
        return original(*args, **more)

    def update(self, *args):
        units = [
            module for module in self.model.modules() if isinstance(module, FSDPModule)
        ]
        until_update.append(len(gathers))
        for unit in units:
            left.append(unit._get_fsdp_state()._fsdp_param_group.is_unsharded)
        return apply(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_all_gather", gather)
        patch.setattr(Update, "apply", update)
        vembed.train(options)
    assert not any(left)
    return {
        # The check of what is saved gathers once more.
        "gathers": until_update[-1] / STEPS,
        "units": len(left) / STEPS,
        "losses": losses_and_norms(options["output_dir"]),
    }


def train_all(runs):
    """Each run twice on every rank: gathered once in a step, and for every micro-batch."""
    results = []
    for options in runs:
        results.append(train(options))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Placement, "keeps_gathered", lambda *_: False)
            output_dir = options["output_dir"] + "-often"
            results.append(train({**options, "output_dir": output_dir}))
    return results


CASES = [
    {"use_gradient_cache": True},
    {"use_gradient_cache": False, "use_lora": True},
]


@pytest.mark.promise("E01")
def test_units_were_gathered_twice_in_a_step_with_gradient_cache(
    tmp_path,
):
    runs = []
    for number, more in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        common = {
            "strategy": "fsdp",
            "batch_size": 8,
            "max_steps": STEPS,
            "micro_batch_tokens": 60,
        }
        common |= {
            "val_data_path": None,
            "eval_before": False,
        }
        runs.append(settings(folder, **common, **more))
    actual, _ = run_ranks(train_all, 2, runs)
    for more, once, often in zip(CASES, actual[::2], actual[1::2], strict=True):
        assert once["gathers"] < often["gathers"] / 3, more
        if more["use_gradient_cache"]:
            # Also with two forward passes of the last micro-batch.
            assert once["gathers"] == once["units"]
        np.testing.assert_allclose(once["losses"], often["losses"], rtol=1e-6)
