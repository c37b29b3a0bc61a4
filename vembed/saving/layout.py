"""Files of the Sentence Transformers layout: modules, their settings, prompts and modalities."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from vembed.models.families.backbones import STATIC_TYPE
from vembed.models.families.description import ModelDescription
from vembed.models.families.model_files import POOLING_MODULE, STATIC
from vembed.models.families.weight_files import read_object
from vembed.models.heads import Dense
from vembed.models.poolings.table import MODE_FLAGS, MODEL_POOLING, POOLINGS
from vembed.models.processors import ChatTemplate

MODULE = "sentence_transformers.models."
"""Module path that Sentence Transformers 3 to 6 all resolve."""
TWO_TOWERS = "vembed.models.two_towers.TwoTowers"
"""First module of a composed model. Sentence Transformers rejects it instead of loading the text tower alone."""


def write_layout(
    folder: Path,
    description: ModelDescription,
    head: nn.Sequential | None,
    head_state: dict[str, Tensor],
    pooling_state: Mapping[str, Tensor],
    chat: ChatTemplate | None,
    changed_settings: Mapping[str, Any],
) -> None:
    """Write modules.json and the files of each module.

    `chat`: chat template of a vision-language model. `changed_settings`: settings that override the base model's config
    when an adapter is saved alone.
    """
    is_static = (read_object(folder / "config.json") or {}).get(
        "model_type"
    ) == STATIC_TYPE
    modules: list[tuple[str, str]] = [
        ("", MODULE + STATIC if is_static else _backbone_module(description))
    ]
    # The module of a static model gives the mean itself.
    if description.pooling != MODEL_POOLING and not is_static:
        modules.append(
            ("1_Pooling", _write_pooling(folder, description, pooling_state))
        )
    for number, dense in enumerate(head if head is not None else ()):
        assert isinstance(dense, Dense)
        name = f"{len(modules)}_Dense"
        prefix = f"{number}."
        modules.append((name, MODULE + "Dense"))
        write_json(folder / name / "config.json", dense.settings())
        names = [key for key in head_state if key.startswith(prefix)]
        weights = {key.removeprefix(prefix): head_state.pop(key) for key in names}
        save_file(weights, folder / name / "model.safetensors")
    refuse_unclaimed("the head", head_state)
    if description.normalize:
        name = f"{len(modules)}_Normalize"
        modules.append((name, MODULE + "Normalize"))
        # Normalize has no file; modules.json names a folder for every module.
        (folder / name).mkdir()
    write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": kind}
            for index, (path, kind) in enumerate(modules)
        ],
    )
    write_json(
        folder / "config_sentence_transformers.json", _model_settings(description)
    )
    settings = _backbone_settings(folder, description, chat)
    if changed_settings:
        settings["config_args"] = dict(changed_settings)
    write_json(folder / "sentence_bert_config.json", settings)


def refuse_unclaimed(owner: str, state: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError if state is left that no part has written."""
    if state:
        raise RuntimeError(
            f"no part of a saved model takes this state of {owner}: {', '.join(state)}; save it with a part, or "
            "register it with persistent=False"
        )


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _backbone_module(description: ModelDescription) -> str:
    name = description.traits.sentence_transformers
    return TWO_TOWERS if name is None else MODULE + name


def _backbone_settings(
    folder: Path, description: ModelDescription, chat: ChatTemplate | None
) -> dict[str, Any]:
    """Return sentence_bert_config.json.

    A text model gets only the keys that all versions know. Any other model needs its modalities: without them version 6
    treats it as a text model.
    """
    family = description.traits
    if family.reads_only_text or family.has_two_models:
        return {"max_seq_length": description.max_length, "do_lower_case": False}
    # Keys of version 6, whose Transformer module runs `method` of the backbone for each modality and pools
    # `method_output_name` of what it gives.
    settings: dict[str, Any] = {"transformer_task": "feature-extraction"}
    if chat is not None:
        hidden = {"method": "forward", "method_output_name": "last_hidden_state"}
        settings["modality_config"] = {
            "text": hidden,
            "image": hidden,
            "message": {**hidden, "format": "structured"},
        }
        settings["module_output_name"] = "token_embeddings"
        settings["processing_kwargs"] = {"chat_template": chat.options}
    elif family.pools_itself:
        settings["modality_config"] = {
            "text": {
                "method": "get_text_features",
                "method_output_name": "pooler_output",
            },
            "image": {
                "method": "get_image_features",
                "method_output_name": "pooler_output",
            },
        }
        settings["module_output_name"] = "sentence_embedding"
        if family.has_fixed_length:
            # SigLIP was trained on texts padded to the full length, without a mask, and pools the last position.
            settings["processing_kwargs"] = {
                "text": {"padding": "max_length", "max_length": description.max_length},
                "image": _patch_options(folder),
            }
    else:
        is_pooled = description.pooling == MODEL_POOLING
        output = "pooler_output" if is_pooled else "last_hidden_state"
        settings["modality_config"] = {
            "image": {"method": "forward", "method_output_name": output}
        }
        settings["module_output_name"] = (
            "sentence_embedding" if is_pooled else "token_embeddings"
        )
    return settings


def _patch_options(folder: Path) -> dict[str, Any]:
    """Return image processor options of SigLIP 2 with variable resolution.

    The joint processor of version 6 would otherwise use its own defaults.
    """
    values = read_object(folder / "preprocessor_config.json") or {}
    values = values or (read_object(folder / "processor_config.json") or {}).get(
        "image_processor", {}
    )
    return {
        key: values[key] for key in ("max_num_patches", "patch_size") if key in values
    }


def _write_pooling(
    folder: Path, description: ModelDescription, state: Mapping[str, Tensor]
) -> str:
    """Write the pooling's folder and return the type of its module."""
    pooling = POOLINGS[description.pooling]
    target = folder / "1_Pooling"
    settings: dict[str, Any] = {"word_embedding_dimension": description.hidden_dim}
    if pooling.modes:
        known = {mode for other in POOLINGS.values() for mode in other.modes}
        for mode, flag in MODE_FLAGS.items():
            if mode in known:
                settings[flag] = mode in pooling.modes
        settings["include_prompt"] = True
    write_json(target / "config.json", settings)
    if pooling.is_trained:
        save_file(dict(state), target / "model.safetensors")
    else:
        refuse_unclaimed(f"the pooling {pooling.name}", state)
    return MODULE + "Pooling" if pooling.modes else POOLING_MODULE + pooling.name


def _model_settings(description: ModelDescription) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model_type": "SentenceTransformer",
        "prompts": {
            **description.other_prompts,
            "query": description.query_prompt,
            "document": description.document_prompt,
        },
        "default_prompt_name": description.default_prompt_name,
        "similarity_fn_name": description.similarity,
    }
    if description.truncate_dim is not None:
        settings["truncate_dim"] = description.truncate_dim
    return settings
