"""The model card (README.md) of a saved model: description, usage, training data, settings and scores."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml
from huggingface_hub import metadata_load

from vembed.config.loading import one_line_yaml
from vembed.errors import is_secret, masked, masked_option
from vembed.evaluation.report.page import render_page
from vembed.evaluation.report.record import RunSummary
from vembed.files import short_name
from vembed.models.families.description import ModelDescription
from vembed.models.families.model_files import read_object

_NOT_SHOWN = {
    "output_dir",
    "run_name",
    "log_file",
    "report_to",
    "wandb_project",
    "wandb_tags",
    "debug",
    "resume",
    "image_root",
}
"""Options that do not describe the model."""
_MODELS = {"model_name", "image_model_name"}
# From a leading `/` or `~` to the last slash of the word, which leaves the file's name. The look-behind leaves
# addresses (`https://host/x`) and relative paths (`data/x`) alone.
_LOCAL_PATH = re.compile(r"(?<![\w.:/~])[/~][^\s:,;)]*/(?=[^\s:,;)\]'])")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FOLDER_IN_CALLS = "path/to/this/folder"
"""Stands for the model's folder in the calls."""


@dataclass(frozen=True)
class Card:
    """Facts about a run for the model card, in addition to the model's description."""

    summary: RunSummary = field(default_factory=RunSummary)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from their defaults. Secrets and local folders are removed."""
    scores: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    """The same metrics before training."""


def render_card(
    description: ModelDescription,
    card: Card,
    *,
    adapter_alone: bool = False,
) -> str:
    """Return the full README.md: YAML front matter for the Hub, then the text.

    `adapter_alone`: the folder has an adapter and no other weights.
    """
    # Of an own model it names the class.
    config = read_object(description.folder / "config.json")
    scores = []
    for key, value in card.scores.items():
        row = [key, f"{value:.4f}"]
        if card.before:
            row.insert(1, f"{card.before[key]:.4f}" if key in card.before else "")
        scores.append(row)
    settings = []
    for key, value in card.settings.items():
        if key in _NOT_SHOWN or is_secret(key):
            continue
        text = _without_folders(one_line_yaml(masked_option(key, value)))
        if key in _MODELS and _LOCAL_PATH.match(str(value)):
            # Of a local folder the part that identifies the model.
            text = short_name(str(value))
        settings.append((key, text))
    summary = card.summary
    if summary.num_steps is not None:
        settings.append(("steps done", f"{summary.num_steps:,d}"))
    return render_page(
        "card.md.j2",
        front=yaml.safe_dump(_metadata(description, card), sort_keys=False),
        description=description,
        card=card,
        base=base_model_name(description),
        local_name=_local_model(description),
        properties=_properties(description),
        adapter_alone=adapter_alone,
        code_class=config.get("class_name"),
        folder=FOLDER_IN_CALLS,
        scores=scores,
        data=[masked(_without_folders(line)) for line in summary.data],
        settings=settings,
    )


def _metadata(description: ModelDescription, card: Card) -> dict[str, Any]:
    """Return the front matter of the card. A tuned model has the licence of its base model."""
    is_text_only = description.modalities == ("text",)
    front: dict[str, Any] = {
        "library_name": "vembed",
        "tags": ["feature-extraction", "vembed"],
        "pipeline_tag": "sentence-similarity" if is_text_only else "feature-extraction",
    }
    if description.is_reranker:
        front["tags"] = ["cross-encoder", "reranker", "vembed"]
        front["pipeline_tag"] = "text-ranking"
    if description.family_traits.sentence_transformers is not None:
        front["library_name"] = "sentence-transformers"
        front["tags"].insert(0, "sentence-transformers")
    name = base_model_name(description)
    if name is not None:
        front["base_model"] = name
    base = None
    with suppress(OSError, ValueError, yaml.YAMLError):
        base = metadata_load(description.folder / "README.md")
    for key in ("license", "license_name", "license_link", "language"):
        if base is not None and key in base:
            front[key] = base[key]
    # A model of many languages keeps them. One of another language was trained to this one.
    known = front.get("language", [])
    language = card.summary.language
    if language and language not in known:
        front["language"] = language
    elif language == "" and isinstance(known, str):
        del front["language"]
    if card.scores:
        # The form in which the Hub shows scores.
        task = "Reranking" if description.is_reranker else "Retrieval"
        if "spearman" in card.scores:
            task = "STS"
        metrics = [
            {"type": key.replace("@", "_at_"), "name": key, "value": round(value, 5)}
            for key, value in card.scores.items()
            if "/" not in key
        ]
        evaluation, _, _ = card.summary.evaluation.partition(", from")
        data = {"name": evaluation or "validation data", "type": "validation"}
        result = {"task": {"type": task}, "dataset": data, "metrics": metrics}
        front["model-index"] = [{"name": "tuned by vembed", "results": [result]}]
    return front


def base_model_name(description: ModelDescription) -> str | None:
    """Return the Hub name of the base model; None for a local folder, whose path must not be published."""
    name = description.name
    is_local = not name or name == description.source or name.startswith(".")
    return None if is_local or not _HUB_NAME.fullmatch(name) else name


def _local_model(description: ModelDescription) -> str:
    """Return the part of a folder's path that identifies the model: the rest must not be published."""
    return short_name(masked(description.name or description.source))


def properties_of(description: ModelDescription) -> list[str]:
    """Return a model's name and the properties that its users need, one line each, as the card has them."""
    name = base_model_name(description) or _local_model(description)
    return [name, *(f"{key}: {value}" for key, value in _properties(description))]


def _properties(description: ModelDescription) -> list[tuple[str, str]]:
    inputs = " and ".join(description.modalities)
    if "multimodal" in description.modalities:
        inputs = "text, images, or both together"
    rows = [
        ("Embedding size", f"{description.output_dim:,d}"),
        ("Inputs", inputs),
        ("Longest text", f"{description.max_length:,d} tokens"),
        ("Pooling", description.pooling),
        ("Similarity", description.similarity),
    ]
    if description.is_reranker:
        score = "the logit of one label"
        if description.scores == "answer":
            score = "the logit of `yes` less that of `no`"
        rows = [
            ("Score", score),
            ("Inputs", f"a query and a document: {inputs}"),
            ("Longest pair", f"{description.max_length:,d} tokens"),
        ]
    if description.mrl_dims:
        sizes = ", ".join(f"{size:,d}" for size in description.mrl_dims)
        note = "the first coordinates are an embedding by themselves"
        rows.append(("Matryoshka sizes", f"{sizes} ({note})"))
    for kind, prompt in (
        ("Query prompt", description.query_prompt),
        ("Document prompt", description.document_prompt),
    ):
        if prompt:
            text = prompt.replace("\n", "\\n").replace("`", "'")
            rows.append((kind, f"`{text}`"))
    return rows


def _without_folders(text: str) -> str:
    return _LOCAL_PATH.sub("", text.rstrip("/"))
