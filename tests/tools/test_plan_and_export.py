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
from vembed.models.precision import Bf16Linear
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import place
from vembed.parallel.step_memory import MemoryEstimate, measure
from vembed.saving.files import replaced_folder


def placed(num_ranks=1, **options):
    run = resolve_run(
        {"data_path": "unused", "model_name": str(shared(tiny_qwen3)), **options}
    )
    return place(
        run,
        RankInfo(0, num_ranks, 0, num_ranks),
        torch.device("cpu"),
        2**40,
    )


@pytest.mark.promise("D01")
def test_plan_counts_parameters_and_divides_them():
    alone = placed()
    size = measure(alone.run.config)
    real = model_of(alone.run.config)
    assert size.total == sum(parameter.numel() for parameter in real.parameters())
    assert size.weight_bytes == sum(
        parameter.numel() * 4 for parameter in real.parameters()
    )
    need = MemoryEstimate(alone, size).in_step()
    assert need.optimizer == 2 * need.gradients == 8 * size.trained
    assert (
        MemoryEstimate(alone, size).in_step(recomputes=True).activations
        < need.activations
    )
    sharded = MemoryEstimate(placed(4, strategy="fsdp"), size).in_step()
    assert (
        sharded.weights == need.weights / 4 and sharded.optimizer == need.optimizer / 4
    )
    assert sharded.gradients == need.gradients, (
        "between the micro-batches of a step they are whole"
    )
    assert need.gathered == 0 and sharded.gathered == 4 * size.total, (
        "which fits in a fifth of the memory"
    )


def test_plan_left_out_the_copies_of_weights_in_bfloat16():
    wide = placed(mixed_precision="no")
    narrow = placed(mixed_precision="bf16")
    size = measure(wide.run.config)
    assert (
        MemoryEstimate(wide, size).in_step().copies == 0
        and MemoryEstimate(placed(2, strategy="fsdp", mixed_precision="bf16"), size)
        .in_step()
        .copies
        == 0
    )
    model = model_of(narrow.run.config)
    model.compute_in_bf16()
    inside = [module for module in model.modules() if isinstance(module, Bf16Linear)]
    built = sum(
        2 * parameter.numel() for layer in inside for parameter in layer.parameters()
    )
    assert MemoryEstimate(narrow, size).in_step().copies == pytest.approx(
        built, rel=0.02
    ), "norms are counted too, and are small"
    adapters = placed(mixed_precision="bf16", use_lora=True, torch_dtype="bfloat16")
    of_adapters = measure(adapters.run.config)
    assert (
        MemoryEstimate(adapters, of_adapters).in_step().copies
        == 2 * of_adapters.trained
    )


def test_plan_reads_the_options_of_the_batch():
    size = measure(placed().run.config)
    assert placed(2, global_batch_size=16).num_examples == 8
    one_row = MemoryEstimate(
        placed(micro_batch_tokens=size.max_length, use_gradient_cache=True), size
    ).in_step()
    whole = MemoryEstimate(
        placed(use_gradient_cache=False, batch_size=64), size
    ).in_step()
    assert whole.activations == pytest.approx(128 * one_row.activations)
    remaining = placed(batch_size=64)
    assert MemoryEstimate(remaining, size).in_step() == whole, "its graphs fit"
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
    first, two = (
        vembed.Embedder(folder).encode(texts) for folder in (result.model_dir, merged)
    )
    np.testing.assert_allclose(first, two, atol=1e-6)
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
        done = command("export", str(shared(tiny_bert)), str(target))
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {target} is being written by another process: wait for its end, or choose another name\n",
    )
    assert (target / "first.txt").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
