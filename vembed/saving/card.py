"""The model card (README.md) of a saved model: description, usage, training data, settings and scores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vembed.models.custom.folder import own_class
from vembed.models.families.description import ModelDescription
from vembed.names import short_name
from vembed.saving.masking import is_secret, masked

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
_LOCAL_PATH = re.compile(r"(?<![\w.:/~])[/~][^\s:,;)]*/")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FOLDER_IN_CALLS = "path/to/this/folder"
"""Stands for the model's folder in the calls."""


@dataclass(frozen=True)
class Card:
    """Facts about a run for the model card, in addition to the model's description."""

    data: tuple[str, ...] = ()
    """One line per source of training data."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from their defaults. Secrets and local folders are removed."""
    scores: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    """The same metrics before training."""
    evaluation: str = ""
    """Sizes of the evaluation data."""
    num_steps: int | None = None
    language: str | None = None
    """Language of the training data; "" where it is unclear and not English, None where it was not looked at."""
    versions: Mapping[str, str] = field(default_factory=dict)


def render_card(
    description: ModelDescription, card: Card, *, adapter_alone: bool = False
) -> str:
    """Return the full README.md: YAML front matter for the Hub, then the text.

    `adapter_alone`: the folder has an adapter and no other weights.
    """
    name = base_model_name(description)
    origin = f"`{_local_model(description)}`, a folder on the machine of the run"
    if name is not None:
        origin = f"[{name}](https://huggingface.co/{name})"
    kind = "Embedding model" if description.scores is None else "Reranker"
    sections = [
        "---\n" + yaml.safe_dump(_metadata(description, card), sort_keys=False) + "---",
        f"# {kind}\n\nTuned by vembed from {origin}.",
        markdown_table(("", ""), _properties(description)),
    ]
    if adapter_alone:
        sections.append(
            "This folder holds an adapter (LoRA) alone; the model below it is read from where `adapter_config.json` says. "
            "`vembed export <folder> --merge` makes one model of both."
        )
        if description.quantized:
            sections[-1] += (
                " The weights below were held in 4 bits while the adapter was trained. vembed rounds them in the same "
                "way; other programs take them as they are, and give slightly different embeddings unless the model is "
                "merged."
            )
    sections += _usage(description)
    if card.scores:
        header = ("metric", "before", "after") if card.before else ("metric", "score")
        rows = []
        for key, value in card.scores.items():
            before = f"{card.before[key]:.4f}" if key in card.before else ""
            after = f"{value:.4f}"
            rows.append((key, before, after) if card.before else (key, after))
        sections += ["## Scores", markdown_table(header, rows)]
    if card.data:
        lines = [f"- {masked(_without_folders(line))}" for line in card.data]
        sections += ["## Training data", "\n".join(lines)]
    settings = []
    for key, value in card.settings.items():
        if key in _NOT_SHOWN or is_secret(key):
            continue
        is_folder = (
            key in _MODELS and isinstance(value, str) and _LOCAL_PATH.match(value)
        )
        # Of a local folder the part that identifies the model.
        text = short_name(value) if is_folder else _option_text(value)
        settings.append((key, masked(text)))
    if card.num_steps is not None:
        settings.append(("steps done", f"{card.num_steps:,d}"))
    if settings:
        table = markdown_table(("option", "value"), settings)
        sections += ["## Training settings", table]
    if card.versions:
        versions = [f"{name} {version}" for name, version in card.versions.items()]
        sections += ["## Versions", ", ".join(versions)]
    return "\n\n".join(sections) + "\n"


def _metadata(description: ModelDescription, card: Card) -> dict[str, Any]:
    """Return the front matter of the card. A tuned model has the licence of its base model."""
    is_text_only = description.modalities == ("text",)
    front: dict[str, Any] = {
        "library_name": "vembed",
        "tags": ["feature-extraction", "vembed"],
        "pipeline_tag": "sentence-similarity" if is_text_only else "feature-extraction",
    }
    is_reranker = description.scores is not None
    if is_reranker:
        front["tags"] = ["cross-encoder", "reranker", "vembed"]
        front["pipeline_tag"] = "text-ranking"
    if description.traits.sentence_transformers is not None:
        front["library_name"] = "sentence-transformers"
        front["tags"].insert(0, "sentence-transformers")
    name = base_model_name(description)
    if name is not None:
        front["base_model"] = name
    path = Path(description.source, "README.md")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    base: Any = None
    if text.startswith("---\n"):
        with suppress(yaml.YAMLError):
            base = yaml.safe_load(text[4:].partition("\n---")[0])
    for key in ("license", "license_name", "license_link", "language"):
        if isinstance(base, dict) and key in base:
            front[key] = base[key]
    if card.language is not None:
        languages = front.pop("language", [])
        languages = [languages] if isinstance(languages, str) else list(languages)
        # A model of many languages keeps them. One of another language was trained to this one.
        if card.language and card.language not in languages:
            languages = card.language
        if card.language or len(languages) > 1:
            front["language"] = languages
    if card.scores:
        # The form in which the Hub shows scores.
        task = "Reranking" if is_reranker else "Retrieval"
        if "spearman" in card.scores:
            task = "STS"
        metrics = [
            {"type": key.replace("@", "_at_"), "name": key, "value": round(value, 5)}
            for key, value in card.scores.items()
            if "/" not in key
        ]
        data = {"name": card.evaluation or "validation data", "type": "validation"}
        result = {"task": {"type": task}, "dataset": data, "metrics": metrics}
        kind = "reranker" if is_reranker else "embedding model"
        name = f"{kind} tuned by vembed"
        front["model-index"] = [{"name": name, "results": [result]}]
    return front


def calls_of(card: str, folder: str) -> list[str]:
    """Return the calls in a card's section on usage, one text for each library, with `folder` as the model's folder."""
    section = card.partition("\n## Usage\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)\n```", section, re.DOTALL)
    return [block.replace(FOLDER_IN_CALLS, folder) for block in blocks]


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
    pooling: str = description.pooling
    if pooling == "own":
        pooling = "the model's own projected features"
    inputs = "text and images"
    if "multimodal" in description.modalities:
        inputs = "text, images, or both together"
    elif len(description.modalities) == 1:
        inputs = "text" if description.traits.reads_text else "images"
    rows = [
        ("Embedding size", f"{description.embedding_dim:,d}"),
        ("Inputs", inputs),
        ("Longest text", f"{description.max_length:,d} tokens"),
        ("Pooling", pooling),
        ("Similarity", description.similarity),
    ]
    if description.scores is not None:
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


def _usage(description: ModelDescription) -> list[str]:
    # The examples must be inputs that the model takes: without a text tower an image stands for the query too.
    query = '"a query"' if "text" in description.modalities else '"query.jpg"'
    is_text_only = description.modalities == ("text",)
    document = '"a document"' if is_text_only else '"document.jpg"'
    blocks = ["## Usage"]
    if description.scores is not None:
        return [*blocks, *_reranker_calls(description)]
    code_class = own_class(Path(description.source))
    trust = ""
    if code_class is not None:
        trust = ", trust_remote_code=True"
        blocks.append(
            f"This folder brings Python code of its own: the class `{code_class}`. It runs where the model is loaded, "
            "so read it before you set `trust_remote_code=True`."
        )
    if description.traits.sentence_transformers is not None:
        blocks += [
            "```python\n"
            "from sentence_transformers import SentenceTransformer\n\n"
            f'model = SentenceTransformer("{FOLDER_IN_CALLS}"{trust})\n'
            f"queries = model.encode_query([{query}])\n"
            f"documents = model.encode_document([{document}])\n"
            "print(model.similarity(queries, documents))\n"
            "```",
            "or, without Sentence Transformers:",
        ]
    else:
        reason = "one module of its own takes texts and images"
        if description.traits.has_two_models:
            reason = "it has two towers that were not made for each other"
        blocks.append(f"Sentence Transformers cannot load this model: {reason}.")
    if "jpg" in query:
        query = f'{{"image": {query}}}'
    if "jpg" in document:
        document = f'{{"image": {document}}}'
    blocks.append(
        "```python\n"
        "import vembed\n\n"
        f'model = vembed.Embedder("{FOLDER_IN_CALLS}"{trust})\n'
        f'queries = model.encode([{query}], kind="query")\n'
        f'documents = model.encode([{document}], kind="document")\n'
        "```"
    )
    return blocks


def _reranker_calls(description: ModelDescription) -> list[str]:
    blocks = [
        "```python\n"
        "import vembed\n\n"
        f'model = vembed.Reranker("{FOLDER_IN_CALLS}")\n'
        'print(model.rank("a query", ["a document", "another one"]))\n'
        "```"
    ]
    if description.modalities == ("text",):
        blocks += [
            "or, without vembed:",
            "```python\n"
            "from sentence_transformers import CrossEncoder\n\n"
            f'model = CrossEncoder("{FOLDER_IN_CALLS}")\n'
            'print(model.rank("a query", ["a document", "another one"]))\n'
            "```",
        ]
    return blocks


def _option_text(value: Any) -> str:
    """Return a setting as text. Paths are reduced to their last part."""
    if isinstance(value, str):
        return _without_folders(value)
    if isinstance(value, Mapping):
        texts = []
        for key, inner in value.items():
            if not is_secret(str(key)):
                texts.append(f"{key}: {_option_text(inner)}")
        return ", ".join(texts)
    if isinstance(value, list | tuple):
        return ", ".join(map(_option_text, value))
    return str(value)


def _without_folders(text: str) -> str:
    return _LOCAL_PATH.sub("", text.rstrip("/"))


def markdown_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
