"""Tiny models of every family, made from their configuration classes and saved to a folder with a small tokenizer.

Each `tiny_*` takes the target folder and returns it; `shared(tiny_bert, ...)` makes one per test session, for
tests that only read. Weights are a pure function of the options, and drawn wide enough that texts differ.
"""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from tests.tiny_tokenizers import (
    CHAT_TEMPLATE,
    MAX_POSITIONS,
    WORDS,
    byte_tokenizer,
    clip_tokenizer,
    llama_tokenizer,
    qwen_tokenizer,
    qwen_vl_tokenizer,
    roberta_tokenizer,
    siglip_tokenizer,
    texts,
    wordpiece_tokenizer,
)

__all__ = ["CHAT_TEMPLATE", "MAX_POSITIONS", "WORDS", "shared", "texts"]


@cache
def _shared_root():
    """The folder of this session of tests, whose workers and ranks share it; outside of one, of this process."""
    inputs = os.environ.get("VEMBED_TINY_MODELS")
    if inputs is not None:
        return Path(inputs)
    root = Path(tempfile.mkdtemp(prefix="vembed-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def shared(make, *args, **options):
    """The folder that `make(folder, *args, **options)` filled, made once per session; nobody may write to it."""
    name = f"{make.__module__}.{make.__qualname__} {args} {sorted(options.items())}"
    if (
        " at 0x" in name or "<" in make.__qualname__
    ):  # a name that other functions may have too
        return make(
            Path(tempfile.mkdtemp(prefix="tiny-", dir=_shared_root())), *args, **options
        )
    folder = (
        _shared_root()
        / f"{make.__name__}-{hashlib.blake2b(name.encode(), digest_size=6).hexdigest()}"
    )
    if not folder.exists():
        # Another process may be making it too: the first one to rename its folder wins.
        attributes = (
            Path(tempfile.mkdtemp(prefix=".making-", dir=_shared_root())) / folder.name
        )
        attributes.mkdir()
        make(attributes, *args, **options)
        with suppress(OSError):
            attributes.rename(folder)
    return folder


def _save(directory, tokenizer, make):
    """Weights drawn from a fixed seed, without touching the generator of the test."""
    directory = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = make()
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


# ---- Sentence Transformers files -------------------------------------------------------------------------------


def add_sentence_transformers_files(
    directory,
    *,
    pooling="mean",
    normalize=True,
    max_seq_length=None,
    prompts=None,
    similarity=None,
    hidden_dim=32,
    dense_dim=None,
    include_prompt=True,
):
    """What a model saved by Sentence Transformers has beside its weights; `dense_dim` adds a Dense module."""
    from safetensors.torch import save_file

    names = (
        ["Transformer", "Pooling"]
        + ["Dense"] * (dense_dim is not None)
        + ["Normalize"] * normalize
    )
    paths = [
        "" if name == "Transformer" else f"{index}_{name}"
        for index, name in enumerate(names)
    ]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{name}",
        }
        for index, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    write_json(directory / "modules.json", modules)
    flags = {
        "cls": "cls_token",
        "mean": "mean_tokens",
        "max": "max_tokens",
        "last": "lasttoken",
        "weighted_mean": "weightedmean_tokens",
    }
    write_json(
        directory / "1_Pooling" / "config.json",
        {"word_embedding_dimension": hidden_dim, "include_prompt": include_prompt}
        | {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()}
        | {"pooling_mode_mean_sqrt_len_tokens": False},
    )
    write_json(
        directory / "config_sentence_transformers.json",
        {
            "prompts": prompts or {},
            "default_prompt_name": None,
            "similarity_fn_name": similarity,
        },
    )
    write_json(
        directory / "sentence_bert_config.json",
        {"max_seq_length": max_seq_length, "do_lower_case": False},
    )
    if dense_dim is not None:
        folder = directory / "2_Dense"
        write_json(
            folder / "config.json",
            {
                "in_features": hidden_dim,
                "out_features": dense_dim,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        )
        draw = torch.Generator().manual_seed(3)
        weights = {
            "linear.weight": torch.randn(dense_dim, hidden_dim, generator=draw)
            / hidden_dim**0.5,
            "linear.bias": torch.randn(dense_dim, generator=draw),
        }
        save_file(weights, folder / "model.safetensors")
    return directory


def write_json(path, values):
    """A JSON file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2))


# ---- text encoders ---------------------------------------------------------------------------------------------


def tiny_bert(directory, *, layers=2, hidden=32, dropout=0.0):
    """A BERT, as Transformers saves it."""
    from transformers import BertConfig, BertModel

    tokenizer = wordpiece_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=0,
    )
    return _save(directory, tokenizer, lambda: BertModel(config))


def tiny_qwen3_reranker(directory):
    """A Qwen3 whose tokenizer has `yes` and `no`, as Qwen3-Reranker is published."""
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

    base = shared(tiny_qwen3)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["yes", "no"])
    config = AutoConfig.from_pretrained(base)
    config.max_position_embeddings = 1024
    config.vocab_size = len(tokenizer)
    return _save(directory, tokenizer, lambda: Qwen3ForCausalLM(config))


def tiny_reranker(directory, *, hidden=16, dropout=0.0):
    """A BERT that scores pairs of texts, as Transformers saves it."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = wordpiece_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.5,
        pad_token_id=0,
        num_labels=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _save(directory, tokenizer, lambda: BertForSequenceClassification(config))


def tiny_bert_st(directory, *, layers=2, dropout=0.0, **files):
    """A BERT as Sentence Transformers saves it (mean pooling and normalisation unless said otherwise)."""
    return add_sentence_transformers_files(
        tiny_bert(directory, layers=layers, dropout=dropout), **files
    )


def tiny_distilbert(directory):
    """A DistilBERT."""
    from transformers import DistilBertConfig, DistilBertModel

    tokenizer = wordpiece_tokenizer(model_input_names=["input_ids", "attention_mask"])
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=32,
        n_layers=2,
        n_heads=2,
        hidden_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
    )
    return _save(directory, tokenizer, lambda: DistilBertModel(config))


def tiny_roberta(directory):
    """A RoBERTa: positions start behind the pad index."""
    from transformers import RobertaConfig, RobertaModel

    tokenizer = roberta_tokenizer()
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS + 2,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        type_vocab_size=1,
    )
    return _save(directory, tokenizer, lambda: RobertaModel(config))


def tiny_xlmr(directory):
    """An XLM-RoBERTa (multilingual E5 and BGE-M3 are of this kind)."""
    from transformers import XLMRobertaConfig, XLMRobertaModel

    tokenizer = roberta_tokenizer()
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS + 2,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        type_vocab_size=1,
    )
    return _save(directory, tokenizer, lambda: XLMRobertaModel(config))


def tiny_mpnet(directory):
    """An MPNet."""
    from transformers import MPNetConfig, MPNetModel

    tokenizer = roberta_tokenizer()
    config = MPNetConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS + 2,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=1,
    )
    return _save(directory, tokenizer, lambda: MPNetModel(config))


def tiny_modernbert(directory, *, layers=3):
    """A ModernBERT with global and local attention."""
    from transformers import ModernBertConfig, ModernBertModel

    tokenizer = wordpiece_tokenizer(model_input_names=["input_ids", "attention_mask"])
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=MAX_POSITIONS,
        local_attention=8,
        global_attn_every_n_layers=2,
        initializer_range=0.2,
        pad_token_id=0,
        cls_token_id=2,
        sep_token_id=3,
        bos_token_id=2,
        eos_token_id=3,
    )
    return _save(directory, tokenizer, lambda: ModernBertModel(config))


def tiny_t5(directory):
    """A T5, of which the encoder alone embeds (sentence-t5 and GTR are of this kind)."""
    from transformers import T5Config, T5EncoderModel

    tokenizer = byte_tokenizer(
        ["<pad>", "</s>", "<unk>"], "$A </s>", pad_token="<pad>", eos_token="</s>"
    )
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        initializer_factor=1.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return _save(directory, tokenizer, lambda: T5EncoderModel(config))


# ---- decoder-only text models ----------------------------------------------------------------------------------


def tiny_qwen3(directory, *, layers=2, hidden=32):
    """A Qwen3 without language-model head."""
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = qwen_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=2 * hidden,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=2,
    )
    return _save(directory, tokenizer, lambda: Qwen3Model(config))


def tiny_qwen3_st(directory, **files):
    """As Qwen3-Embedding is published: last token, an instruction before queries."""
    prompts = {"query": "Instruct: find the text\nQuery:", "document": ""}
    settings = {"pooling": "last", "prompts": prompts, "similarity": "cosine"} | files
    return add_sentence_transformers_files(tiny_qwen3(directory), **settings)


def tiny_qwen2(directory):
    """A Qwen2 without language-model head."""
    from transformers import Qwen2Config, Qwen2Model

    tokenizer = qwen_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=2,
    )
    return _save(directory, tokenizer, lambda: Qwen2Model(config))


def tiny_llama(directory):
    """A Llama with language-model head, whose tokenizer has no pad token and adds no end token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = llama_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _save(directory, tokenizer, lambda: LlamaForCausalLM(config))


def tiny_mistral(directory):
    """A Mistral without language-model head (E5-mistral is of this kind), with a sliding window."""
    from transformers import MistralConfig, MistralModel

    tokenizer = llama_tokenizer()
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=64,
    )
    return _save(directory, tokenizer, lambda: MistralModel(config))


def tiny_gemma(directory):
    """A Gemma 3 text model: local and global attention."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    tokenizer = byte_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<unk>"],
        "<bos> $A <eos>",
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        sliding_window=16,
    )
    return _save(directory, tokenizer, lambda: Gemma3TextModel(config))


def tiny_gpt2(directory):
    """A GPT-2: learned positions, and linear layers that are stored the other way round."""
    from transformers import GPT2Config, GPT2Model

    tokenizer = llama_tokenizer(padding_side="left")
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=MAX_POSITIONS,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _save(directory, tokenizer, lambda: GPT2Model(config))


# ---- models that see -------------------------------------------------------------------------------------------

IMAGE_SIZE = 32


def save_image_processor(directory, kind="ViTImageProcessor", size=None, **options):
    """A preprocessor_config.json as the Hub has it, for images of IMAGE_SIZE pixels in each direction."""
    settings = {
        "image_processor_type": kind,
        "do_resize": True,
        "size": size or {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }
    write_json(directory / "preprocessor_config.json", settings | options)


def tiny_vit(directory, *, layers=2, hidden=32, dropout=0.0):
    """A ViT: 16 patches and a class token."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=IMAGE_SIZE,
        patch_size=8,
        initializer_range=0.2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    save_image_processor(directory)
    return _save(directory, None, lambda: ViTModel(config))


def tiny_dinov2(directory):
    """A DINOv2."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=IMAGE_SIZE,
        patch_size=8,
        initializer_range=0.2,
    )
    save_image_processor(directory, "BitImageProcessor", do_center_crop=False)
    return _save(directory, None, lambda: Dinov2Model(config))


def tiny_dinov3(directory):
    """A DINOv3 with rotary positions and register tokens."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config = DINOv3ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=IMAGE_SIZE,
        patch_size=8,
        num_register_tokens=2,
        initializer_range=0.2,
    )
    save_image_processor(directory)
    return _save(directory, None, lambda: DINOv3ViTModel(config))


def tiny_convnext(directory):
    """A ConvNeXt: two stages of one and two layers."""
    from transformers import ConvNextConfig, ConvNextModel

    config = ConvNextConfig(
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        image_size=IMAGE_SIZE,
        initializer_range=0.2,
        layer_scale_init_value=1.0,
    )
    save_image_processor(
        directory,
        "ConvNextImageProcessor",
        size={"shortest_edge": IMAGE_SIZE},
        crop_pct=1.0,
    )
    return _save(directory, None, lambda: ConvNextModel(config))


def tiny_resnet(directory):
    """A ResNet: two stages of one layer, whose output is a feature map."""
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"
    )
    save_image_processor(
        directory,
        "ConvNextImageProcessor",
        size={"shortest_edge": IMAGE_SIZE},
        crop_pct=1.0,
    )
    return _save(directory, None, lambda: ResNetModel(config))


def tiny_vitmae(directory):
    """A masked auto-encoder, with the mask ratio that it is published with."""
    from transformers import ViTMAEConfig, ViTMAEModel

    config = ViTMAEConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=IMAGE_SIZE,
        patch_size=8,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        mask_ratio=0.75,
    )
    save_image_processor(directory)

    def make():
        model = ViTMAEModel(config)
        torch.nn.init.normal_(
            model.embeddings.cls_token, std=0.2
        )  # at zero, the first norm's gradient explodes
        return model

    return _save(directory, None, make)


def tiny_clip(directory, *, layers=2, dropout=0.0):
    """A CLIP whose towers have different widths."""
    from transformers import CLIPConfig, CLIPModel

    tokenizer = clip_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 77,
        "initializer_range": 0.2,
        "attention_dropout": dropout,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": IMAGE_SIZE,
        "patch_size": 8,
        "initializer_range": 0.2,
        "attention_dropout": dropout,
    }
    config = CLIPConfig(
        text_config=text,
        vision_config=vision,
        projection_dim=24,
        initializer_factor=4.0,
    )
    save_image_processor(
        directory,
        "CLIPImageProcessor",
        size={"shortest_edge": IMAGE_SIZE},
        do_center_crop=True,
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    )
    tokenizer.save_pretrained(directory)
    return _save(directory, None, lambda: CLIPModel(config))


def tiny_siglip(directory, *, layers=2):
    """A SigLIP: texts are padded to its 16 positions, and it learns scale and bias."""
    from transformers import SiglipConfig, SiglipModel

    tokenizer = siglip_tokenizer()
    text, vision = _siglip_towers(len(tokenizer))
    text["num_hidden_layers"] = vision["num_hidden_layers"] = layers
    config = SiglipConfig(
        text_config=text, vision_config=vision | {"image_size": IMAGE_SIZE}
    )
    save_image_processor(directory, "SiglipImageProcessor")
    return _save(directory, tokenizer, lambda: SiglipModel(config))


def tiny_siglip2(directory):
    """A SigLIP 2 for images of any shape: patches with a mask and their grid."""
    from transformers import Siglip2Config, Siglip2Model

    tokenizer = siglip_tokenizer()
    text, vision = _siglip_towers(len(tokenizer))
    config = Siglip2Config(text_config=text, vision_config=vision | {"num_patches": 16})
    save_image_processor(
        directory, "Siglip2ImageProcessor", max_num_patches=16, patch_size=8
    )
    return _save(directory, tokenizer, lambda: Siglip2Model(config))


def _siglip_towers(vocab_size):
    shared = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    text = shared | {
        "vocab_size": vocab_size,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "projection_size": 32,
    }
    return text, shared | {"patch_size": 8}


# ---- vision-language models ------------------------------------------------------------------------------------


def _qwen_vl_ids():
    names = (
        "vision_start_token_id",
        "vision_end_token_id",
        "image_token_id",
        "video_token_id",
    )
    return {name: 3 + index for index, name in enumerate(names)}


def _qwen_vl_text(vocab_size, **options):
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 2,
    } | options


def tiny_qwen3_vl(directory, *, padding_side="right"):
    """A Qwen3-VL as Qwen3-VL-Embedding is published: language-model head, chat template, patches of 16 pixels."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = qwen_vl_tokenizer(padding_side)
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config=_qwen_vl_text(len(tokenizer), head_dim=8, rope_parameters=rope),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.2,
        },
        **_qwen_vl_ids(),
    )
    _save_qwen_vl_processor(
        directory,
        patch_size=16,
        kind="Qwen2VLImageProcessorFast",
        processor="Qwen3VLProcessor",
    )
    return _save(directory, tokenizer, lambda: Qwen3VLForConditionalGeneration(config))


def tiny_qwen2_vl(directory, *, padding_side="left"):
    """A Qwen2-VL (GME is of this kind)."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = qwen_vl_tokenizer(padding_side)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = Qwen2VLConfig(
        text_config=_qwen_vl_text(len(tokenizer), rope_parameters=rope),
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": 0.2,
        },
        **_qwen_vl_ids(),
    )
    _save_qwen_vl_processor(
        directory,
        patch_size=14,
        kind="Qwen2VLImageProcessor",
        processor="Qwen2VLProcessor",
    )
    return _save(directory, tokenizer, lambda: Qwen2VLForConditionalGeneration(config))


def tiny_qwen2_5_vl(directory, *, padding_side="left"):
    """A Qwen2.5-VL: windowed attention in its vision tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = qwen_vl_tokenizer(padding_side)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = Qwen2_5_VLConfig(
        text_config=_qwen_vl_text(len(tokenizer), rope_parameters=rope),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        },
        **_qwen_vl_ids(),
    )
    _save_qwen_vl_processor(
        directory,
        patch_size=14,
        kind="Qwen2VLImageProcessor",
        processor="Qwen2_5_VLProcessor",
    )
    return _save(
        directory, tokenizer, lambda: Qwen2_5_VLForConditionalGeneration(config)
    )


def _save_qwen_vl_processor(directory, *, patch_size, kind, processor):
    cell = (2 * patch_size) ** 2
    write_json(
        directory / "preprocessor_config.json",
        {
            "image_processor_type": kind,
            "processor_class": processor,
            "patch_size": patch_size,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": cell, "longest_edge": 16 * cell},
            "do_resize": True,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "do_convert_rgb": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
        },
    )
