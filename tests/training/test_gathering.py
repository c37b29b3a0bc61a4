"""Under FSDP2 parameters are gathered once per step, not for every micro-batch, and no digit changes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import vembed
from tests.harness import run_ranks
from tests.training.test_run import metrics, settings
from vembed.training.update import Update

STEPS = 3


def train(options: dict[str, Any]) -> dict[str, Any]:
    """One run on every rank: gathers, forwards and what is still gathered when the optimizer steps; and the losses."""
    gathers: list[int] = []
    left: list[bool] = []
    units_seen: set[int] = set()
    original, apply = _fsdp_param_group.foreach_all_gather, Update.apply

    def gather(*args: Any, **more: Any) -> Any:
        gathers.append(1)
        return original(*args, **more)

    def update(self: Update, *args: Any) -> Any:
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        units_seen.add(len(units))
        left.extend(unit._get_fsdp_state()._fsdp_param_group.is_unsharded for unit in units)  # type: ignore[union-attr]
        return apply(self, *args)

    _fsdp_param_group.foreach_all_gather, Update.apply = gather, update  # type: ignore[method-assign]
    try:
        vembed.train(options)
    finally:
        _fsdp_param_group.foreach_all_gather, Update.apply = original, apply  # type: ignore[method-assign]
    return {
        "gathers": len(gathers) / STEPS,
        "units": max(units_seen),
        "left": any(left),
        "losses": metrics(options["output_dir"]),
        "norms": metrics(options["output_dir"], "grad_norm"),
    }


@pytest.mark.promise("E01")
@pytest.mark.parametrize("more", [{"use_gradient_cache": True}, {"use_gradient_cache": False}, {"use_lora": True}])
def test_gathered_once_per_step(more: dict[str, Any], tmp_path: Path) -> None:
    runs = {}
    for once in (True, False):
        folder = tmp_path / str(once)
        folder.mkdir()
        options = settings(
            folder, use_fsdp=True, batch_size=8, max_steps=STEPS, micro_batch_tokens=60, val_data_path=None,
            lora_dropout=0.0, eval_before=False, **more, **({} if once else {"fsdp_reshard_after_forward": True}),
        )  # fmt: skip
        runs[once], _ = run_ranks(train, 2, options, process_group=False)
    assert runs[True]["gathers"] < runs[False]["gathers"] / 3
    if "use_gradient_cache" in more:  # otherwise the search for the budget gathers once more
        assert runs[True]["gathers"] == runs[True]["units"], "also with two forward passes of the last micro-batch"
    assert not runs[True]["left"] and not runs[False]["left"]
    for key in ("losses", "norms"):
        assert runs[True][key] == pytest.approx(runs[False][key], rel=1e-6)
