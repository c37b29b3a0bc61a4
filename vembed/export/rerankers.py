"""export_reranker(): a reranker with a head of one label as an ONNX graph, its scores compared with the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from vembed.data.examples import Item
from vembed.data.features import Features, PairFeaturiser
from vembed.errors import UserError
from vembed.evaluation.dataset import EvalData
from vembed.export.check import texts_to_compare
from vembed.export.formats import WeightPrecision
from vembed.export.onnx_format import (
    ONNX_FILE,
    batches_of,
    open_session,
    run_batches,
    write_graph,
)
from vembed.files import write_json
from vembed.inference.reranker import Reranker, read_weights
from vembed.models.embedding_model import SEGMENTS
from vembed.models.families.description import DESCRIPTION_FILE, ModelDescription
from vembed.models.families.model_files import read_object
from vembed.models.processors import load_tokenizer, save_processors
from vembed.saving.layout import write_reranker_layout

SCORE_TOLERANCE: dict[WeightPrecision, float] = {
    "float32": 1e-4,
    "float16": 1e-2,
    "int8": 1e-1,
}
"""Largest allowed difference of two scores by the precision of the weights, relative to the largest score."""


@dataclass(frozen=True)
class ScoreCheck:
    """Result of a comparison of scores."""

    runtime: str
    num_pairs: int
    largest_difference: float
    """Between the two scores of a pair, relative to the largest score of the model, which counts as at least 1."""
    rank_correlation: float
    """Spearman's, of the scores of all pairs."""
    tolerance: float

    def lines(self) -> list[str]:
        """Return what is printed and written into the card."""
        return [
            f"{self.num_pairs:,d} pairs through the model and through {self.runtime}: largest difference of scores "
            f"{self.largest_difference:.2g} of the largest score (tolerance {self.tolerance:.2g}), Spearman "
            f"correlation {self.rank_correlation:.4f}"
        ]


class PairGraph(nn.Module):
    """A sequence classifier from token ids to scores."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        # Eager attention is plain matrix products: every runtime has them, and int8 kernels replace them.
        classifier.set_attn_implementation("eager")
        self.classifier = classifier

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Map [n, tokens] inputs to [n, labels] logits. BERT takes `token_type_ids`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs[SEGMENTS] = token_type_ids
        logits: Tensor = self.classifier(**inputs).logits
        return logits


class OnnxReranker:
    """A reranker exported to ONNX, in onnxruntime. It uses the exported files alone."""

    def __init__(self, folder: Path) -> None:
        self.runtime = f"onnxruntime {version('onnxruntime')}"
        values = read_object(folder / DESCRIPTION_FILE) or {}
        self.description = ModelDescription.from_dict(values, folder)
        self.featuriser = PairFeaturiser(self.description)
        self.session: Any = open_session(folder / ONNX_FILE)
        self.names = [graph_input.name for graph_input in self.session.get_inputs()]

    def scores_of(self, features: Sequence[Features]) -> np.ndarray:
        """Return [n, 1] float32 scores of tokenized pairs."""
        batches = batches_of([feature.length for feature in features])
        inputs = []
        for numbers in batches:
            padded = padded_inputs(
                self.featuriser, [features[number] for number in numbers]
            )
            inputs.append({name: padded[name].numpy() for name in self.names})
        logits = np.concatenate(run_batches(self.session, inputs))
        scores = np.empty((len(features), 1), np.float32)
        # As vembed.models.heads has it for two labels.
        difference = logits[:, 1:] - logits[:, :1]
        scores[np.concatenate(batches)] = difference if logits.shape[1] > 1 else logits
        return scores


def padded_inputs(
    featuriser: PairFeaturiser, features: Sequence[Features]
) -> dict[str, Tensor]:
    """Return the inputs of a batch of pairs with a mask, which a graph always takes."""
    inputs = featuriser.joined(features)
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    return inputs


def export_reranker(
    model: str,
    folder: Path,
    precision: WeightPrecision,
    *,
    check: bool,
    data: EvalData | None,
    tolerance: float | None,
    trust_remote_code: bool,
    log: Callable[[str], object],
) -> tuple[ModelDescription, ScoreCheck | None]:
    """Write a reranker into a folder. With `check`, raise UserError if its scores differ from the model's."""
    reranker = Reranker(
        model,
        device="cpu",
        torch_dtype="float32",
        trust_remote_code=trust_remote_code,
    )
    description = reranker.description
    if description.scores == "answer":
        raise UserError(
            f"--format onnx: {model} answers yes or no to a question in a template, which runtimes of ONNX do not "
            "write; serve its folder with vLLM or `vembed serve`, or train with reranker_head: label"
        )
    # Pairs of the texts that other exports are compared by: queries and documents of the evaluation data.
    of_kind: dict[str, list[Item]] = {"query": [], "document": []}
    for text, kind in texts_to_compare(data, description.max_length):
        of_kind[kind].append(Item(text=text))
    pairs = list(zip(of_kind["query"], of_kind["document"], strict=False))
    features = reranker.featuriser.features(pairs)
    if check:
        log(f"scoring {len(features):,d} pairs with the model")
        expected = reranker.scores_of(features)
    del reranker
    log(f"writing the onnx file in {precision}")
    save_processors(description, folder)
    write_reranker_layout(folder, description)
    write_json(folder / DESCRIPTION_FILE, description.to_dict())
    source = Path(description.source)
    classifier = read_weights(
        AutoModelForSequenceClassification, source, torch.float32, trust_remote_code
    )
    if classifier.config.pad_token_id is None:
        # Decoders look for the last token that is no padding.
        classifier.config.pad_token_id = load_tokenizer(description).pad_token_id
    classifier.config.save_pretrained(folder)
    # Two pairs of different lengths: sizes of 1 would be taken for constants.
    inputs = padded_inputs(PairFeaturiser(description), features[:2])
    names = [
        name for name in ("input_ids", "attention_mask", SEGMENTS) if name in inputs
    ]
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    write_graph(
        PairGraph(classifier),
        tuple(inputs[name] for name in names),
        dict.fromkeys(names, shape),
        folder / ONNX_FILE,
        precision,
        output="logits",
    )
    if not check:
        return description, None
    exported = OnnxReranker(folder)
    log(f"scoring the same pairs with the export in {exported.runtime}")
    scores = exported.scores_of(features)[:, 0]
    largest = float(np.abs(scores - expected[:, 0]).max())
    result = ScoreCheck(
        runtime=exported.runtime,
        num_pairs=len(features),
        largest_difference=largest / max(float(np.abs(expected).max()), 1.0),
        rank_correlation=float(spearmanr(expected[:, 0], scores).statistic),
        tolerance=SCORE_TOLERANCE[precision] if tolerance is None else tolerance,
    )
    # Written so that NaN is refused too.
    if not result.largest_difference <= result.tolerance:
        raise UserError(
            f"the onnx export of {model} differs from the model: {result.lines()[0]}; nothing was written "
            "(--tolerance allows more)"
        )
    return description, result
