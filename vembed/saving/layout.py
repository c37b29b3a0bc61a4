"""Files of the Sentence Transformers layout: modules, their settings, prompts and modalities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vembed.data.features import pair_template
from vembed.files import write_json
from vembed.models.embedding_model import taken
from vembed.models.families.backbones import STATIC_TYPE
from vembed.models.families.description import ModelDescription
from vembed.models.families.model_files import POOLING_MODULE, STATIC, read_object
from vembed.models.heads import Head, answer_tokens
from vembed.models.poolings.table import MODE_FLAGS, MODEL_POOLING, POOLINGS
from vembed.models.processors import (
    image_placeholder,
    load_chat_template,
    load_tokenizer,
)

MODULE = "sentence_transformers.models."
"""Module path that Sentence Transformers 3 to 6 all resolve."""
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
TWO_TOWERS = "vembed.models.two_towers.TwoTowers"
"""First module of a composed model. Sentence Transformers rejects it instead of loading the text tower alone."""


def write_layout(
    folder: Path,
    description: ModelDescription,
    head: Head | None,
    head_state: dict[str, Tensor],
    pooling_state: dict[str, Tensor],
) -> None:
    """Write modules.json and the files of each module, beside the weights and processors in `folder`."""
    config = read_object(folder / "config.json") or {}
    is_static = config.get("model_type") == STATIC_TYPE
    name = description.traits.sentence_transformers
    backbone_type = TWO_TOWERS if name is None else MODULE + name
    modules = [("", MODULE + STATIC if is_static else backbone_type)]
    # The module of a static model gives the mean itself.
    if description.pooling != MODEL_POOLING and not is_static:
        pooling = POOLINGS[description.pooling]
        settings: dict[str, Any] = {"word_embedding_dimension": description.hidden_dim}
        pooling_type = POOLING_MODULE + pooling.name
        if pooling.modes:
            pooling_type = MODULE + "Pooling"
            known = {mode for other in POOLINGS.values() for mode in other.modes}
            for mode, flag in MODE_FLAGS.items():
                if mode in known:
                    settings[flag] = mode in pooling.modes
            settings["include_prompt"] = True
        modules.append(("1_Pooling", pooling_type))
        write_json(folder / "1_Pooling" / "config.json", settings)
        if pooling.is_trained:
            save_file(pooling_state, folder / "1_Pooling" / "model.safetensors")
        else:
            refuse_unclaimed(f"the pooling {pooling.name}", pooling_state)
    dense: Any
    for number, dense in enumerate(head or ()):
        path = f"{len(modules)}_Dense"
        modules.append((path, MODULE + "Dense"))
        write_json(folder / path / "config.json", dense.settings())
        weights = taken(head_state, f"{number}.")
        save_file(weights, folder / path / "model.safetensors")
    refuse_unclaimed("the head", head_state)
    if description.normalize:
        path = f"{len(modules)}_Normalize"
        modules.append((path, MODULE + "Normalize"))
        # Normalize has no file; modules.json names a folder for every module.
        (folder / path).mkdir()
    _write_modules(folder, modules)
    settings = {
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
    write_json(folder / "config_sentence_transformers.json", settings)
    settings = _backbone_settings(folder, description)
    write_json(folder / "sentence_bert_config.json", settings)


def write_reranker_layout(folder: Path, description: ModelDescription) -> None:
    """Write the files by which Sentence Transformers loads a CrossEncoder, beside weights and tokenizer."""
    modules = [("", "sentence_transformers.base.modules.transformer.Transformer")]
    text = {"method": "forward", "method_output_name": "logits"}
    settings: dict[str, Any] = {
        "transformer_task": "sequence-classification",
        "modality_config": {"text": text},
        "module_output_name": "scores",
    }
    prompts: dict[str, str] = {}
    if description.scores == "answer":
        settings["transformer_task"] = "text-generation"
        placeholder = ""
        message = {**text, "format": "flat"}
        settings["modality_config"]["message"] = message
        if description.traits.reads_chats:
            settings["transformer_task"] = "any-to-any"
            message["format"] = "structured"
            placeholder = image_placeholder(description)
        settings["module_output_name"] = "causal_logits"
        template = folder / "chat_template.jinja"
        template.write_text(pair_template(description, placeholder), encoding="utf-8")
        tokens = answer_tokens(load_tokenizer(description), description.name)
        modules.append(("1_LogitScore", LOGIT_SCORE))
        answers = {
            "true_token_id": tokens[1],
            "false_token_id": tokens[0],
            "module_input_name": "causal_logits",
        }
        write_json(folder / "1_LogitScore" / "config.json", answers)
        prompts = {"query": description.query_prompt}
    settings["max_seq_length"] = description.max_length
    write_json(folder / "sentence_bert_config.json", settings)
    _write_modules(folder, modules)
    card = {
        "model_type": "CrossEncoder",
        "activation_fn": "torch.nn.modules.activation.Sigmoid",
        "prompts": prompts,
        "default_prompt_name": None,
    }
    write_json(folder / "config_sentence_transformers.json", card)


def _write_modules(folder: Path, modules: Sequence[tuple[str, str]]) -> None:
    """Write modules.json. `modules`: folder and type of each."""
    entries = []
    for index, (path, kind) in enumerate(modules):
        entries.append({"idx": index, "name": str(index), "path": path, "type": kind})
    write_json(folder / "modules.json", entries)


def refuse_unclaimed(owner: str, state: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError if state is left that no part has written."""
    if state:
        raise RuntimeError(
            f"no part of a saved model takes this state of {owner}: {', '.join(state)}; save it with a part, or "
            "register it with persistent=False"
        )


def _backbone_settings(folder: Path, description: ModelDescription) -> dict[str, Any]:
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
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings["module_output_name"] = "token_embeddings"
    settings["modality_config"] = {"image": forward}
    if family.reads_chats:
        settings["modality_config"] = {
            "text": forward,
            "image": forward,
            "message": {**forward, "format": "structured"},
        }
        chat = load_chat_template(description, load_tokenizer(description))
        settings["processing_kwargs"] = {"chat_template": chat.options}
    elif family.pools_itself:
        pooled = {"method_output_name": "pooler_output"}
        settings["modality_config"] = {
            "text": {"method": "get_text_features", **pooled},
            "image": {"method": "get_image_features", **pooled},
        }
        settings["module_output_name"] = "sentence_embedding"
        if family.has_fixed_length:
            # The joint processor of version 6 would use its own defaults for SigLIP 2 with variable resolution.
            values = read_object(folder / "preprocessor_config.json")
            if values is None:
                values = read_object(folder / "processor_config.json") or {}
                values = values.get("image_processor", {})
            image = {}
            for key in {"max_num_patches", "patch_size"}.intersection(values):
                image[key] = values[key]
            # SigLIP was trained on texts padded to the full length, without a mask, and pools the last position.
            text = {"padding": "max_length", "max_length": description.max_length}
            settings["processing_kwargs"] = {"text": text, "image": image}
    elif description.pooling == MODEL_POOLING:
        forward["method_output_name"] = "pooler_output"
        settings["module_output_name"] = "sentence_embedding"
    return settings
