"""A whole run through `vembed.train`, stopped and moved between strategies: the same losses at every step."""

import os
import signal
import time

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModel

import vembed
from tests.harness import RankFailed, run_cases, run_ranks
from tests.training.test_run import (
    final_weights,
    metric_lines,
    settings,
    settings_without_validation,
)
from tests.training.tiny_run import assert_same
from vembed.errors import Stopped
from vembed.training.interrupts import Interrupts


def part_of_a_run(options, last_step):
    """Train until rank 1 is told to stop, after `last_step`."""
    agree = Interrupts.agree_to_stop
    counted = []

    def signalled(self, save_seconds=0.0):
        counted.append(1)
        if len(counted) == last_step and is_last_rank():
            send_sigterm(self)
        return agree(self, save_seconds)

    Interrupts.agree_to_stop = signalled
    try:
        vembed.train(options)
    except Stopped as stopped:
        return stopped.exit_code
    return 0


def is_last_rank():
    rank = int(os.environ.get("RANK", "0"))
    return rank == int(os.environ.get("WORLD_SIZE", "1")) - 1


def send_sigterm(interrupts):
    """Return when this process has received it."""
    os.kill(os.getpid(), signal.SIGTERM)
    while not interrupts._number:
        time.sleep(0.001)


def part_in_8_bits(options, last_step):
    """The same without the compilation of torchao's step, which takes half a minute on a CPU."""
    torch.compiler.set_stance("force_eager")
    return part_of_a_run(options, last_step)


@pytest.mark.promise("E18", "E35")
def test_a_stopped_run_moved_between_strategies_lies_on_the_unbroken_one(tmp_path):
    options = settings(
        tmp_path,
        global_batch_size=12,
        max_steps=9,
        eval_steps=3,
        report_to=["tensorboard"],
    )
    # Adam would turn rounding in gradients near zero into whole steps.
    options |= {"use_gradient_cache": True, "adam_epsilon": 1e-4}
    del options["batch_size"]
    whole = vembed.train({**options, "output_dir": str(tmp_path / "whole")})
    moved = {
        **options,
        "output_dir": str(tmp_path / "moved"),
        "resume": "auto",
    }
    full = {
        **moved,
        "strategy": "fsdp",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    ddp = {**moved, "strategy": "ddp"}
    fsdp1 = {
        **moved,
        "strategy": "fsdp",
        "fsdp_version": 1,
        "async_save": True,
    }
    for part, num_ranks, num_steps in ((full, 2, 2), (ddp, 3, 3), (fsdp1, 2, 2)):
        codes = run_ranks(part_of_a_run, num_ranks, part, num_steps)
        assert codes == [143] * num_ranks
    result = vembed.train(moved)
    names = {path.name for path in result.output_dir.glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-5", "checkpoint-7"}
    model = AutoModel.from_pretrained(result.output_dir / "checkpoint-2" / "model")
    assert model.config.hidden_size == 32
    assert not (result.output_dir / "checkpoint-5" / "model").exists()
    expected = metric_lines(whole.output_dir)
    actual = metric_lines(result.output_dir)
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for mine, other in zip(actual, expected, strict=True):
        assert mine.get("learning_rate") == other.get("learning_rate")
        assert mine["epoch"] == other["epoch"]
        if "loss" in other:
            np.testing.assert_allclose(mine["loss"], other["loss"], rtol=1e-5)
            np.testing.assert_allclose(mine["grad_norm"], other["grad_norm"], rtol=1e-4)
        else:
            assert mine["eval"] == other["eval"]
    events = EventAccumulator(str(result.output_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 10))
    assert [event.step for event in events.Scalars("eval/ndcg_at_10")] == [0, 3, 6, 9]
    weights = final_weights(result.output_dir)
    for name, value in final_weights(whole.output_dir).items():
        if name.endswith("key.bias"):
            continue  # it shifts all scores of a softmax alike: its gradient is rounding, which Adam blows up to a step
        np.testing.assert_allclose(
            weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_shards_of_8_bit_state_resume_bit_by_bit(tmp_path):
    """With torchao itself. The embedding has 257 rows, 129 and 128, so that one shard is whole blocks of 256
    values, which are quantised, and the other is not."""
    options = settings_without_validation(
        tmp_path,
        strategy="fsdp",
        optim="adamw_8bit",
        max_steps=4,
    )
    whole = {**options, "output_dir": str(tmp_path / "whole")}
    parts = {
        **options,
        "output_dir": str(tmp_path / "parts"),
        "resume": "auto",
    }
    runs = {"whole": (whole, 9), "first": (parts, 2), "second": (parts, 9)}
    codes = run_cases(part_in_8_bits, 2, runs)
    assert codes == {"whole": [0, 0], "first": [143, 143], "second": [0, 0]}
    stored = set()
    for path in (tmp_path / "parts" / "checkpoint-2").glob("*.safetensors"):
        stored |= set(load_file(path))
    embedding = "optimizer.model.backbone.embeddings.word_embeddings.weight.exp_avg."
    shards = {
        name.removeprefix(embedding) for name in stored if name.startswith(embedding)
    }
    quantised = {"codes.rank1of2", "qmap.rank1of2", "scale.rank1of2"}
    assert shards == quantised | {"rank0of2"}
    parts["max_steps"] = 5
    with pytest.raises(RankFailed, match=r"cannot be divided among 3 process\(es\)"):
        run_ranks(part_in_8_bits, 3, parts, 9)
    assert_same(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))
