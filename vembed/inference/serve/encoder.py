"""TextEncoder: what the server asks, an Embedder, a Reranker or an export in its own runtime, and the Batcher that asks it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from vembed.data.examples import Item, Kind
from vembed.data.features import Features
from vembed.errors import UserError
from vembed.export.exporting import EXPORT_FORMATS, OnnxReranker
from vembed.export.onnx_format import GraphReader
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import encode_features
from vembed.inference.reranker import Reranker
from vembed.models.families.model_files import (
    EXPORT_FILE,
    is_reranker,
    read_object,
)

SERVED_RUNTIMES = ("onnx", "openvino")
"""Formats of exports that the server runs in their own runtime."""
MAX_BATCH_INPUTS = 512
"""Inputs of several requests that are encoded together. A longer request is encoded alone."""

Encoded = tuple[np.ndarray, int]
"""[n, d] float32 embeddings or [n, 1] scores of a request, and the number of its tokens."""


@dataclass(frozen=True, slots=True)
class ServedInput:
    """One input of a request: a text, or the token ids of one."""

    content: str | list[int]
    kind: Kind | None = None
    """Whose prompt is put before the text. None: no prompt."""
    query: str | None = None
    """Query that a reranker reads with the text, a document."""


class TextEncoder(Protocol):
    """A model that the server asks, from one thread."""

    max_length: int
    """Tokens of the longest input. Longer texts are truncated."""
    vocab_size: int | None
    """Token ids are below this number. None: the model takes texts only."""
    gives_scores: bool
    """True: a reranker. Its inputs have queries."""

    def encode(self, inputs: Sequence[ServedInput]) -> tuple[np.ndarray, list[int]]:
        """Return [n, d] float32 embeddings, or [n, 1] scores, and the number of tokens of each input."""
        ...


class ModelEncoder:
    """A model in this process."""

    gives_scores = False

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        description = embedder.description
        if "text" not in description.modalities:
            raise UserError(
                f"{description.source} embeds images only, and the server's protocols send texts"
            )
        self.max_length = description.max_length
        self.fixed_length = (
            description.max_length if description.traits.has_fixed_length else None
        )
        self.prompts: dict[Kind | None, str] = {
            None: "",
            "query": description.query_prompt,
            "document": description.document_prompt,
        }
        # The ids of a conversation would have to bring its template along.
        texts = embedder.featuriser.texts
        self.vocab_size: int | None = None
        if texts is not None and not description.traits.reads_chats:
            self.vocab_size = texts.vocab_size

    def encode(self, inputs: Sequence[ServedInput]) -> tuple[np.ndarray, list[int]]:
        """See TextEncoder."""
        featuriser = self.embedder.featuriser
        items: list[tuple[Item, Kind]] = []
        for served in inputs:
            if isinstance(served.content, str):
                item = Item(text=served.content, prompt=self.prompts[served.kind])
                items.append((item, "document"))
        tokenized = iter(featuriser.features(items))
        features = []
        for served in inputs:
            if isinstance(served.content, str):
                features.append(next(tokenized))
                continue
            token_ids = np.array(served.content, np.int32)
            length = self.fixed_length or len(token_ids)
            features.append(Features("text", length, 0, 0, token_ids=token_ids))
        embeddings = encode_features(
            self.embedder.model, featuriser, features, self.embedder.device
        )
        num_tokens = []
        for feature in features:
            ids = feature.token_ids
            num_tokens.append(0 if ids is None else len(ids))
        finished = self.embedder.finish(embeddings, self.embedder.truncate_dim, None)
        return finished, num_tokens


class PairScorer:
    """A reranker in this process, or its export to ONNX."""

    gives_scores = True
    vocab_size: int | None = None

    def __init__(self, reranker: Reranker | OnnxReranker) -> None:
        self.reranker = reranker
        self.max_length = reranker.description.max_length

    def encode(self, inputs: Sequence[ServedInput]) -> tuple[np.ndarray, list[int]]:
        """See TextEncoder."""
        pairs = []
        for served in inputs:
            pairs.append((Item(text=served.query), Item(text=str(served.content))))
        features = self.reranker.featuriser.features(pairs)
        scores = self.reranker.scores_of(features)
        return scores, [feature.length for feature in features]


class ExportEncoder:
    """An export to ONNX or OpenVINO, in that runtime."""

    gives_scores = False

    def __init__(self, folder: Path, format_name: str) -> None:
        export_format = EXPORT_FORMATS[format_name]  # type: ignore[index]
        missing = export_format.missing()
        if missing is not None:
            raise UserError(f"{folder}: {missing}")
        self.reader = cast(GraphReader, export_format.reader(folder))
        self.max_length = self.reader.texts.max_length
        self.vocab_size: int | None = len(self.reader.texts.tokenizer)

    def encode(self, inputs: Sequence[ServedInput]) -> tuple[np.ndarray, list[int]]:
        """See TextEncoder."""
        rows = [
            self.reader.token_ids(served.content, served.kind)
            if isinstance(served.content, str)
            else served.content
            for served in inputs
        ]
        return self.reader.encode_ids(rows), [len(row) for row in rows]


def open_encoder(
    model: str,
    *,
    device: str | None = None,
    truncate_dim: int | None = None,
    trust_remote_code: bool = False,
) -> TextEncoder:
    """Return the encoder of a model, a run, or a folder that `vembed export` wrote."""
    folder = Path(model).expanduser()
    facts = read_object(folder / EXPORT_FILE) or {}
    format_name = str(facts.get("format"))
    if format_name not in SERVED_RUNTIMES:
        if is_reranker(model):
            if truncate_dim is not None:
                raise UserError(
                    f"--truncate-dim {truncate_dim}: {model} is a reranker and gives scores; leave it out"
                )
            reranker = Reranker(
                model, device=device, trust_remote_code=trust_remote_code
            )
            return PairScorer(reranker)
        embedder = Embedder(
            model,
            device=device,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
        )
        return ModelEncoder(embedder)
    if truncate_dim is not None or device not in (None, "cpu"):
        raise UserError(
            f"{model} is an export to {format_name}: it runs on the CPU at its own size"
        )
    if is_reranker(model):
        return PairScorer(OnnxReranker(folder))
    return ExportEncoder(folder, format_name)


@dataclass(frozen=True)
class _Request:
    inputs: Sequence[ServedInput]
    result: Future[Encoded] = field(default_factory=Future)


class Batcher:
    """A thread that encodes requests in the order of their arrival."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.encoder = encoder
        self.counts: Counter[str] = Counter()
        """Batches, inputs and tokens that the model has computed."""
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(
            target=self._work, name="vembed-serve", daemon=True
        )
        self._thread.start()

    def submit(self, inputs: Sequence[ServedInput]) -> Future[Encoded]:
        """Queue a request. A future that is cancelled before its turn is not computed."""
        request = _Request(inputs)
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()
        return request.result

    def close(self) -> None:
        """Cancel what waits and end the thread."""
        with self._changed:
            self._closed = True
            for request in self._waiting:
                request.result.cancel()
            self._changed.notify()
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Return the number of requests whose turn has not come."""
        return len(self._waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                batch = self._next_batch()
            if batch:
                self._encode(batch)

    def _next_batch(self) -> list[_Request]:
        batch: list[_Request] = []
        num_inputs = 0
        while self._waiting:
            num_inputs += len(self._waiting[0].inputs)
            if batch and num_inputs > MAX_BATCH_INPUTS:
                break
            request = self._waiting.popleft()
            if request.result.set_running_or_notify_cancel():
                batch.append(request)
        return batch

    def _encode(self, batch: list[_Request]) -> None:
        inputs: list[ServedInput] = []
        for request in batch:
            inputs += request.inputs
        try:
            embeddings, num_tokens = self.encoder.encode(inputs)
        except Exception as error:
            if len(batch) > 1:
                # The fault is in one of the requests: the others get their answers.
                for request in batch:
                    self._encode([request])
            else:
                batch[0].result.set_exception(error)
            return
        self.counts["batches"] += 1
        self.counts["inputs"] += len(inputs)
        self.counts["tokens"] += sum(num_tokens)
        start = 0
        for request in batch:
            stop = start + len(request.inputs)
            answer = embeddings[start:stop], sum(num_tokens[start:stop])
            request.result.set_result(answer)
            start = stop
