"""Reranker: a model that reads a query and a document together and gives a score, ready for use."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from vembed.config.schema import ModelSection
from vembed.config.values import ModelDtype
from vembed.data.features import Features, PairFeaturiser, names_no_question
from vembed.errors import UserError
from vembed.files import check_weights
from vembed.inference.embedder import Input, inference_device, require_choice, to_item
from vembed.inference.encoding import encode_features, from_all_ranks
from vembed.models.building import build_model
from vembed.models.families.backbones import quiet_transformers, read_config
from vembed.models.families.description import ModelDescription, describe
from vembed.models.families.model_files import check_whole_weights
from vembed.models.processors import load_tokenizer
from vembed.parallel.session import Session

QUESTION_MARK = "<|im_start|>"
"""Token that the question of Qwen3-Reranker begins with."""
THINKING = "<think>"
"""What the end of that question has, and all chat templates of Qwen3."""

log = logging.getLogger(__name__)


class Reranker:
    """A reranker from a folder or the Hub: a classifier with one or two labels, or a decoder that answers yes or no.

    reranker = vembed.Reranker("runs/reranker/final")
    reranker.rank("a query", ["a document", "another"])
    """

    def __init__(
        self,
        model: str | Path,
        *,
        role: str = "",
        device: torch.device | str | None = None,
        head: Literal["auto", "label", "answer"] = "auto",
        instruction: str | None = None,
        max_length: int | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        torch_dtype: ModelDtype = "auto",
        trust_remote_code: bool = False,
        holds: torch.device | str | None = None,
        session: Session | None = None,
    ) -> None:
        """`role` names it in messages, as "judges: NAME". `head`: the layer that gives the score, by default that of its
        files. `instruction`: what a decoder is asked about each pair. `max_length`: tokens of a pair, at most those that
        the model takes. `holds`: where the weights are put, for a model
        that will be sharded; by default `device`. `session`: of processes that make each call of `predict` together,
        with the same pairs, as in Embedder."""
        require_choice("torch_dtype", torch_dtype, get_args(ModelDtype))
        require_choice("head", head, ("auto", "label", "answer"))
        if session is not None:
            device = session.device
            holds = session.model_device
        self.device = inference_device(device)
        self.session = session
        options = ModelSection(
            model_name=str(model),
            task="rerank",
            reranker_head=head,
            max_length=max_length,
            query_prompt=query_prompt,
            document_prompt=document_prompt,
            torch_dtype=torch_dtype,
            trust_remote_code=trust_remote_code,
        )
        description = describe(options, for_inference=True)
        # The template of a decoder that answers has its instruction where an embedding model has the query's prompt.
        if description.scores == "answer" and instruction is not None:
            description = replace(description, query_prompt=instruction)
        self.role = role or description.name
        if description.scores == "answer" and names_no_question(description.folder):
            self._refuse_other_form(description)
        self.featuriser = PairFeaturiser(description, self.role)
        built = build_model(
            description,
            options,
            device=holds or self.device,
            computes_on=self.device,
            meta=session is not None and session.builds_empty,
            for_inference=True,
        )
        # A head that is in no file has random weights, and its scores would mean nothing.
        if getattr(built.head, "is_new", False):
            raise UserError(
                f"{self.role} has no layer that gives a score: an embedding model is no reranker; train one with task: "
                "rerank"
            )
        self.model: nn.Module = built.eval().requires_grad_(False)
        # Without shards every rank computes with a whole model, and nothing has to be prepared.
        if session is not None and session.fsdp is not None:
            self.model = session.prepare(built, description.layer_classes).eval()
        self.description = description

    def _refuse_other_form(self, description: ModelDescription) -> None:
        """Raise UserError if a decoder's tokenizer shows that it was trained on another question. Warn if it shows nothing."""
        tokenizer = load_tokenizer(description)
        is_text = not description.family_traits.is_vision_language
        reason = None
        if QUESTION_MARK not in tokenizer.get_vocab():
            reason = f"its tokenizer has no token {QUESTION_MARK}"
        elif is_text and tokenizer.chat_template is None:
            log.warning(
                "%s: its files do not show the question that it was trained on. vembed asks that of Qwen3-Reranker, with the "
                "instruction %r (instruction or query_prompt sets another). A model of another question needs the program that its "
                "page names",
                self.role,
                description.query_prompt,
            )
        elif is_text and THINKING not in str(tokenizer.chat_template):
            reason = f"its chat template has no {THINKING}"
        if reason is not None:
            raise UserError(
                f"{self.role} was not trained on the question of Qwen3-Reranker, which vembed asks: {reason}. Use the "
                "program that its page names, or train it with task: rerank"
            )

    def scores_of(
        self, features: Sequence[Features], world_size: int = 1
    ) -> np.ndarray:
        """Return [n, 1] float32 scores of this rank's tokenized pairs.

        With `world_size` > 1 it is collective: ranks pass pairs of their own, and all run
        equally many forward passes, as sharded models need.
        """
        return encode_features(
            self.model, self.featuriser, features, self.device, world_size=world_size
        )

    def predict(self, pairs: Sequence[tuple[Input, Input]]) -> np.ndarray:
        """Return [n] float32 scores of (query, document) pairs, before any logistic function."""
        if not pairs:
            return np.empty(0, np.float32)
        items = []
        for number, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise UserError(
                    f"pairs[{number}] is {pair!r:.80}; give a query and a document: (query, document)"
                )
            query, document = pair
            items.append((to_item(query), to_item(document)))
        rank = self.session.rank if self.session else 0
        world_size = self.session.world_size if self.session else 1
        # Pair i is scored on rank i % world_size, and every rank gets all scores back in the order of the pairs. A rank
        # without pairs goes on: the forward passes of the others gather its shards.
        features = self.featuriser.features(items[rank::world_size])
        scores = self.scores_of(features, world_size)
        return np.ravel(from_all_ranks(scores, len(items), self.session))

    def rank(
        self,
        query: Input,
        documents: Sequence[Input],
        top_k: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return {"index", "score", "text"} of the documents, best first; the first `top_k` if given. A document with
        images has no "text"."""
        if isinstance(documents, str):
            raise UserError(f"documents is one text, {documents!r:.80}; give a list")
        if top_k is not None and top_k < 1:
            raise UserError(f"top_k is {top_k}: give 1 or more")
        scores = self.predict([(query, document) for document in documents])
        return sorted_documents(documents, scores, top_k)


def sorted_documents(
    documents: Sequence[Input],
    scores: np.ndarray,
    top_k: int | None,
) -> list[dict[str, Any]]:
    """Return {"index", "score", "text"} of the documents, best first."""
    ranking = []
    # Of equal scores the earlier document comes first.
    for index in np.argsort(-scores, kind="stable")[:top_k].tolist():
        row = {"index": index, "score": float(scores[index])}
        if isinstance(documents[index], str):
            row["text"] = documents[index]
        ranking.append(row)
    return ranking


def read_weights(
    kind: Any,
    folder: Path,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> Any:
    """Return a model of an Auto class, from safetensors alone: reading pickled weights would run their code."""
    check_whole_weights(folder)
    check_weights(folder)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    with quiet_transformers():
        return kind.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
