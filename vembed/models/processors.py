"""What turns raw inputs into a model's inputs: tokenizer, image processor and chat template, loaded and set up in the
one way that all parts share, and saved with the model."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerBase

from vembed.errors import UserError
from vembed.models.description import IMAGE_TOWER_FOLDER, ModelDescription
from vembed.models.sources import read_json

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""What a processor consists of besides its tokenizer and its chat template."""
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class ChatTemplate:
    """How a vision-language model's messages become one text."""

    template: str
    options: dict[str, Any]
    """What the template is called with."""


def load_tokenizer(description: ModelDescription) -> PreTrainedTokenizerBase:
    """The model's tokenizer with the description's length and padding side, and with a padding token."""
    source = description.source
    try:
        # Given here and not set afterwards, or saving the tokenizer would leave them out.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source,
            trust_remote_code=description.trust_remote_code,
            model_max_length=description.max_length,
            padding_side=description.padding_side,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"the tokenizer of {source} cannot be loaded: {_first_line(error)}") from error
    if description.family == "siglip":
        # SigLIP was trained without a mask over its padding; saying so keeps other programs from making one.
        tokenizer.model_input_names = ["input_ids"]
    if tokenizer.pad_token is None:
        # Padding is masked everywhere, so which token it is does not matter; that there is one does.
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {source} has neither a padding nor an end token; add `pad_token` to it")
        tokenizer.pad_token = tokenizer.eos_token
    settings = read_json(Path(source, "sentence_bert_config.json")) or {}
    if tokenizer.is_fast and settings.get("do_lower_case", False):
        _add_lowercase(tokenizer)
    return tokenizer


def load_image_processor(description: ModelDescription) -> Any:
    """The model's image processor, with the description's limits of an image's area."""
    source = description.image_source or description.source
    try:
        processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=description.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"the image processor of {source} cannot be loaded: {_first_line(error)}") from error
    if description.family == "vision_language":
        processor.size = {
            "shortest_edge": description.min_pixels or processor.size["shortest_edge"],
            "longest_edge": description.max_pixels or processor.size["longest_edge"],
        }
        smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
        if smallest > largest:
            raise UserError(
                f"min_pixels is {smallest:,d} and max_pixels {largest:,d}: set min_pixels to at most max_pixels"
            )
    return processor


def load_chat_template(description: ModelDescription, tokenizer: Any) -> ChatTemplate:
    """The folder's chat template, and how Sentence Transformers calls it.

    Vision-language embedders pool over an end-of-text token behind the opened answer. A folder whose Sentence
    Transformers files know chats is taken as it is; for any other the answer is opened, and the token, where the
    tokenizer does not add one by itself, becomes part of the template.
    """
    folder = Path(description.source)
    old_file = read_json(folder / "chat_template.json") or {}
    template = old_file.get("chat_template") or tokenizer.chat_template
    if not isinstance(template, str):
        raise UserError(f"{folder} has no chat template, which a vision-language model needs; add chat_template.jinja")
    settings = read_json(folder / "sentence_bert_config.json") or {}
    if "message" in settings.get("modality_config", {}):
        options = dict((settings.get("processing_kwargs") or {}).get("chat_template") or {})
        return ChatTemplate(template, {key: value for key, value in options.items() if key != "restore_suffix"})
    adds_token = len(tokenizer("a", add_special_tokens=True)["input_ids"]) > len(tokenizer.tokenize("a"))
    end = END_OF_TEXT if END_OF_TEXT in tokenizer.get_vocab() else tokenizer.eos_token
    if not adds_token and end is not None:
        template = template.removesuffix("\n") + "{{- '" + end + "' }}"
    return ChatTemplate(template, {"add_generation_prompt": True})


def save_processors(description: ModelDescription, folder: Path) -> None:
    """Write what the model's inputs are made with into its saved folder, set up as it was used."""
    if "text" in description.lanes:
        tokenizer = load_tokenizer(description)
        if description.family == "vision_language":
            tokenizer.chat_template = load_chat_template(description, tokenizer).template
        tokenizer.save_pretrained(folder)
        _write_for_all_versions(folder / "tokenizer_config.json")
    if description.lanes != ("text",):
        target = folder / IMAGE_TOWER_FOLDER if description.image_source else folder
        _copy_image_processor(description, target)


def _write_for_all_versions(path: Path) -> None:
    """Transformers 5 renamed things that version 4, which Sentence Transformers 3 to 5.1 run on, looks for; version 5
    reads the old names as well."""
    values = read_json(path)
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    for key in ("backend", "is_local", "local_files_only"):
        values.pop(key, None)
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_image_processor(description: ModelDescription, folder: Path) -> None:
    """The files as they are, since not every machine can load all that they describe (videos), but for the limits of
    an image's area."""
    folder.mkdir(exist_ok=True)
    source = Path(description.image_source or description.source)
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if description.min_pixels is None and description.max_pixels is None:
        return
    size = dict(load_image_processor(description).size)
    for name in PROCESSOR_FILES[:2]:
        values = read_json(folder / name) or {}
        settings = values.get("image_processor", {}) if name == "processor_config.json" else values
        if not settings:
            continue
        for old_name in ("min_pixels", "max_pixels"):
            settings.pop(old_name, None)
        settings["size"] = size
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _add_lowercase(tokenizer: Any) -> None:
    """Sentence Transformers' `do_lower_case`, made part of the tokenizer so that it is saved with it."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    steps: list[Any] = [normalizer] if normalizer else []
    if isinstance(normalizer, NormalizerSequence):
        steps = [normalizer[at] for at in range(len(normalizer))]
    if not any(isinstance(step, Lowercase) for step in steps):
        tokenizer.backend_tokenizer.normalizer = NormalizerSequence([Lowercase(), *steps])


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
