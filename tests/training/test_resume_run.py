"""A whole run through `vembed.train`, stopped and moved between strategies: the same losses at every step."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModel

import vembed
from tests.harness import RankFailed, run_ranks
from tests.tiny import shared, tiny_bert
from tests.training.test_run import settings
from vembed.errors import Stopped
from vembed.training.interrupts import Interrupts


def part_of_a_run(options, last_step):
    """Train until rank 1 is told to stop, after `last_step`."""
    agree = Interrupts.agree_on_stop
    counted = []

    def signalled(self, save_seconds=0.0):
        counted.append(1)
        if len(counted) == last_step and os.environ["RANK"] == str(
            int(os.environ["WORLD_SIZE"]) - 1
        ):
            os.kill(os.getpid(), signal.SIGTERM)
            while not self._number:
                time.sleep(0.001)
        return agree(self, save_seconds)

    Interrupts.agree_on_stop = signalled
    try:
        vembed.train(options)
    except Stopped as stopped:
        return stopped.exit_code
    return 0


def part_in_8_bits(options, last_step):
    """The same without the compilation of torchao's step, which takes half a minute on a CPU."""
    torch.compiler.set_stance("force_eager")
    return part_of_a_run(options, last_step)


def logged(folder):
    return [
        json.loads(line)
        for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
    ]


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
    moved = {**options, "output_dir": str(tmp_path / "moved"), "resume": "auto"}
    full = {**moved, "strategy": "fsdp", "fsdp_state_dict_type": "FULL_STATE_DICT"}
    assert run_ranks(part_of_a_run, 2, full, 2, process_group=False) == [143, 143]
    assert (
        run_ranks(
            part_of_a_run, 3, {**moved, "strategy": "ddp"}, 3, process_group=False
        )
        == [143] * 3
    )
    fsdp1 = {**moved, "strategy": "fsdp", "fsdp_version": 1, "async_save": True}
    assert run_ranks(part_of_a_run, 2, fsdp1, 2, process_group=False) == [143, 143]
    result = vembed.train(moved)
    assert [
        path.name for path in sorted((tmp_path / "moved").glob("checkpoint-*"))
    ] == [
        "checkpoint-2",
        "checkpoint-5",
        "checkpoint-7",
    ]
    assert (
        AutoModel.from_pretrained(
            tmp_path / "moved" / "checkpoint-2" / "model"
        ).config.hidden_size
        == 32
    )
    assert not (tmp_path / "moved" / "checkpoint-5" / "model").exists()
    expected = logged(tmp_path / "whole")
    actual = logged(tmp_path / "moved")
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for mine, other in zip(actual, expected, strict=True):
        assert mine.get("learning_rate") == other.get("learning_rate")
        assert mine["epoch"] == other["epoch"]
        if "loss" in other:
            np.testing.assert_allclose(mine["loss"], other["loss"], rtol=1e-5)
            np.testing.assert_allclose(mine["grad_norm"], other["grad_norm"], rtol=1e-4)
        else:
            assert mine["eval"] == other["eval"]
    events = EventAccumulator(str(tmp_path / "moved" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 10))
    assert [event.step for event in events.Scalars("eval/ndcg_at_10")] == [0, 3, 6, 9]
    weights, others = (
        load_file(entry.model_dir / "model.safetensors") for entry in (result, whole)
    )
    for name, value in others.items():
        if name.endswith("key.bias"):
            continue  # it shifts all scores of a softmax alike: its gradient is rounding, which Adam blows up to a step
        np.testing.assert_allclose(
            weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_shards_of_8_bit_state_resume_bit_by_bit(tmp_path):
    """With torchao itself. The 257 rows of the embedding are 129 and 128, so that one shard is whole blocks of 256
    values, which are quantised, and the other is not."""
    options = settings(
        tmp_path,
        # The tokenizer has 257 words.
        model_name=str(shared(tiny_bert)),
        strategy="fsdp",
        optim="adamw_8bit",
        max_steps=4,
        val_data_path=None,
    )
    whole = {**options, "output_dir": str(tmp_path / "whole")}
    assert run_ranks(part_in_8_bits, 2, whole, 9, process_group=False) == [0, 0]
    parts = {**options, "output_dir": str(tmp_path / "parts"), "resume": "auto"}
    assert run_ranks(part_in_8_bits, 2, parts, 2, process_group=False) == [143, 143]
    stored = set()
    for path in (tmp_path / "parts" / "checkpoint-2").glob("*.safetensors"):
        stored |= set(load_file(path))
    embedding = "optimizer.model.backbone.embeddings.word_embeddings.weight.exp_avg."
    shards = sorted(name for name in stored if name.startswith(embedding))
    assert shards == [
        f"{embedding}codes.rank1of2",
        f"{embedding}qmap.rank1of2",
        f"{embedding}rank0of2",
        f"{embedding}scale.rank1of2",
    ]
    with pytest.raises(RankFailed, match=r"cannot be divided among 3 process\(es\)"):
        run_ranks(part_in_8_bits, 3, parts, 9, process_group=False)
    assert run_ranks(part_in_8_bits, 2, parts, 9, process_group=False) == [0, 0]
    weights, others = (
        load_file(tmp_path / name / "final" / "model.safetensors")
        for name in ("parts", "whole")
    )
    for name, value in others.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
