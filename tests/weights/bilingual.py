"""A bilingual model and its texts: a cipher maps each word of one language to one of the other, and the model's
embeddings of both differ by what the languages differ in."""

import random
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.tiny import WORDS, shared, tiny_bert_st

PLAIN = [word for word in dict.fromkeys(WORDS) if word.isalpha()]
HALF = len(PLAIN) // 2
CIPHER = dict(zip(PLAIN[:HALF], PLAIN[HALF : 2 * HALF], strict=True))


def bilingual_model(folder, distance=3.0):
    """A tiny BERT in which an enciphered word is the plain word and a step in one direction."""
    shutil.copytree(shared(tiny_bert_st), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    table = weights["embeddings.word_embeddings.weight"].clone()
    step = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(5))
    step *= distance * table.norm(dim=1).mean() / step.norm() / 4
    for plain, enciphered in CIPHER.items():
        first, other = (
            tokenizer.convert_tokens_to_ids(word) for word in (plain, enciphered)
        )
        table[other] = table[first] + step
    weights["embeddings.word_embeddings.weight"] = table
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def bilingual_texts(count, words=4):
    """The same sentences in both languages."""
    draw = random.Random(3)
    plain = [[draw.choice(PLAIN[:HALF]) for _ in range(words)] for _ in range(count)]
    return [" ".join(line) for line in plain], [
        " ".join(CIPHER[word] for word in line) for line in plain
    ]
