"""Tokenizer, image processor and chat template of a model: loading, set-up and saving."""

import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerBase

from vembed.errors import UserError
from vembed.files import write_json
from vembed.models.families.backbones import POSITIONS_AFTER_PADDING, quiet_transformers
from vembed.models.families.description import IMAGE_TOWER_FOLDER, ModelDescription
from vembed.models.families.model_files import (
    LIBRARY_ERRORS,
    error_sentence,
    has_tokenizer_files,
    is_own,
    read_object,
    tokenizer_folder,
)

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a processor besides its tokenizer and chat template."""
END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(description: ModelDescription) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer with the description's maximum length and padding side, and a padding token. Raise
    UserError for a tokenizer of another model."""
    source = tokenizer_folder(description.folder, description.adapter)
    # Pass these at loading: set later, they would be missing from the saved tokenizer.
    options: dict[str, Any] = {
        "model_max_length": description.max_length,
        "padding_side": description.padding_side,
    }
    if description.family_traits.has_fixed_length:
        # SigLIP was trained without an attention mask; this keeps other programs from creating one.
        options["model_input_names"] = ["input_ids"]
    tokenizer = open_tokenizer(
        source, trust_remote_code=description.trust_remote_code, **options
    )
    folder = description.folder
    values = read_object(folder / "config.json")
    values = values.get("text_config") or values
    num_rows = values.get("vocab_size") or math.inf
    # Added tokens may be beyond the rows of the embedding matrix: they may never occur.
    vocabulary = tokenizer.get_vocab().items() - tokenizer.get_added_vocab().items()
    largest = max((number for _, number in vocabulary), default=0)
    if largest >= num_rows:
        raise UserError(
            f"the tokenizer of {source} has tokens up to number {largest:,d}, and config.json has vocab_size "
            f"{num_rows:,d}: one of the two is of another model; copy the model again"
        )
    numbers = {}
    for name in ("pad", "bos", "eos", "cls", "sep"):
        key = f"{name}_token_id"
        if isinstance(values.get(key), int) and not is_own(folder):
            numbers[key] = values[key]
    added = tokenizer.added_tokens_decoder.items()
    special = {number for number, token in added if token.special}
    special.update(tokenizer.all_special_ids)
    is_other = bool(special and numbers) and not special & set(numbers.values())
    if values.get("model_type") in POSITIONS_AFTER_PADDING:
        # Positions count from the padding token.
        is_other |= numbers.get("pad_token_id", 1) != tokenizer.pad_token_id
    if is_other:
        raise UserError(
            f"the tokenizer of {source} does not belong to the model in {folder}: its special tokens are "
            f"{sorted(special)[:8]}, and config.json has {numbers}; copy the tokenizer of that model"
        )
    # A padding token that somebody has added may have no row.
    has_row = tokenizer.pad_token is not None and tokenizer.pad_token_id < num_rows
    if not has_row and tokenizer.eos_token is not None:
        # Any token serves as padding, since padding is masked everywhere.
        tokenizer.pad_token = tokenizer.eos_token
    settings = read_object(source / "sentence_bert_config.json")
    if tokenizer.is_fast and settings.get("do_lower_case", False):
        # In the normalizer, so that it is saved with the tokenizer.
        backend: Any = tokenizer.backend_tokenizer
        steps = [Lowercase()]
        if backend.normalizer is not None:
            steps.append(backend.normalizer)
        # Once more does no harm.
        backend.normalizer = NormalizerSequence(steps)
    return tokenizer


def open_tokenizer(
    folder: Path,
    *,
    trust_remote_code: bool,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder. Raise UserError if the folder has none, where Transformers makes an empty one
    that maps every text to unknown tokens."""
    if not has_tokenizer_files(folder):
        raise UserError(
            f"no tokenizer files in {folder}: copy them (tokenizer.json, tokenizer_config.json) from the model that the "
            "weights come from"
        )
    try:
        # Transformers does not know the model type of an own model, and warns of it.
        with quiet_transformers() if is_own(folder) else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, **options
            )
    except Exception as error:
        # The tokenizers library raises plain Exception for files that it cannot use.
        if type(error) is not Exception and not isinstance(error, LIBRARY_ERRORS):
            raise
        raise UserError(
            f"the tokenizer of {folder} cannot be loaded: {error_sentence(error)}"
        ) from error
    return tokenizer


def load_image_processor(description: ModelDescription) -> Any:
    """Return the model's image processor with the description's limits on the image area."""
    source = description.image_folder
    try:
        processor = AutoImageProcessor.from_pretrained(
            source, trust_remote_code=description.trust_remote_code
        )
    except LIBRARY_ERRORS as error:
        raise UserError(
            f"the image processor of {source} cannot be loaded: {error_sentence(error)}"
        ) from error
    if description.family_traits.is_vision_language:
        smallest = description.min_pixels or processor.size["shortest_edge"]
        largest = description.max_pixels or processor.size["longest_edge"]
        processor.size = {"shortest_edge": smallest, "longest_edge": largest}
        if smallest > largest:
            raise UserError(
                f"min_pixels is {smallest:,d} and max_pixels {largest:,d}: set min_pixels to at most max_pixels"
            )
    return processor


def load_chat_template(
    description: ModelDescription, tokenizer: Any
) -> tuple[str, dict[str, Any]]:
    """Return the folder's chat template and the arguments that Sentence Transformers calls it with.

    Vision-language embedders pool over an end-of-text token after the generation prompt. A folder whose Sentence
    Transformers files define messages is used unchanged. Otherwise the generation prompt is added, and the end-of-text
    token becomes part of the template unless the tokenizer adds it.
    """
    folder = tokenizer_folder(description.folder, description.adapter)
    old_file = read_object(folder / "chat_template.json")
    template = old_file.get("chat_template") or tokenizer.chat_template
    if not isinstance(template, str):
        raise UserError(
            f"{folder} has no chat template, which a vision-language model needs; add chat_template.jinja"
        )
    settings = read_object(folder / "sentence_bert_config.json")
    if "message" in settings.get("modality_config", {}):
        options = (settings.get("processing_kwargs") or {}).get("chat_template") or {}
        options.pop("restore_suffix", None)
        return template, options
    adds_token = len(tokenizer("a")["input_ids"]) > len(tokenizer.tokenize("a"))
    end = END_OF_TEXT if END_OF_TEXT in tokenizer.get_vocab() else tokenizer.eos_token
    if not adds_token and end is not None:
        template = template.removesuffix("\n") + "{{- '" + end + "' }}"
    return template, {"add_generation_prompt": True}


def image_placeholder(description: ModelDescription) -> str:
    """Return what stands for an image in the conversations of a vision-language model."""
    config = read_object(description.folder / "config.json")
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    tokenizer = load_tokenizer(description)
    return "".join(tokenizer.convert_ids_to_tokens([config[name] for name in names]))


def save_processors(description: ModelDescription, folder: Path) -> None:
    """Save tokenizer and image processor into the model's folder, with the settings that were used."""
    if "text" in description.modalities:
        tokenizer = load_tokenizer(description)
        if description.family_traits.is_vision_language:
            tokenizer.chat_template, _ = load_chat_template(description, tokenizer)
        if tokenizer.is_fast:
            # For readers of tokenizer.json alone. Transformers sets both in each call.
            backend = tokenizer.backend_tokenizer
            backend.enable_truncation(
                description.max_length, direction=tokenizer.truncation_side
            )
            backend.no_padding()
        tokenizer.save_pretrained(folder)
        # The key names of Transformers 4 (used by Sentence Transformers 3 to 5.1); version 5 reads them as well.
        path = folder / "tokenizer_config.json"
        values = read_object(path)
        if values.get("tokenizer_class") == "TokenizersBackend":
            values["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(values.get("extra_special_tokens"), list):
            values["additional_special_tokens"] = values.pop("extra_special_tokens")
        # max_length: that of the truncation in the tokenizer.json that was read.
        for key in ("backend", "is_local", "local_files_only", "max_length"):
            values.pop(key, None)
        write_json(path, values)
    if description.modalities != ("text",):
        target = folder / IMAGE_TOWER_FOLDER if description.image_source else folder
        _copy_image_processor(description, target)


def _copy_image_processor(description: ModelDescription, folder: Path) -> None:
    """Copy the processor files, with this run's limits on the image area.

    They are copied, not saved from a loaded processor: not every machine can load all of them (videos).
    """
    folder.mkdir(exist_ok=True)
    source = description.image_folder
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if description.min_pixels is None and description.max_pixels is None:
        return
    size = dict(load_image_processor(description).size)
    for name in PROCESSOR_FILES[:2]:
        values = read_object(folder / name)
        settings = values.get("image_processor", values)
        if not settings:
            continue
        for old_name in ("min_pixels", "max_pixels"):
            settings.pop(old_name, None)
        settings["size"] = size
        write_json(folder / name, values)
