"""Pre-train the Free Transformer by its own losses, then fine-tune it as an embedding model.

    python examples/train_free.py --config configs/free_transformer.yaml
    torchrun --nproc_per_node=auto examples/train_free.py --config configs/free_transformer.yaml --use-fsdp

The texts are the docstrings and functions of this Python's own standard library, so that nothing is downloaded.
Options of vembed may follow: `max_steps=20 learning_rate=1e-3`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

import vembed
from vembed.tools.demo_data import split_by_module, standard_library_pairs, write_pairs
from vembed.tools.train_tokenizer import train_tokenizer
from vembed.training.callbacks import StepInfo

NUM_VALIDATION = 200
NUM_COMPARED = 64
SCORES = (("pretrain", "before/ndcg@10"), ("embed", "ndcg@10"))


def main() -> None:
    """Run both stages on this process of the group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="configs/free_transformer.yaml, or one like it")
    parser.add_argument("--use-fsdp", action="store_true", help="shard the model over the processes")
    parser.add_argument("--baseline", action="store_true", help="the same decoder without Z")
    parser.add_argument("--output", help="folder of the run; default: checkpoints/free or checkpoints/baseline")
    parser.add_argument("--pairs", type=int, default=3000, help="number of training pairs")
    given, options = parser.parse_known_args()
    rank = int(os.environ.get("RANK", "0"))
    config = yaml.safe_load(Path(given.config).read_text(encoding="utf-8"))
    output = Path(given.output or ("checkpoints/baseline" if given.baseline else "checkpoints/free"))
    data = output / "data"
    if rank == 0:
        prepare(data, config["model_config"]["vocab_size"], given.pairs)
    wait_for(data / "ready")
    options = [f"tokenizer_name={data / 'tokenizer'}", "overwrite=true", *options]
    if given.use_fsdp:
        options.append("use_fsdp=true")
    if given.baseline:
        options.append(f"model_config={json.dumps({**config['model_config'], 'use_latent': False})}")
    pretrained = output / "pretrain"
    options.append(f"val_data_path={data / 'validation.jsonl'}")
    stages = {
        "pretrain": [f"data_path={data / 'texts.jsonl'}", f"output_dir={pretrained}"],
        "embed": [
            f"data_path={data / 'pairs.jsonl'}",
            f"output_dir={output / 'embed'}",
            f"model_name={pretrained / 'final'}",
        ],
    }
    results = {}
    for name, more in stages.items():
        if given.baseline:  # without Z there is no kl
            weights = config["training_stages"][name].get("auxiliary_losses", {})
            kept = {loss: weight for loss, weight in weights.items() if loss != "kl"}
            more.append(f"auxiliary_losses={json.dumps(kept)}")
        on_step = show if rank == 0 else None
        results[name] = vembed.train(given.config, [f"stage={name}", *more, *options], on_step=on_step)
        if rank == 0 and name == "pretrain" and not given.baseline:
            print(use_of_latent(results[name].model_dir, config["model_config"], data))
    if rank == 0:
        before, after = (results[name].metrics[key] for name, key in SCORES)
        print(f"embedding: nDCG@10 {after:.4f}, and {before:.4f} before all training")
        print(f"model: {results['embed'].model_dir}")


def show(info: StepInfo) -> None:
    """Print the loss of a step."""
    print(f"Loss: {info.loss:.4f}")


def use_of_latent(folder: Path, sizes: dict[str, Any], data: Path) -> str:
    """Return how much Z tells on the validation texts, and the loss with the Z of another text in its place."""
    sys.path.insert(0, str(Path(__file__).parent / "own_model"))
    from free_transformer.model import FreeTransformer, ModelConfig, kl_to_uniform

    model = FreeTransformer(ModelConfig(**sizes))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("own."): one.float() for name, one in weights.items()})
    lines = (data / "validation.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_COMPARED]
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    texts = [json.loads(line)["positive"] for line in lines]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    torch.manual_seed(0)
    with torch.no_grad():
        _, z_logits = model.train().decode(ids, mask)  # in training mode the bits are drawn
        latent = model.mapper(z_logits)

        def loss(given: torch.Tensor) -> float:
            sums, counts = model.losses(model.decode(ids, mask, given)[0], None, ids, mask)["next_token"]
            return float(sums.sum() / counts.sum())

        kl = float((kl_to_uniform(z_logits) * mask).sum() / mask.sum())
        own, other = loss(latent), loss(latent.roll(1, dims=0))
    return (
        f"latent: KL {kl:.3f} nats per token ({model.config.free_bits:.3f} are free); next-token loss {own:.3f} with "
        f"Z, {other:.3f} with the Z of another text"
    )


def prepare(folder: Path, vocab_size: int, num_pairs: int) -> None:
    """Write texts, pairs and a tokenizer that is trained on them."""
    (folder / "ready").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    train, validation = split_by_module(standard_library_pairs(), num_pairs, NUM_VALIDATION)
    write_pairs(train, folder / "pairs.jsonl")
    write_pairs(validation, folder / "validation.jsonl")
    records = [json.loads(line) for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [text for record in records for text in (record["query"], record["positive"])]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    train_tokenizer(texts, folder / "tokenizer", vocab_size=vocab_size)
    (folder / "ready").touch()


def wait_for(path: Path, seconds: float = 300.0) -> None:
    """Wait until process 0 has written a file."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit(f"{path} was not written within {seconds:.0f} seconds")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
