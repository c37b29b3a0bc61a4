"""Pre-train the Free Transformer by its own losses, then fine-tune it as an embedding model.

    python examples/train_free.py --config configs/free_transformer.yaml
    torchrun --nproc_per_node=auto examples/train_free.py --config configs/free_transformer.yaml --use-fsdp

The texts are the lines of docstrings and functions of this Python's own standard library, so that nothing is
downloaded. At the end it prints, on texts of modules that were not trained on, how much the latent Z tells, what the
next-token loss is with another text's Z, and the scores of the embedding before and after training. Options of vembed
may follow: `max_steps=20 learning_rate=1e-3`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

import vembed
from vembed.cli.commands.demo import (
    split_by_module,
    standard_library_pairs,
    write_pairs,
)
from vembed.data_tools.new_tokenizer import train_tokenizer
from vembed.parallel.environment import RankInfo, read_rank_info
from vembed.parallel.launch_check import LaunchCheck
from vembed.training.hooks.base import StepInfo
from vembed.training.trainer import TrainResult

NUM_VALIDATION = 200
NUM_COMPARED = 512
LINE_CHARACTERS = range(20, 49)
"""Lengths of the lines that are pre-trained on: short, so that Z has much to say about one within few steps."""
MINUTES_TO_PREPARE = 10.0


def main() -> None:
    """Run the stages on this process of the group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", required=True, help="configs/free_transformer.yaml, or one like it"
    )
    parser.add_argument(
        "--use-fsdp", action="store_true", help="shard the model over the processes"
    )
    parser.add_argument(
        "--baseline", action="store_true", help="the same decoder without Z"
    )
    parser.add_argument(
        "--output",
        help="folder of the run; default: checkpoints/free or checkpoints/baseline",
    )
    parser.add_argument(
        "--pairs", type=int, default=3000, help="number of training pairs"
    )
    arguments, options = parser.parse_known_args()
    ranks = read_rank_info()
    config = yaml.safe_load(Path(arguments.config).read_text(encoding="utf-8"))
    sizes = {**config["model_config"], "use_latent": not arguments.baseline}
    output = Path(
        arguments.output
        or ("checkpoints/baseline" if arguments.baseline else "checkpoints/free")
    )
    data = output / "data"
    prepare_once(ranks, data, sizes["vocab_size"], arguments.pairs)
    options = [
        f"tokenizer_name={data / 'tokenizer'}",
        f"val_data_path={data / 'validation.jsonl'}",
        "overwrite=true",
        *options,
    ]
    if arguments.use_fsdp:
        options.append("use_fsdp=true")
    if arguments.baseline:
        options.append(f"model_config={json.dumps(sizes)}")
    results: dict[str, TrainResult] = {}
    for name, stage in config["training_stages"].items():
        file = "texts.jsonl" if stage["loss"] == "none" else "pairs.jsonl"
        stage_options = [
            f"stage={name}",
            f"data_path={data / file}",
            f"output_dir={output}",
        ]
        if results:  # each stage goes on with the model of the one before
            stage_options.append(f"model_name={list(results.values())[-1].model_dir}")
        weights = stage.get("auxiliary_losses", {})
        if arguments.baseline:  # without Z there is no kl
            stage_options.append(
                f"auxiliary_losses={json.dumps({loss: weights[loss] for loss in weights if loss != 'kl'})}"
            )
        results[name] = vembed.train(
            arguments.config,
            [*stage_options, *options],
            on_step=show if ranks.rank == 0 else None,
        )
        if ranks.rank == 0:
            print(
                f"{name}: {losses_on_other_texts(results[name].model_dir, sizes, data)}"
            )
    if ranks.rank == 0:
        trained = list(results.values())
        before = trained[0].metrics["before/ndcg@10"]
        after = trained[-1].metrics["ndcg@10"]
        print(f"embedding: nDCG@10 {after:.4f}, and {before:.4f} before all training")
        print(f"model: {trained[-1].model_dir}")


def show(info: StepInfo) -> None:
    """Print the loss of a step."""
    print(f"Loss: {info.loss:.4f}")


def losses_on_other_texts(folder: Path, sizes: dict[str, Any], data: Path) -> str:
    """Return how much Z tells on the validation texts, and the loss with the Z of another text in its place."""
    sys.path.insert(0, str(Path(__file__).parent / "own_model"))
    from free_transformer.model import FreeTransformer, ModelConfig, kl_to_uniform

    model = FreeTransformer(ModelConfig(**sizes))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {name.removeprefix("own."): tensor.float() for name, tensor in weights.items()}
    )
    lines = (data / "validation_texts.jsonl").read_text(encoding="utf-8").splitlines()
    # Not in their order: neighbours are of one function, and another text's Z would be of a similar text.
    texts = [
        json.loads(line)["text"]
        for line in random.Random(0).sample(lines, min(NUM_COMPARED, len(lines)))
    ]
    batch = AutoTokenizer.from_pretrained(data / "tokenizer")(
        texts, padding=True, return_tensors="pt"
    )
    ids = batch["input_ids"]
    mask = batch["attention_mask"]

    def loss(latent_states: torch.Tensor | None) -> float:
        sums, counts = model.losses(
            model.decode(ids, mask, latent_states)[0], None, ids, mask
        )["next_token"]
        return float(sums.sum() / counts.sum())

    torch.manual_seed(0)
    with torch.no_grad():
        _, z_logits = model.train().decode(
            ids, mask
        )  # in training mode the bits are drawn
        if z_logits is None:
            return f"next-token loss {loss(None):.3f} without Z"
        latent = model.mapper(z_logits)
        kl = float((kl_to_uniform(z_logits) * mask).sum() / mask.sum())
        own_loss = loss(latent)
        other = loss(latent.roll(1, dims=0))
    return (
        f"KL {kl:.3f} nats per token ({model.config.free_bits:.3f} are free); next-token loss {own_loss:.3f} with "
        f"Z, {other:.3f} with the Z of another text"
    )


def prepare_once(
    ranks: RankInfo, folder: Path, vocab_size: int, num_pairs: int
) -> None:
    """Let rank 0 write the data, and the others wait for it in the launcher's store: a file of an earlier run could be
    taken for this one's."""
    store = None
    if ranks.world_size > 1:
        store = LaunchCheck(ranks, MINUTES_TO_PREPARE).connect()
    if ranks.rank == 0:
        prepare(folder, vocab_size, num_pairs)
    if store is not None:
        if ranks.rank == 0:
            store.set("train_free/prepared", "yes")
        store.wait(["train_free/prepared"], timedelta(minutes=MINUTES_TO_PREPARE))


def prepare(folder: Path, vocab_size: int, num_pairs: int) -> None:
    """Write texts, pairs and a tokenizer that is trained on them."""
    folder.mkdir(parents=True, exist_ok=True)
    train, validation = split_by_module(
        standard_library_pairs(), num_pairs, NUM_VALIDATION
    )
    for name, pairs in (("pairs", train), ("validation", validation)):
        write_pairs(pairs, folder / f"{name}.jsonl")
    for name, pairs in (("texts", train), ("validation_texts", validation)):
        lines = short_lines(
            text for pair in pairs for text in (pair.query, pair.positive)
        )
        records = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(records, encoding="utf-8")
    texts = [text for pair in train for text in (pair.query, pair.positive)]
    train_tokenizer(texts, folder / "tokenizer", vocab_size=vocab_size)


def short_lines(texts: Iterable[str]) -> list[str]:
    """Return the distinct short lines of texts, in their order."""
    lines = (line.strip() for text in texts for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if len(line) in LINE_CHARACTERS))


if __name__ == "__main__":
    main()
