"""The recipes in examples/: each trains as it is written with a tiny model in place of the real one, and dry-runs."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import vembed
from tests import tiny
from tests.commands import SCRIPT, command
from tests.docs.pages import ROOT
from tests.training.test_run import metrics
from vembed.config.loading import load_config, resolve_run

EXAMPLES = ROOT / "examples"
Make = Callable[..., Path]


@dataclass(frozen=True)
class Tiny:
    """What stands in for a recipe's model, and what has to shrink with it."""

    make: Make
    options: tuple[str, ...] = ()
    image_model: Make | None = None


RECIPES = {
    "bert": Tiny(tiny.tiny_bert, ("mrl_dims=32,16",)),
    "bge": Tiny(tiny.tiny_bert, ("max_length=64",)),
    "e5": Tiny(tiny.tiny_bert, ("max_length=64",)),
    "modernbert": Tiny(tiny.tiny_modernbert, ("max_length=64", "mrl_dims=32,16")),
    "qwen3_embedding_0.6b": Tiny(tiny.tiny_qwen3, ("max_length=64", "mrl_dims=32,16")),
    "qwen3_embedding_8b_fsdp": Tiny(tiny.tiny_qwen3, ("max_length=64",)),
    "qwen3_vl_2b": Tiny(
        tiny.tiny_qwen3_vl, ("max_length=256", "max_pixels=4096", "min_pixels=1024")
    ),
    "qwen3_8b_fsdp": Tiny(
        tiny.tiny_qwen3_vl,
        ("max_pixels=4096", "min_pixels=1024", "max_length=256", "mrl_dims=16"),
    ),
    "bge_reranker": Tiny(tiny.tiny_reranker, ("max_length=64",)),
    "modernbert_reranker": Tiny(tiny.tiny_modernbert, ("max_length=64",)),
    "qwen3_reranker_0.6b": Tiny(
        tiny.tiny_qwen3_reranker,
        ("max_length=512", "max_negatives=1", "rerank_top_k=5"),
    ),
    "clip": Tiny(tiny.tiny_clip),
    "siglip": Tiny(tiny.tiny_siglip),
    "dinov2_i2i": Tiny(tiny.tiny_dinov2, ("freeze=embeddings,first_n_layers=1",)),
    "composed_bert_dinov2": Tiny(tiny.tiny_bert, ("mrl_dims=[16]",), tiny.tiny_dinov2),
    "cosent_sts": Tiny(tiny.tiny_bert),
    "multi_task": Tiny(tiny.tiny_bert, ("max_length=64",)),
    "triplet": Tiny(tiny.tiny_bert, ("max_length=64",)),
}


def test_every_recipe_is_here_and_has_its_script():
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(RECIPES)
    for name in RECIPES:
        script = EXAMPLES / f"{name}.sh"
        assert os.access(script, os.X_OK), script
        assert script.read_text() == (EXAMPLES / "bert.sh").read_text()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.promise("D01", "D18", "D20", "D42", "D43")
def test_recipe_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = RECIPES[name]
    options = [
        f"model_name={tiny.shared(recipe.make)}",
        "max_steps=2",
        "batch_size=8",
        "report_to=none",
    ]
    if recipe.image_model:
        options.append(f"image_model_name={tiny.shared(recipe.image_model)}")
    if name == "bge":
        options += ["eval_steps=1", "save_steps=2"]
    else:
        options.append("save_steps=null")
    result = vembed.train(EXAMPLES / f"{name}.yaml", [*options, *recipe.options])
    assert result.steps == 2
    assert (result.model_dir / "modules.json").is_file()
    rates = metrics(result.output_dir, "learning_rate")
    assert len(rates) == 2
    asked = load_config(EXAMPLES / f"{name}.yaml").optimizer.learning_rate
    assert max(rates) == pytest.approx(asked)
    assert (result.output_dir / "training_log.txt").stat().st_size > 0


@pytest.mark.parametrize("name", ["bert", "run_qwen3_8b_fsdp"])
@pytest.mark.promise("D01", "D05")
def test_script_says_what_it_would_launch(name, tmp_path):
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    done = dry_run(EXAMPLES / f"{name}.sh", tmp_path, PYTHONPATH=str(tmp_path))
    assert "would run: " in done and "samples, without prompts" in done
    assert "epochs: 2.0  # command line" in done


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_in_a_recipe_is_without_effect(name):
    for note in resolve_run(EXAMPLES / f"{name}.yaml").notes:
        assert "is not in the current directory" in note


@pytest.mark.promise("E40")
def test_the_script_in_python_runs_as_it_stands(tmp_path):
    data = EXAMPLES / "data" / "train.jsonl"
    script = str(EXAMPLES / "train_api.py")
    model = str(tiny.shared(tiny.tiny_bert))
    options = ["max_steps=2", "batch_size=8", "report_to=none"]
    words = [script, model, str(data), *options]
    done = command(*words, module=SCRIPT, folder=tmp_path, code=0)
    assert "nDCG@10: " in done.stdout


@pytest.mark.promise("A10", "C27")
def test_several_machines_in_slurm_and_kubernetes(tmp_path):
    output = dry_run(
        EXAMPLES / "launch/slurm/train.sbatch",
        tmp_path,
        str(EXAMPLES / "bert.yaml"),
        SLURM_JOB_NUM_NODES="3",
    )
    assert "world size: 3 = 1 process(es) on each of 3 machines" in output
    job = yaml.safe_load((EXAMPLES / "launch/kubernetes/pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    num_machines = sum(replica["replicas"] for replica in replicas.values())
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert f"--num-machines {num_machines} " in container["command"][-1]


def dry_run(script, folder, *words, **variables):
    """What a script says with DRY_RUN=1."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    changes = {"DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": path}
    return subprocess.check_output(
        ["bash", str(script), *words, "epochs=2"],
        cwd=folder,
        env=os.environ | changes | variables,
        text=True,
    )
