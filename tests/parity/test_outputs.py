"""What a model gives for an input: several rows for each, or one score for a pair, through the step that trains vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertModel

from tests.built import described
from tests.harness import run_ranks
from tests.measure import gradient_errors
from tests.parity.engine import SEED, full_gradients
from tests.tiny import shared, texts, tiny_bert, tiny_reranker
from vembed.config.schema import TrainConfig
from vembed.data.batching.feeding import Feeder
from vembed.data.batching.rank_batch import RankBatch, make_rank_batch
from vembed.data.batching.schedule import rank_rows
from vembed.data.examples import Example, Item
from vembed.data.features import Featuriser
from vembed.inference.reranker import Reranker
from vembed.losses.batch import EmbeddingLoss, LossBatch
from vembed.losses.build import build_loss
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import Budget, MemoryGuard
from vembed.training.frozen import InputSource
from vembed.training.optimizer import synchronise
from vembed.training.step import ContrastiveStep

NUM_EXAMPLES = 5
LISTWISE = {"loss": "listwise", "teacher": "scores"}


def examples() -> list[Example]:
    words = texts(3 * NUM_EXAMPLES, seed=3, longest=20)
    return [
        Example(
            Item(words[3 * number]),
            (Item(words[3 * number + 1]),),
            (Item(words[3 * number + 2]),),
            (1.0 - 0.05 * number,),
            where=str(number),
            negative_scores=(0.3 - 0.02 * number,),
        )
        for number in range(NUM_EXAMPLES)
    ]


class TokenVectors(nn.Module):
    """A vector of length 1 for each token but the first and the last."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.backbone = BertModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, parts: list[tuple[str, dict[str, Tensor]]]) -> list[Tensor]:
        outputs = []
        for _, inputs in parts:
            ids = inputs["input_ids"]
            mask = inputs.get("attention_mask", torch.ones_like(ids))
            states = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
            rows = [
                row[1 : int(length) - 1]
                for row, length in zip(states, mask.sum(1), strict=True)
            ]
            outputs.append(F.normalize(torch.cat(rows), dim=1))
        return outputs


class MaxSim(EmbeddingLoss):
    """InfoNCE over sums of each query row's best product: this rank's rows against all positives."""

    def forward(self, batch: LossBatch) -> Tensor:
        assert batch.starts is not None
        bounds = batch.starts.tolist()

        def rows(number: int) -> Tensor:
            return batch.embeddings[bounds[number] : bounds[number + 1]]

        losses = []
        for row in range(batch.num_rows)[batch.rank_rows]:
            query = rows(int(batch.query[row]))
            scores = [(query @ rows(int(p)).T).amax(1).sum() for p in batch.positive]
            losses.append(-F.log_softmax(torch.stack(scores), 0)[row])
        return torch.stack(losses).sum() / batch.num_rows


@dataclass(frozen=True)
class PairScores:
    """A similarity whose scores the model gives already: one for each pair."""

    weights: tuple[float, ...] = (1.0,)
    dims: tuple[int, ...] = (1,)

    def similarity(self, embedding_dim: int) -> PairScores:
        return self

    def total(self, by_size: Tensor) -> Tensor:
        return by_size.sum()

    def table(self, values: Tensor, index: Tensor, *, with_gradient: bool) -> PairTable:
        return PairTable(values, index)


class PairTable:
    """The table of `PairScores`: a pair's number stands for its document."""

    def __init__(self, values: Tensor, index: Tensor) -> None:
        self.values = values
        self.index = index
        self.d_values = torch.zeros_like(values)

    def pair_scores(self, left: slice, right: slice) -> Tensor:
        return self.values[self.index[right]].T

    def add_pair_gradient(
        self, left: slice, right: slice, scores: Tensor, d_scores: Tensor
    ) -> None:
        self.d_values.index_add_(0, self.index[right], d_scores.T)

    def gradient(self, into: Tensor) -> Tensor:
        return into.add_(self.d_values)


def pair_batch(rows: list[Example], first: int, model: Reranker) -> RankBatch:
    """A rank batch whose inputs are pairs: each document with its query."""
    pairs = []
    for example in rows:
        for document in (*example.positives, *example.negatives):
            pairs.append((example.query, document))
    numbers = np.arange(len(rows))
    return RankBatch(
        epoch=0,
        batch_in_epoch=0,
        features=model.featuriser.features(pairs),
        query=2 * numbers,
        positive=2 * numbers,
        example=numbers + first,
        negative=2 * numbers + 1,
        negative_example=numbers + first,
        scores=np.array([example.scores[0] for example in rows]),
        num_inputs=len(pairs),
        num_examples=len(rows),
        where=[example.where for example in rows],
        negative_scores=np.array([example.negative_scores[0] for example in rows]),
    )


def config_of(kind: str, **options: Any) -> TrainConfig:
    folder = shared(tiny_reranker if kind == "pairs" else tiny_bert)
    more = LISTWISE if kind == "pairs" else {}
    return TrainConfig(
        model_name=str(folder),
        data_path="none",
        mixed_precision="no",
        **more,
        **options,
    )


def build(kind: str, config: TrainConfig) -> tuple[Any, EmbeddingLoss]:
    folder = Path(config.model.model_name)
    if kind == "rows":
        return TokenVectors(folder).double(), MaxSim()
    model = Reranker(folder, role="it", device=torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loss = build_loss(config)
    loss.sizes = PairScores()  # type: ignore[assignment]
    return model.double().requires_grad_(True), loss.double()


def step_on_rank(kind: str, strategy: str, cache: bool) -> dict[str, Tensor]:
    config = config_of(kind, strategy=strategy)
    with start_session(config) as session:
        model, loss = build(kind, config)
        rank = rank_rows(NUM_EXAMPLES, session.rank, session.world_size)
        rows = examples()[rank]
        if kind == "pairs":
            featuriser = model.featuriser
            batch = pair_batch(rows, rank.start, model)
        else:
            featuriser = Featuriser(described(config))
            batch = make_rank_batch(rows, rank.start, 0, 0, featuriser)
            features = [replace(f, rows=f.length - 2) for f in batch.features]
            batch = replace(batch, features=features)
        model = session.prepare(model, ())
        step = ContrastiveStep(
            model,
            loss,
            InputSource(model, Feeder(featuriser, session.device), session),
            session,
            Budget(40, None, 10**9, cache),
            MemoryGuard(session),
            SEED,
        )
        result = step.accumulate(batch, 3, weight=1.0, last=True)
        synchronise(model, loss, session)
        return {**full_gradients(model), "loss": result.loss_share}


def plain(kind: str) -> dict[str, Tensor]:
    """The same in one process, by autograd alone, each input by itself."""
    model, _ = build(kind, config_of(kind))
    rows = examples()
    if kind == "rows":
        featuriser = Featuriser(described(config_of(kind)))

        def encode(item: Item) -> Tensor:
            features = featuriser.features([(item, "query")])
            return model([("text", featuriser.collate(features))])[0]

        queries = [encode(row.query) for row in rows]
        documents = [encode(row.positives[0]) for row in rows]
        scores = [[(q @ d.T).amax(1).sum() for d in documents] for q in queries]
        logits = torch.stack([torch.stack(row) for row in scores])
        loss = F.cross_entropy(logits, torch.arange(len(rows)))
    else:
        losses = []
        for row in rows:
            pairs = [(row.query, row.positives[0]), (row.query, row.negatives[0])]
            features = model.featuriser.features(pairs)
            scores = model([("text", model.featuriser.collate(features))])[0][:, 0]
            temperature = 0.05
            targets = torch.tensor([row.scores[0], row.negative_scores[0]]).double()
            shares = F.softmax(targets / temperature, 0)
            losses.append(-(shares * F.log_softmax(scores / temperature, 0)).sum())
        loss = torch.stack(losses).mean()
    loss.backward()
    return {**full_gradients(model), "loss": loss.detach()}


@pytest.mark.parametrize("kind", ["rows", "pairs"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_gradient_is_that_of_autograd(kind: str, world_size: int, cache: bool) -> None:
    strategy = "single" if world_size == 1 else "ddp"
    expected = plain(kind)
    by_rank = run_ranks(
        step_on_rank, world_size, kind, strategy, cache, process_group=False
    )
    total = sum(float(result["loss"]) for result in by_rank)
    assert total == pytest.approx(float(expected.pop("loss")), rel=1e-10)
    for result in by_rank:
        del result["loss"]
        assert max(gradient_errors(result, expected).values()) < 1e-10
