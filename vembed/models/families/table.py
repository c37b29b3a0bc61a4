"""The model families that vembed has, one record each. Imports no torch, because the config reads the names.

A new family needs its record in a file of this folder, and its entry in the list below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from vembed.declarations import check_parts, text_of_values
from vembed.models.families.family import (
    CHAT_LENGTH,
    Family,
    Modality,
    Starter,
    Tower,
)
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS

_RECORDS = (
    Family(
        name="text_encoder",
        model_types=None,
        forward_kinds={"text": "text"},
        towers={"text": ""},
        starter=Starter(
            model_name="BAAI/bge-base-en-v1.5",
            multilingual="intfloat/multilingual-e5-base",
            about="BERT-like text model",
        ),
        reranker_starter=Starter(
            model_name="Alibaba-NLP/gte-reranker-modernbert-base",
            multilingual="BAAI/bge-reranker-v2-m3",
            about="text encoder with one label",
            batch_size=32,
        ),
    ),
    Family(
        name="text_decoder",
        model_types=None,
        forward_kinds={"text": "text"},
        towers={"text": ""},
        pooling_reason="a decoder with bidirectional attention (the model defines no pooling)",
        is_causal=True,
        starter=Starter(
            model_name="Qwen/Qwen3-Embedding-0.6B",
            about="LLM-based text model",
            use_lora=True,
        ),
        reranker_starter=Starter(
            model_name="Qwen/Qwen3-Reranker-0.6B",
            about="LLM that answers yes or no",
            batch_size=32,
            use_lora=True,
        ),
    ),
    Family(
        name="clip",
        model_types=frozenset({"clip", "metaclip_2"}),
        forward_kinds={"text": "pooled_towers", "image": "pooled_towers"},
        towers={"text": "text_model.", "vision": "vision_model."},
        projections={"text": "text_projection", "image": "visual_projection"},
        pools_itself=True,
        pooling="own",
        embedding_size=("projection_dim",),
        has_logit_scale_and_bias=True,
        adapter_targets={
            "text": ("text_projection",),
            "vision": ("visual_projection",),
        },
        sentence_transformers="CLIPModel",
        starter=Starter(
            model_name="openai/clip-vit-base-patch32",
            about="text and images, two towers",
            max_length=77,
            batch_size=128,
            temperature=0.01,
        ),
    ),
    Family(
        name="siglip",
        model_types=frozenset({"siglip", "siglip2"}),
        forward_kinds={"text": "pooled_towers", "image": "pooled_towers"},
        towers={"text": "text_model.", "vision": "vision_model."},
        pools_itself=True,
        pooling="own",
        has_fixed_length=True,
        embedding_size=("vision_config", "hidden_size"),
        has_logit_scale_and_bias=True,
        adapter_targets={"text": ("text_model.head",)},
        starter=Starter(
            model_name="google/siglip2-base-patch16-224",
            about="text and images, two towers",
            max_length=64,
            batch_size=128,
            temperature=0.01,
        ),
    ),
    Family(
        name="image_encoder",
        model_types=None,
        forward_kinds={"image": "image"},
        towers={"vision": ""},
        starter=Starter(
            model_name="facebook/dinov2-base",
            about="images only",
            max_length=None,
            retrieval_mode="i2i",
        ),
    ),
    Family(
        name="vision_language",
        model_types=frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}),
        forward_kinds={"text": "text", "multimodal": "vision_language"},
        towers={"text": "language_model.", "vision": "visual."},
        pooling="last",
        pooling_reason="the end-of-text token, default of the family (the model defines no pooling)",
        is_causal=True,
        longest_by_default=CHAT_LENGTH,
        starter=Starter(
            model_name="Qwen/Qwen3-VL-Embedding-2B",
            about="text and images in one LLM-based model",
            max_length=1024,
            batch_size=32,
            use_lora=True,
        ),
    ),
    Family(
        name="composed",
        model_types=None,
        forward_kinds={"text": "text", "image": "image"},
        towers={"text": "text_model.", "vision": "vision_model."},
        projections={"text": "text_projection", "image": "visual_projection"},
        is_causal=None,
        is_composed=True,
        sentence_transformers=None,
        starter=Starter(
            model_name="BAAI/bge-base-en-v1.5",
            about="a text tower and an image tower",
            max_length=128,
            batch_size=128,
            image_model_name="facebook/dinov2-base",
        ),
    ),
    Family(
        name="own_text_image",
        model_types=None,
        forward_kinds={"text": "text", "image": "image"},
        towers={"text": "", "vision": ""},
        is_causal=None,
        sentence_transformers=None,
        starter=Starter(
            model_name="my_model.py:MyModel",
            about="a module of your own that takes texts and images",
            max_length=128,
            learning_rate=1e-3,
        ),
    ),
)


FAMILIES = check_parts(
    "model family",
    Family,
    _RECORDS,
    lambda family: (family.name,),
    taken_names=("auto",),
)
"""Family name, as in the option `model_family` -> its record."""
FAMILY_OF_TYPE = check_parts(
    "model type of the family",
    Family,
    _RECORDS,
    lambda family: family.model_types or (),
    allowed={
        "forward_kinds": get_args(Modality),
        "towers": get_args(Tower),
        "pooling": (*POOLINGS, MODEL_POOLING),
    },
)
"""`model_type` in config.json -> the record of its family."""
FAMILY_TEXT = text_of_values(
    "Kind of model. `auto`: from the model's config and files. The log gives the reason.",
    {name: family.starter.about for name, family in FAMILIES.items()},
)
"""Text of the option `model_family`."""
if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]
