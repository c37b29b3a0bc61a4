"""The fourth source document: its model, its snippet, its make targets and its command, on two processes of a CPU."""

import math
import re
import subprocess

import pytest
import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.commands import command
from tests.docs.pages import ROOT
from tests.training.test_run import log_text, metrics

PACKAGE = ROOT / "examples" / "own_model"
LOSS_LINE = re.compile(r"^Loss: \d+\.\d{4}$", re.MULTILINE)
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
def importable(monkeypatch):
    """The example's package, as the document imports it."""
    monkeypatch.syspath_prepend(str(PACKAGE))


@pytest.mark.promise("E22", "E40")
def test_the_custom_policy_as_printed():
    names = {}
    exec(SNIPPET, names)
    assert isinstance(names["get_custom_wrap_policy"](), ModuleWrapPolicy)


@pytest.mark.promise("E37")
def test_the_model_as_printed():
    """Without memory for its 400 million weights; and a small one with values."""
    names = {}
    with torch.device("meta"):
        exec(MODEL, names)
        logits, z_logits = names["model"](torch.ones(2, 5).long(), mode="training")
    assert logits.shape == (2, 5, 50000)
    assert z_logits.shape == (2, 5, 6), "64 classes are 6 bits"
    small = names["FreeTransformer"](names["ModelConfig"](40, 16, 2, 2, 64))
    ids = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        logits, _ = small(ids, mode="training")
        loss = next_token_loss(logits, ids)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="must be a power of two"):
        names["ModelConfig"](latent_dim=48)


def next_token_loss(logits, ids):
    predictions = logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(predictions, ids[:, 1:].flatten())


def test_the_paths_of_the_latent():
    """A token sees earlier ones alone, except through Z; the gradient reaches the encoder through the mapper."""
    from free_transformer import FreeTransformer, ModelConfig

    torch.manual_seed(0)
    model = FreeTransformer(ModelConfig(40, 16, 2, 2, 8)).eval()
    ids = torch.arange(6)[None]
    other = ids.clone()
    other[0, 5] = 9
    latent = torch.eye(8)[[0] * 6][None]
    logits, _ = model(ids, mode="training", latent=latent)
    changed, _ = model(other, mode="training", latent=latent)
    assert torch.equal(logits[:, :5], changed[:, :5])
    logits, _ = model.train()(ids, mode="training")
    logits.square().sum().backward()
    assert float(model.to_bits.weight.grad.abs().sum()) > 0


def test_the_free_bits_count_for_each_token():
    """Not for the mean over tokens, in which one that tells nothing would pay for another; padding counts nothing."""
    from free_transformer import FreeTransformer, ModelConfig

    model = FreeTransformer(ModelConfig(40, 16, 2, 2, 4, free_bits=0.5))
    hidden = torch.zeros(1, 3, 16)
    z_logits = torch.tensor([[[0.0, 0.0], [40.0, -40.0], [40.0, 40.0]]])
    ids = torch.ones(1, 3).long()
    mask = torch.tensor([[1, 1, 0]])
    sums, counts = model.losses(hidden, z_logits, ids, mask)["kl"]
    assert float(sums) == pytest.approx(2 * math.log(2) - 0.5) and int(counts) == 2


@pytest.mark.promise("E02", "E03")
@pytest.mark.parametrize("target", ["train-free-fsdp", "train-baseline-fsdp"])
def test_make_targets_start_two_processes_on_a_cpu(target):
    words = ["make", "--no-print-directory", "-n", "-o", ".venv/.dev", target]
    words = subprocess.check_output(words, cwd=ROOT, text=True).split()
    assert any(word.endswith("/torchrun") for word in words) and "--use-fsdp" in words
    assert not torch.cuda.is_available() and "--nproc_per_node=2" in words
    assert ("--baseline" in words) == ("baseline" in target)
    assert f"checkpoints/{target.split('-')[1]}_fsdp" in words


@pytest.mark.promise("E04", "E05", "E38")
def test_the_documents_command_trains(tmp_path):
    """`torchrun ... examples/train_free.py --config configs/free_transformer.yaml --use-fsdp`, all stages."""
    words = (
        "--nproc_per_node=2 examples/train_free.py --config configs/free_transformer.yaml --use-fsdp --pairs 200 "
        "max_steps=3 max_length=16 global_batch_size=8 --output"
    )
    done = command(
        *words.split(),
        str(tmp_path),
        module="torch.distributed.run",
        folder=ROOT,
        env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
        code=0,
    )
    assert len(LOSS_LINE.findall(done.stdout)) == 9, "one line per step, from rank 0"
    assert re.search(r"^embedding: nDCG@10 0\.\d{4}, and", done.stdout, re.MULTILINE)
    for stage in ("open", "pretrain", "embed"):
        losses = r"KL [\d.]+ nats per token.*; next-token loss [\d.]+ with Z"
        assert re.search(f"^{stage}: {losses}", done.stdout, re.MULTILINE), done.stdout
    # torch's warning of a result that FSDP cannot follow
    assert "returned a view tensor" not in done.stderr
    said = "FSDP2: 5 units (5 DecoderBlock) and the rest of the model"
    assert said in log_text(tmp_path / "pretrain")
    for term in ("next_token", "kl"):
        assert metrics(tmp_path / "pretrain", f"loss/{term}")
    assert (tmp_path / "embed" / "final" / "modules.json").is_file()
