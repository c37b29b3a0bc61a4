"""Saving of models: a folder in the Sentence Transformers layout, written atomically."""

import functools
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from vembed.data.features import pair_template
from vembed.files import (
    sole_writer,
    sync,
    sync_folder,
    write_json,
    write_weight_checksums,
)
from vembed.models.adapters import has_adapters, merged_state, save_adapter
from vembed.models.building import empty_backbone
from vembed.models.custom.own_code import save_code
from vembed.models.embedding_model import EmbeddingModel, pop_with_prefix
from vembed.models.families.backbones import (
    STATIC_TYPE,
    StateDict,
    quiet_transformers,
    unwrapped_name,
)
from vembed.models.families.description import DESCRIPTION_FILE, ModelDescription
from vembed.models.families.model_files import (
    ANSWER_SETTINGS,
    POOLING_MODULE,
    STATIC,
    is_own,
    read_object,
)
from vembed.models.heads import answer_tokens, save_with_head
from vembed.models.poolings.table import MODE_FLAGS, MODEL_POOLING, POOLINGS
from vembed.models.processors import (
    image_placeholder,
    load_chat_template,
    load_tokenizer,
    save_processors,
)
from vembed.saving.card import Card, render_card

log = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
"""Subfolder with the adapter that was merged into the saved weights."""


def save_model(
    directory: Path,
    model: EmbeddingModel,
    state: StateDict,
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = True,
    card: Card | None = None,
) -> Path:
    """Write the model to `directory` and return its path. Called by one process (rank 0); no collective operations.

    `state` is the full (gathered) state dict of `model`, whose modules give class and settings only. Raise RuntimeError
    on state that no part of the layout takes. `dtype`: dtype of stored floating point weights (None: unchanged; float32 if
    a weight is too large for float16). Adapters are merged into the weights and also saved in `adapter/`; with
    `merge_adapters=False` the adapter is saved instead of the weights. The folder is renamed once it is complete.
    """
    # plain_name takes off what FSDP, compilation and recomputation put into names.
    state = {
        unwrapped_name(name): tensor.detach().cpu() for name, tensor in state.items()
    }
    description = model.description
    backbone: Any = model.backbone
    weights = pop_with_prefix(state, "backbone.")
    language_state = pop_with_prefix(state, "language_head.")
    pooling_state = pop_with_prefix(state, "pooling.")
    head_state = pop_with_prefix(state, "head.")
    refuse_unclaimed("the model", state)
    has_lora = has_adapters(backbone)
    family = description.family_traits
    # Adapters alone would lose scale, bias, projections, a head or a changed config, or other programs would use causal
    # attention, or mask parts of each image.
    is_more_than_adapters = (
        family.has_logit_scale_and_bias
        or family.is_composed
        or description.bidirectional_attention
        or description.is_reranker
        or bool(description.config_changes)
        or (model.language_head is not None and model.language_head.is_new)
        or "mask_ratio" in backbone.config.to_dict()
    )
    reason = "it has more than adapters" if is_more_than_adapters else ""
    if description.adapter is not None:
        reason = "it started from an adapter, which is merged into its weights"
    if reason and not merge_adapters:
        log.info("save_merged: the whole model is saved (%s)", reason)
        merge_adapters = True
    with replaced_folder(directory) as folder:
        if has_lora and merge_adapters:
            save_adapter(folder / ADAPTER_FOLDER, backbone, weights)
            weights = merged_state(backbone, weights)
            backbone = empty_backbone(description)
        elif has_lora:
            save_adapter(folder, backbone, weights)
            weights = {}
        if dtype == torch.float16:
            for name, tensor in weights.items():
                is_floating = tensor.is_floating_point() and tensor.numel() > 0
                if is_floating and tensor.abs().max() > torch.finfo(dtype).max:
                    log.warning(
                        "float16 cannot hold %s: the model is stored in float32",
                        name,
                    )
                    dtype = torch.float32
                    break
        for part in (weights, language_state, head_state, pooling_state):
            for name, tensor in part.items():
                if dtype is not None and tensor.is_floating_point():
                    part[name] = tensor.to(dtype)
        if weights:
            whole_head = language_state
            if description.is_reranker:
                whole_head = head_state
            _write_backbone(folder, description, backbone, weights, whole_head)
        if is_own(description.folder):
            save_code(description.folder, folder)
        save_processors(description, folder)
        if description.is_reranker:
            write_reranker_layout(folder, description)
        else:
            write_layout(
                folder,
                description,
                model.head,
                head_state,
                pooling_state,
            )
        write_json(folder / DESCRIPTION_FILE, description.to_dict())
        adapter_alone = has_lora and not merge_adapters
        text = render_card(description, card or Card(), adapter_alone=adapter_alone)
        (folder / "README.md").write_text(
            text, encoding="utf-8", errors="backslashreplace"
        )
    return directory


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `target` when the block ends without an exception. Of a link, the link is
    replaced: the folder that it names may hold other files."""
    target = target.parent.resolve() / target.name
    new = target.with_name(f".{target.name}.new")
    old = target.with_name(f".{target.name}.old")
    if new.is_dir():
        with sole_writer(new, target):
            shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    with sole_writer(new, target):
        # An earlier process was killed between the two renames below.
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        try:
            yield new
            write_weight_checksums(new)
        except BaseException as error:
            shutil.rmtree(new, ignore_errors=True)
            error.add_note(str(target))  # errors of a full disk name no file
            raise
        # Before the rename: after a power cut, the name implies complete files.
        sync_folder(new)
        # Rename, not copy: at any moment either the old or the new folder is complete under one of the two names.
        if target.is_symlink():
            target.unlink()
        if target.exists():
            target.rename(old)
        new.rename(target)
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def _write_backbone(
    folder: Path,
    description: ModelDescription,
    backbone: Any,
    state: StateDict,
    head: StateDict,
) -> None:
    """Write the weights and config.json. `head`: of a reranker or a language model, which is part of the weights."""
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    if isinstance(backbone, PreTrainedModel):
        # After gathering from shards, tied weights are separate tensors. Store one of them.
        for name, same in backbone.all_tied_weights_keys.items():
            if name in state and same in state:
                state[name] = state[same]
    with quiet_transformers():
        if description.is_reranker or head:
            save_with_head(folder, description, backbone.config, state, head)
        else:
            backbone.save_pretrained(folder, state_dict=state)
    # save_pretrained writes the module's dtype to config.json, and loading uses it. Write the widest stored dtype, so
    # that no stored weight is rounded at loading.
    widest = str(functools.reduce(torch.promote_types, dtypes)).removeprefix("torch.")
    # rglob: also the image tower's config.json of a composed model.
    for path in folder.rglob("config.json"):
        settings = read_object(path)
        settings["dtype"] = widest
        for inner in settings.values():
            if isinstance(inner, dict) and "dtype" in inner:
                inner["dtype"] = widest
        write_json(path, settings)


# ---- the Sentence Transformers layout: modules, their settings, prompts and modalities ---------------------------------


MODULE = "sentence_transformers.models."
"""Module path that Sentence Transformers 3 to 6 all resolve."""
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
TWO_TOWERS = "vembed.models.two_towers.TwoTowers"
"""First module of a composed model. Sentence Transformers rejects it instead of loading the text tower alone."""


def write_layout(
    folder: Path,
    description: ModelDescription,
    head: Any,
    head_state: StateDict,
    pooling_state: StateDict,
) -> None:
    """Write modules.json and the files of each module, beside the weights and processors in `folder`. `head`: Dense modules
    in sequence, or None."""
    config = read_object(folder / "config.json")
    is_static = config.get("model_type") == STATIC_TYPE
    name = description.family_traits.sentence_transformers
    backbone_type = TWO_TOWERS if name is None else MODULE + name
    modules = [("", MODULE + STATIC if is_static else backbone_type)]
    # The module of a static model gives the mean itself.
    if description.pooling != MODEL_POOLING and not is_static:
        pooling = POOLINGS[description.pooling]
        settings: dict[str, Any] = {"word_embedding_dimension": description.hidden_dim}
        pooling_type = POOLING_MODULE + pooling.name
        if pooling.modes:
            pooling_type = MODULE + "Pooling"
            for mode, flag in MODE_FLAGS.items():
                settings[flag] = mode in pooling.modes
            settings["include_prompt"] = True
        modules.append(("1_Pooling", pooling_type))
        write_json(folder / "1_Pooling" / "config.json", settings)
        if pooling.is_trained:
            save_file(pooling_state, folder / "1_Pooling" / "model.safetensors")
        else:
            refuse_unclaimed(f"the pooling {pooling.name}", pooling_state)
    for number, dense in enumerate(head or ()):
        path = f"{len(modules)}_Dense"
        modules.append((path, MODULE + "Dense"))
        write_json(folder / path / "config.json", dense.settings())
        weights = pop_with_prefix(head_state, f"{number}.")
        save_file(weights, folder / path / "model.safetensors")
    refuse_unclaimed("the head", head_state)
    if description.normalize:
        path = f"{len(modules)}_Normalize"
        modules.append((path, MODULE + "Normalize"))
        # Normalize has no file; modules.json names a folder for every module.
        (folder / path).mkdir()
    write_modules(folder, modules)
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
    prompts = {"query": description.query_prompt}
    # The chat template of a decoder that answers has the instruction.
    default_prompt_name = None
    if description.scores == "label" and description.query_prompt:
        default_prompt_name = "query"
    if description.scores == "answer":
        settings["transformer_task"] = "text-generation"
        placeholder = ""
        message = {**text, "format": "flat"}
        settings["modality_config"]["message"] = message
        if description.family_traits.is_vision_language:
            settings["transformer_task"] = "any-to-any"
            message["format"] = "structured"
            placeholder = image_placeholder(description)
        settings["module_output_name"] = "causal_logits"
        template = folder / "chat_template.jinja"
        template.write_text(pair_template(description, placeholder), encoding="utf-8")
        tokens = answer_tokens(description)
        modules.append(("1_LogitScore", LOGIT_SCORE))
        answers = {
            "true_token_id": tokens[1],
            "false_token_id": tokens[0],
            "module_input_name": "causal_logits",
        }
        write_json(folder / ANSWER_SETTINGS, answers)
    settings["max_seq_length"] = description.max_length
    write_json(folder / "sentence_bert_config.json", settings)
    write_modules(folder, modules)
    card = {
        "model_type": "CrossEncoder",
        "activation_fn": _activation(description.folder),
        "prompts": prompts,
        "default_prompt_name": default_prompt_name,
    }
    write_json(folder / "config_sentence_transformers.json", card)


def _activation(source: Path) -> str:
    """Return the path of the function of the scores that CrossEncoder gives: that of the files in `source`, where they
    name one."""
    settings = read_object(source / "config_sentence_transformers.json")
    config = read_object(source / "config.json")
    # CrossEncoder writes the first since version 6, and read the last before version 4.
    activation = (
        settings.get("activation_fn")
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    return str(activation or "torch.nn.modules.activation.Sigmoid")


def write_modules(folder: Path, modules: Sequence[tuple[str, str]]) -> None:
    """Write modules.json. `modules`: folder and type of each."""
    entries = []
    for index, (path, kind) in enumerate(modules):
        entries.append({"idx": index, "name": str(index), "path": path, "type": kind})
    write_json(folder / "modules.json", entries)


def refuse_unclaimed(owner: str, state: StateDict) -> None:
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
    family = description.family_traits
    if family.reads_only_text or family.is_composed:
        return {"max_seq_length": description.max_length, "do_lower_case": False}
    # Keys of version 6, whose Transformer module runs `method` of the backbone for each modality and pools
    # `method_output_name` of what it gives.
    settings: dict[str, Any] = {"transformer_task": "feature-extraction"}
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings["module_output_name"] = "token_embeddings"
    settings["modality_config"] = {"image": forward}
    if family.is_vision_language:
        settings["modality_config"] = {
            "text": forward,
            "image": forward,
            "message": {**forward, "format": "structured"},
        }
        _, options = load_chat_template(description, load_tokenizer(description))
        settings["processing_kwargs"] = {"chat_template": options}
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
            if not values:
                values = read_object(folder / "processor_config.json")
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
