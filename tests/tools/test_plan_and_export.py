"""`vembed plan` predicts from shapes alone; `vembed export` copies a model, or merges its adapter."""

import json

import numpy as np
import pytest
import torch

import vembed
from tests.built import model_of
from tests.commands import command
from tests.tiny import shared, tiny_bert, tiny_qwen3
from tests.training.test_run import settings
from vembed.cli.commands.export import copy_model, export
from vembed.cli.commands.train import plan
from vembed.config.loading import resolve_run
from vembed.errors import UserError
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import place
from vembed.parallel.step_memory import MemoryEstimate, measure
from vembed.saving.files import replaced_folder


def placed(num_ranks=1, **options):
    named = {"data_path": "unused", "model_name": str(shared(tiny_qwen3))}
    ranks = RankInfo(0, num_ranks, 0, num_ranks)
    return place(resolve_run(named | options), ranks, torch.device("cpu"), 2**40)


def need_of(*num_ranks, recomputes=False, **options):
    """The memory of a step of this run."""
    layout = placed(*num_ranks, **options)
    return MemoryEstimate(layout, measure(layout.run.config)).in_step(
        recomputes=recomputes
    )


@pytest.mark.promise("D01")
def test_plan_counts_parameters_and_divides_them():
    config = placed().run.config
    size = measure(config)
    total = sum(parameter.numel() for parameter in model_of(config).parameters())
    assert (size.total, size.weight_bytes) == (total, 4 * total)
    need = need_of()
    assert need.optimizer == 2 * need.gradients == 8 * size.trained
    assert need_of(recomputes=True).activations < need.activations
    sharded = need_of(4, strategy="fsdp")
    assert sharded.weights == need.weights / 4
    assert sharded.optimizer == need.optimizer / 4
    assert sharded.gradients == need.gradients, "whole between micro-batches"
    # They fit in a fifth of the memory.
    assert (need.gathered, sharded.gathered) == (0, 4 * total)


def test_plan_reads_the_options_of_the_batch():
    length = measure(placed().run.config).max_length
    assert placed(2, global_batch_size=16).num_examples == 8
    one_row = need_of(micro_batch_tokens=length, use_gradient_cache=True)
    whole = need_of(use_gradient_cache=False, batch_size=64)
    assert whole.activations == pytest.approx(128 * one_row.activations)
    assert need_of(batch_size=64) == whole, "its graphs fit"
    with pytest.raises(UserError, match="cannot be divided among 3 processes"):
        placed(3, global_batch_size=16)


def test_plan_says_whether_it_fits(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(settings(tmp_path)))  # JSON is YAML too
    words = [str(config)]
    assert plan(words)[1] == 0
    said = capsys.readouterr().out
    assert "fits" in said and "optimizer" in said
    words.append("batch_size=1000000")
    assert plan([*words, "micro_batch_tokens=1000000000000"])[1] == 1
    assert "fits with micro_batch_tokens: 32768" in capsys.readouterr().out
    assert plan([*words, "use_gradient_cache=false"])[1] == 1
    assert "fits with use_gradient_cache: auto" in capsys.readouterr().out


def test_export_merges_an_adapter(tmp_path):
    more = {
        "use_lora": True,
        "save_merged": False,
        "max_steps": 2,
        "val_data_path": None,
    }
    result = vembed.train(settings(tmp_path, **more))
    merged = copy_model(str(result.model_dir), tmp_path / "merged", merge=True)
    texts = ["red green", "a small bird in the garden"]
    expected = vembed.Embedder(result.model_dir).encode(texts)
    vectors = vembed.Embedder(merged).encode(texts)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert not (merged / "adapter_config.json").exists()
    with pytest.raises(UserError, match="no adapter to merge"):
        copy_model(str(shared(tiny_bert)), tmp_path / "other", merge=True)
    with pytest.raises(UserError, match="exists already"):
        export(str(merged), str(merged))


def test_two_exports_into_one_folder(tmp_path):
    """The later one gets a sentence, and the earlier one is not disturbed."""
    target = tmp_path / "copy"
    with replaced_folder(target) as folder:
        (folder / "first.txt").write_text("1")
        done = command("export", str(shared(tiny_bert)), str(target), code=2)
    assert f"error: {target} is being written by another process" in done.stderr
    assert (target / "first.txt").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
