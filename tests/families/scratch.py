"""Small towers with the usual initial weights, from which training can learn; tests/tiny.py draws them wide instead."""

import torch

from tests.families.pictures import SIZE
from tests.tiny import save_clip_processor
from tests.tiny_tokenizers import clip_tokenizer


def small_clip(directory):
    """Two towers."""
    from transformers import CLIPConfig, CLIPModel

    tokenizer = clip_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 16,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": SIZE,
        "patch_size": 8,
    }
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    save_clip_processor(directory)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(directory)
    return directory
