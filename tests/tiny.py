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
import transformers
from safetensors.torch import save_file

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


def _save(directory, tokenizer, model_class, **config):
    """Save a model with weights from a fixed seed, without touching the generator of the test."""
    directory = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = model_class(model_class.config_class(**config))
        if model_class is transformers.ViTMAEModel:
            # At zero, the first norm's gradient explodes.
            torch.nn.init.normal_(model.embeddings.cls_token, std=0.2)
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


def _save_text_model(directory, tokenizer, model_class, **config):
    config["vocab_size"] = len(tokenizer)
    return _save(directory, tokenizer, model_class, **config)


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


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
    names = ["Transformer", "Pooling"]
    if dense_dim is not None:
        names.append("Dense")
    if normalize:
        names.append("Normalize")
    modules = []
    for index, name in enumerate(names):
        path = f"{index}_{name}" if index else ""
        kind = f"sentence_transformers.models.{name}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": kind})
    write_json(directory / "modules.json", modules)
    flags = {
        "cls": "cls_token",
        "mean": "mean_tokens",
        "max": "max_tokens",
        "last": "lasttoken",
        "weighted_mean": "weightedmean_tokens",
    }
    modes = {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()}
    settings = {
        "word_embedding_dimension": hidden_dim,
        "include_prompt": include_prompt,
        **modes,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    write_json(directory / "1_Pooling" / "config.json", settings)
    settings = {
        "prompts": prompts or {},
        "default_prompt_name": None,
        "similarity_fn_name": similarity,
    }
    write_json(directory / "config_sentence_transformers.json", settings)
    settings = {"max_seq_length": max_seq_length, "do_lower_case": False}
    write_json(directory / "sentence_bert_config.json", settings)
    if dense_dim is not None:
        settings = {
            "in_features": hidden_dim,
            "out_features": dense_dim,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        write_json(directory / "2_Dense" / "config.json", settings)
        draw = torch.Generator().manual_seed(3)
        weight = torch.randn(dense_dim, hidden_dim, generator=draw) / hidden_dim**0.5
        bias = torch.randn(dense_dim, generator=draw)
        weights = {"linear.weight": weight, "linear.bias": bias}
        save_file(weights, directory / "2_Dense" / "model.safetensors")
    return directory


def write_json(path, values):
    """A JSON file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2))


def read_json(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def change_json(path, **changes):
    """Set keys of a JSON file. None takes a key out."""
    values = read_json(path) | changes
    kept = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))


# ---- text encoders ---------------------------------------------------------------------------------------------


def _bert_config(layers, hidden, dropout):
    return SIZES | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "pad_token_id": 0,
    }


def tiny_bert(directory, *, layers=2, hidden=32, dropout=0.0):
    """A BERT, as Transformers saves it."""
    config = _bert_config(layers, hidden, dropout)
    tokenizer = wordpiece_tokenizer()
    return _save_text_model(directory, tokenizer, transformers.BertModel, **config)


def tiny_answering(directory, model_class, **config):
    """A decoder whose tokenizer has `yes` and `no`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared(tiny_qwen3))
    tokenizer.add_tokens(["yes", "no"])
    config = {**QWEN3, "max_position_embeddings": 1024, **config}
    return _save_text_model(directory, tokenizer, model_class, **config)


def tiny_qwen3_reranker(directory):
    """As Qwen3-Reranker is published."""
    return tiny_answering(directory, transformers.Qwen3ForCausalLM)


def tiny_reranker(
    directory,
    model_class=transformers.BertForSequenceClassification,
    *,
    hidden=16,
    dropout=0.0,
    **config,
):
    """A BERT, or another encoder, that scores pairs of texts, as Transformers saves it."""
    defaults = _bert_config(1, hidden, dropout)
    config = {**defaults, "initializer_range": 0.5, "num_labels": 1, **config}
    return _save_text_model(directory, wordpiece_tokenizer(), model_class, **config)


def tiny_bert_st(directory, *, layers=2, dropout=0.0, **files):
    """A BERT as Sentence Transformers saves it (mean pooling and normalisation unless said otherwise)."""
    return add_sentence_transformers_files(
        tiny_bert(directory, layers=layers, dropout=dropout), **files
    )


def tiny_distilbert(directory):
    """A DistilBERT."""
    return _save_text_model(
        directory,
        wordpiece_tokenizer(model_input_names=["input_ids", "attention_mask"]),
        transformers.DistilBertModel,
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


MPNET = {
    **SIZES,
    **NO_DROPOUT,
    "max_position_embeddings": MAX_POSITIONS + 2,
    "pad_token_id": 1,
}
ROBERTA = MPNET | {"bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}


def tiny_roberta(directory):
    """A RoBERTa: positions start behind the pad index."""
    tokenizer = roberta_tokenizer()
    return _save_text_model(directory, tokenizer, transformers.RobertaModel, **ROBERTA)


def tiny_xlmr(directory):
    """An XLM-RoBERTa (multilingual E5 and BGE-M3 are of this kind)."""
    model_class = transformers.XLMRobertaModel
    return _save_text_model(directory, roberta_tokenizer(), model_class, **ROBERTA)


def tiny_mpnet(directory):
    """An MPNet."""
    tokenizer = roberta_tokenizer()
    return _save_text_model(directory, tokenizer, transformers.MPNetModel, **MPNET)


def tiny_modernbert(directory, *, layers=3):
    """A ModernBERT with global and local attention."""
    config = SIZES | {
        "num_hidden_layers": layers,
        "intermediate_size": 48,
        "max_position_embeddings": MAX_POSITIONS,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "pad_token_id": 0,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    tokenizer = wordpiece_tokenizer(model_input_names=["input_ids", "attention_mask"])
    model_class = transformers.ModernBertModel
    return _save_text_model(directory, tokenizer, model_class, **config)


def tiny_t5(directory):
    """A T5, of which the encoder alone embeds (sentence-t5 and GTR are of this kind)."""
    return _save_text_model(
        directory,
        byte_tokenizer(
            ["<pad>", "</s>", "<unk>"], "$A </s>", pad_token="<pad>", eos_token="</s>"
        ),
        transformers.T5EncoderModel,
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


# ---- decoder-only text models ----------------------------------------------------------------------------------

DECODER = SIZES | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
QWEN2 = DECODER | {"pad_token_id": 0}
QWEN3 = QWEN2 | {"head_dim": 8}
LLAMA = DECODER | {"bos_token_id": 1}


def tiny_qwen3(directory, *, layers=2, hidden=32):
    """A Qwen3 without language-model head."""
    config = QWEN3 | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
    }
    tokenizer = qwen_tokenizer()
    return _save_text_model(directory, tokenizer, transformers.Qwen3Model, **config)


def tiny_qwen3_st(directory, **files):
    """As Qwen3-Embedding is published: last token, an instruction before queries."""
    prompts = {"query": "Instruct: find the text\nQuery:", "document": ""}
    settings = {"pooling": "last", "prompts": prompts, "similarity": "cosine"} | files
    return add_sentence_transformers_files(tiny_qwen3(directory), **settings)


def tiny_qwen2(directory):
    """A Qwen2 without language-model head."""
    tokenizer = qwen_tokenizer()
    return _save_text_model(directory, tokenizer, transformers.Qwen2Model, **QWEN2)


def tiny_llama(directory):
    """A Llama with language-model head, whose tokenizer has no pad token and adds no end token."""
    tokenizer = llama_tokenizer()
    model_class = transformers.LlamaForCausalLM
    return _save_text_model(directory, tokenizer, model_class, **LLAMA)


def tiny_mistral(directory):
    """A Mistral without language-model head (E5-mistral is of this kind), with a sliding window."""
    config = LLAMA | {"head_dim": 8, "sliding_window": 64}
    tokenizer = llama_tokenizer()
    return _save_text_model(directory, tokenizer, transformers.MistralModel, **config)


def tiny_gemma(directory):
    """A Gemma 3 text model: local and global attention."""
    tokenizer = byte_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<unk>"],
        "<bos> $A <eos>",
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )
    config = QWEN3 | {"eos_token_id": 1, "bos_token_id": 2, "sliding_window": 16}
    model_class = transformers.Gemma3TextModel
    return _save_text_model(directory, tokenizer, model_class, **config)


def tiny_gpt2(directory):
    """A GPT-2: learned positions, and linear layers that are stored the other way round."""
    return _save_text_model(
        directory,
        llama_tokenizer(padding_side="left"),
        transformers.GPT2Model,
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


# ---- models that see -------------------------------------------------------------------------------------------

IMAGE_SIZE = 32


PIXELS = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
}


def save_image_processor(directory, kind="ViTImageProcessor", size=None, **options):
    """A preprocessor_config.json as the Hub has it, for images of IMAGE_SIZE pixels in each direction."""
    settings = PIXELS | {
        "image_processor_type": kind,
        "size": size or {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    }
    write_json(directory / "preprocessor_config.json", settings | options)


VISION = SIZES | {"image_size": IMAGE_SIZE, "patch_size": 8}


def tiny_vit(directory, *, layers=2, hidden=32, dropout=0.0, initializer_range=0.2):
    """A ViT: 16 patches and a class token."""
    config = VISION | {
        "initializer_range": initializer_range,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    save_image_processor(directory)
    return _save(directory, None, transformers.ViTModel, **config)


def tiny_dinov2(directory):
    """A DINOv2."""
    config = VISION | {"mlp_ratio": 2}
    del config["intermediate_size"]
    save_image_processor(directory, "BitImageProcessor", do_center_crop=False)
    return _save(directory, None, transformers.Dinov2Model, **config)


def tiny_dinov3(directory):
    """A DINOv3 with rotary positions and register tokens."""
    save_image_processor(directory)
    model_class = transformers.DINOv3ViTModel
    return _save(directory, None, model_class, **VISION, num_register_tokens=2)


def _save_convnext_processor(directory):
    save_image_processor(
        directory,
        "ConvNextImageProcessor",
        size={"shortest_edge": IMAGE_SIZE},
        crop_pct=1.0,
    )


def tiny_convnext(directory):
    """A ConvNeXt: two stages of one and two layers."""
    _save_convnext_processor(directory)
    return _save(
        directory,
        None,
        transformers.ConvNextModel,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        image_size=IMAGE_SIZE,
        initializer_range=0.2,
        layer_scale_init_value=1.0,
    )


def tiny_resnet(directory):
    """A ResNet: two stages of one layer, whose output is a feature map."""
    _save_convnext_processor(directory)
    return _save(
        directory,
        None,
        transformers.ResNetModel,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
    )


def tiny_vitmae(directory):
    """A masked auto-encoder, with the mask ratio that it is published with."""
    save_image_processor(directory)
    config = VISION | NO_DROPOUT | {"mask_ratio": 0.75}
    return _save(directory, None, transformers.ViTMAEModel, **config)


def save_clip_processor(directory):
    """The image processor of CLIP, which crops what it has resized."""
    save_image_processor(
        directory,
        "CLIPImageProcessor",
        size={"shortest_edge": IMAGE_SIZE},
        do_center_crop=True,
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    )


def tiny_clip(directory, *, layers=2, dropout=0.0):
    """A CLIP whose towers have different widths."""
    tokenizer = clip_tokenizer()
    tower = {"num_hidden_layers": layers, "attention_dropout": dropout}
    text = SIZES | tower
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        text[name] = getattr(tokenizer, name)
    text |= {"vocab_size": len(tokenizer), "max_position_embeddings": 77}
    save_clip_processor(directory)
    return _save(
        directory,
        tokenizer,
        transformers.CLIPModel,
        text_config=text,
        vision_config=VISION | tower | {"hidden_size": 48},
        projection_dim=24,
        initializer_factor=4.0,
    )


SIGLIP_TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
SIGLIP_TEXT = SIGLIP_TOWER | {
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "projection_size": 32,
}
SIGLIP_VISION = SIGLIP_TOWER | {"patch_size": 8}


def tiny_siglip(directory, *, layers=2):
    """A SigLIP: texts are padded to its 16 positions, and it learns scale and bias."""
    tokenizer = siglip_tokenizer()
    depth = {"num_hidden_layers": layers}
    save_image_processor(directory, "SiglipImageProcessor")
    return _save(
        directory,
        tokenizer,
        transformers.SiglipModel,
        text_config=SIGLIP_TEXT | depth | {"vocab_size": len(tokenizer)},
        vision_config=SIGLIP_VISION | depth | {"image_size": IMAGE_SIZE},
    )


def tiny_siglip2(directory):
    """A SigLIP 2 for images of any shape: patches with a mask and their grid."""
    tokenizer = siglip_tokenizer()
    save_image_processor(
        directory, "Siglip2ImageProcessor", max_num_patches=16, patch_size=8
    )
    return _save(
        directory,
        tokenizer,
        transformers.Siglip2Model,
        text_config=SIGLIP_TEXT | {"vocab_size": len(tokenizer)},
        vision_config=SIGLIP_VISION | {"num_patches": 16},
    )


# ---- vision-language models ------------------------------------------------------------------------------------

QWEN_VL_TEXT = QWEN2 | {"max_position_embeddings": 512}
QWEN_VL_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
QWEN_VL_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
}


def _save_qwen_vl(
    directory,
    name,
    padding_side,
    *,
    patch_size=14,
    image_processor="Qwen2VLImageProcessor",
    rope=None,
    text=None,
    **vision,
):
    """Save a model, and the settings of its processor, whose classes begin with `name`."""
    cell = (2 * patch_size) ** 2
    settings = PIXELS | {
        "image_processor_type": image_processor,
        "processor_class": f"{name}Processor",
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": cell, "longest_edge": 16 * cell},
    }
    write_json(directory / "preprocessor_config.json", settings)
    tokenizer = qwen_vl_tokenizer(padding_side)
    text_config = QWEN_VL_TEXT | (text or {})
    text_config["vocab_size"] = len(tokenizer)
    text_config["rope_parameters"] = QWEN_VL_ROPE | (rope or {})
    return _save(
        directory,
        tokenizer,
        getattr(transformers, f"{name}ForConditionalGeneration"),
        text_config=text_config,
        vision_config=QWEN_VL_TOWER | vision | {"patch_size": patch_size},
        vision_start_token_id=3,
        vision_end_token_id=4,
        image_token_id=5,
        video_token_id=6,
    )


def tiny_qwen3_vl(directory, *, padding_side="right"):
    """A Qwen3-VL as Qwen3-VL-Embedding is published: language-model head, chat template, patches of 16 pixels."""
    return _save_qwen_vl(
        directory,
        "Qwen3VL",
        padding_side,
        patch_size=16,
        image_processor="Qwen2VLImageProcessorFast",
        rope={"mrope_interleaved": True},
        text={"head_dim": 8},
        intermediate_size=64,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )


def tiny_qwen2_vl(directory, *, padding_side="left"):
    """A Qwen2-VL (GME is of this kind)."""
    return _save_qwen_vl(directory, "Qwen2VL", padding_side, embed_dim=32, mlp_ratio=2)


def tiny_qwen2_5_vl(directory, *, padding_side="left"):
    """A Qwen2.5-VL: windowed attention in its vision tower."""
    return _save_qwen_vl(
        directory,
        "Qwen2_5_VL",
        padding_side,
        intermediate_size=64,
        out_hidden_size=32,
        window_size=56,
        fullatt_block_indexes=[1],
    )
