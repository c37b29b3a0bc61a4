"""Encoders: what turns items into vectors, by vembed or by Sentence Transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache

from vembed.config.fsdp import Precision
from vembed.config.resolved import Decision
from vembed.data.cache import short_hash
from vembed.data.examples import Item, Kind
from vembed.data.features import Featuriser
from vembed.errors import UserError
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import encode_items
from vembed.mining.config import ModelOptions, Retriever
from vembed.mining.vectors import DTYPES
from vembed.models.families.model_files import model_folder
from vembed.models.families.weight_files import check_no_pickles
from vembed.parallel.placement import precision_of_use
from vembed.parallel.session import Session

Encode = Callable[[Sequence[Item], Kind], np.ndarray]
"""Gives [n, d] float32 vectors whose dot product is the model's similarity."""


def _load_vembed(
    retriever: Retriever,
    options: ModelOptions,
    device: torch.device,
    precision: Precision,
) -> Encode:
    embedder = Embedder(
        retriever.model,
        device=device,
        torch_dtype=options.torch_dtype,
        mixed_precision="bf16" if precision == "bf16" else "no",
        truncate_dim=retriever.truncate_dim,
        trust_remote_code=options.trust_remote_code,
    )
    changes = {
        "query_prompt": retriever.query_prompt,
        "document_prompt": retriever.document_prompt,
        "max_length": options.max_length,
    }
    description = embedder.description.with_(
        **{name: value for name, value in changes.items() if value is not None}
    )
    featuriser = Featuriser(description)
    budget = None if options.batch_tokens == "auto" else options.batch_tokens

    def encode(items: Sequence[Item], kind: Kind) -> np.ndarray:
        return encode_items(
            embedder.model,
            featuriser,
            items,
            kind,
            budget_tokens=budget,
            normalize=description.similarity == "cosine",
            truncate_dim=embedder.truncate_dim,
        )

    return encode


def _load_sentence_transformers(
    retriever: Retriever, options: ModelOptions, device: torch.device
) -> Encode:
    if find_spec("sentence_transformers") is None:
        raise UserError(
            "library: sentence_transformers needs that package: pip install sentence-transformers"
        )
    from sentence_transformers import SentenceTransformer

    folder = model_folder(retriever.model)
    check_no_pickles(folder)
    model_kwargs: dict[str, Any] = {"use_safetensors": True}
    if options.torch_dtype != "auto":
        model_kwargs["dtype"] = DTYPES[options.torch_dtype]
    model = SentenceTransformer(
        str(folder),
        device=str(device),
        truncate_dim=retriever.truncate_dim,
        trust_remote_code=options.trust_remote_code,
        model_kwargs=model_kwargs,
    )
    if options.max_length is not None:
        model.max_seq_length = options.max_length

    def encode(items: Sequence[Item], kind: Kind) -> np.ndarray:
        texts = [item.text for item in items]
        if any(item.images for item in items) or None in texts:
            raise UserError(
                "library: sentence_transformers is for texts alone: images need a model that vembed loads"
            )
        is_query = kind == "query"
        encode_texts = model.encode_query if is_query else model.encode_document
        vectors = encode_texts(
            texts,
            prompt=retriever.query_prompt if is_query else retriever.document_prompt,
            # Vectors of length 1, whose dot product is the cosine: the search knows dot products alone.
            normalize_embeddings=model.similarity_fn_name in (None, "cosine"),
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, np.float32)

    return encode


def encoder_precision(
    retriever: Retriever, options: ModelOptions, session: Session
) -> Decision[Precision]:
    """The precision in which a retriever computes, the same on all ranks."""
    if retriever.library == "sentence_transformers":
        return Decision("no", "library: sentence_transformers")
    if options.torch_dtype != "auto":
        return Decision("no", f"torch_dtype: {options.torch_dtype}")
    try:
        return precision_of_use(
            retriever.model,
            session.device,
            session.placement.instructions,
            trust_remote_code=options.trust_remote_code,
        )
    except UserError as error:
        # `load_encoder` raises it again, or leaves the model to Sentence Transformers.
        return Decision("no", str(error))


def load_encoder(
    retriever: Retriever,
    options: ModelOptions,
    device: torch.device,
    precision: Precision = "no",
) -> Encode:
    """The model of a retriever, by the library that its options name."""
    if retriever.library == "sentence_transformers":
        return _load_sentence_transformers(retriever, options, device)
    try:
        return _load_vembed(retriever, options, device, precision)
    except UserError:
        # A folder with modules.json may hold modules that only Sentence Transformers knows.
        is_theirs = (Path(retriever.model) / "modules.json").is_file()
        is_installed = find_spec("sentence_transformers") is not None
        if retriever.library == "vembed" or not (is_theirs and is_installed):
            raise
        return _load_sentence_transformers(retriever, options, device)


def encoder_identity(
    retriever: Retriever, options: ModelOptions, precision: Precision
) -> str:
    """A short name for everything that the vectors depend on besides the items, known before the model is loaded."""
    settings = retriever.model_dump(exclude={"weight", "model"})
    return short_hash(
        files_identity(retriever.model),
        settings,
        options.torch_dtype,
        options.max_length,
        options.vector_dtype,
        # Nothing for "no", so that vectors stored before there was a precision still count.
        *([] if precision == "no" else [precision]),
    )


def files_identity(model: str) -> list[list[object]]:
    """Return an identity of a model's version: the files of its folder, or its commit in the Hub's cache."""
    folder = Path(model)
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        # Size and time instead of content: gigabytes would be read at every start.
        return [
            [
                str(path.relative_to(folder)),
                path.stat().st_size,
                path.stat().st_mtime_ns,
            ]
            for path in files
        ]
    cached = try_to_load_from_cache(model, "config.json") if "/" in model else None
    return [[model, str(cached)]]
