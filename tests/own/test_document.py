"""The fourth source document: its model, its snippets, its script and its make targets, on two processes of a CPU."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.commands import command
from tests.docs.pages import ROOT

PACKAGE = ROOT / "examples" / "own_model"
SNIPPET = """
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from free_transformer.model import DecoderBlock

def get_custom_wrap_policy():
    return ModuleWrapPolicy({DecoderBlock})
"""
MODEL = """
from free_transformer import FreeTransformer, ModelConfig

config = ModelConfig(
    vocab_size=50000,
    hidden_dim=1024,
    num_layers=24,
    num_heads=16,
    latent_dim=64
)

model = FreeTransformer(config)
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's package, as the document imports it."""
    monkeypatch.syspath_prepend(str(PACKAGE))


@pytest.mark.promise("E22", "E40")
def test_the_custom_policy_as_printed() -> None:
    names: dict[str, Any] = {}
    exec(compile(SNIPPET, "document", "exec"), names)
    assert isinstance(names["get_custom_wrap_policy"](), ModuleWrapPolicy)


@pytest.mark.promise("E37")
def test_the_model_as_printed() -> None:
    """Without memory for its 400 million weights; and a small one with values."""
    names: dict[str, Any] = {}
    with torch.device("meta"):
        exec(compile(MODEL, "document", "exec"), names)
        logits, z_logits = names["model"](torch.ones(2, 5, dtype=torch.int64), mode="training")
    assert (tuple(logits.shape), tuple(z_logits.shape)) == ((2, 5, 50000), (2, 5, 6))
    assert names["config"].latent_bits == 6, "64 classes are 6 bits"
    small = names["FreeTransformer"](names["ModelConfig"](40, 16, 2, 2, 64))
    ids = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        logits, z_logits = small(ids, mode="training")
        loss = (
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            + z_logits.square().mean()
        )
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="must be a power of two"):
        names["ModelConfig"](latent_dim=48)


def test_the_paths_of_the_latent() -> None:
    """A token sees earlier ones alone, except through Z; the gradient reaches the encoder through the mapper."""
    from free_transformer import FreeTransformer, ModelConfig

    torch.manual_seed(0)
    model = FreeTransformer(ModelConfig(40, 16, 2, 2, 8)).eval()
    ids = torch.arange(6)[None]
    other = ids.clone()
    other[0, 5] = 9
    latent = torch.nn.functional.one_hot(torch.zeros(1, 6, dtype=torch.int64), 8).float()
    (one, _), (two, _) = (model(given, mode="training", latent=latent) for given in (ids, other))
    assert torch.equal(one[:, :5], two[:, :5])
    model.train()
    logits, _ = model(ids, mode="training")
    logits.square().sum().backward()
    assert model.to_bits.weight.grad is not None and float(model.to_bits.weight.grad.abs().sum()) > 0
    losses = model(ids)[1]
    assert losses.keys() == {"next_token", "kl"} and all(sums.shape == (1,) for sums, _ in losses.values())


@pytest.mark.promise("E02", "E03")
@pytest.mark.parametrize("target", ["train-free-fsdp", "train-baseline-fsdp"])
def test_make_targets_start_two_processes_on_a_cpu(target: str) -> None:
    words = ["make", "--no-print-directory", "-n", "-o", ".venv/.dev", target]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert any(word.endswith("/torchrun") for word in words) and "--use-fsdp" in words
    assert not torch.cuda.is_available() and "--nproc_per_node=2" in words
    assert ("--baseline" in words) == ("baseline" in target)
    assert f"checkpoints/{target.split('-')[1]}_fsdp" in words


@pytest.mark.timeout(240)
@pytest.mark.promise("E04", "E05", "E38")
def test_the_documents_command_trains(tmp_path: Path) -> None:
    """`torchrun ... examples/train_free.py --config configs/free_transformer.yaml --use-fsdp`, both stages."""
    words = [
        "--nproc_per_node=2", "examples/train_free.py", "--config", "configs/free_transformer.yaml", "--use-fsdp",
        "--output", str(tmp_path), "max_steps=3",
    ]  # fmt: skip
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = command(*words, module="torch.distributed.run", folder=ROOT, env=env, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"^Loss: \d+\.\d{4}$", done.stdout, re.MULTILINE)) == 6, "one line per step, from rank 0"
    log = (tmp_path / "pretrain" / "training_log.txt").read_text()
    assert "FSDP2: 5 units (5 DecoderBlock) and the rest of the model" in log
    logged = [json.loads(line) for line in (tmp_path / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss/next_token", "loss/kl"} <= logged[0].keys()
    assert (tmp_path / "embed" / "final" / "modules.json").is_file()
