"""A model that gives several rows for each input, through the step that trains vectors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertModel

from tests.built import described
from tests.harness import run_ranks
from tests.measure import gradient_errors
from tests.parity.engine import Case, examples, full_gradients, step_of
from tests.tiny import shared, tiny_bert
from vembed.config.schema import TrainConfig
from vembed.data.features import Featuriser
from vembed.losses.batch import LossModule
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import Budget

CASE = Case("outputs", num_examples=5)


class TokenVectors(nn.Module):
    """A vector of length 1 for each token but the first and the last."""

    def __init__(self, folder):
        super().__init__()
        self.backbone = BertModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, parts):
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


class MaxSim(LossModule):
    """InfoNCE over sums of each query row's best product: this rank's rows against all positives."""

    def forward(self, batch):
        assert batch.starts is not None
        bounds = batch.starts.tolist()

        def rows(number):
            return batch.embeddings[bounds[number] : bounds[number + 1]]

        losses = []
        for row in range(batch.num_rows)[batch.rank_rows]:
            query = rows(int(batch.query[row]))
            scores = [(query @ rows(int(p)).T).amax(1).sum() for p in batch.positive]
            losses.append(-F.log_softmax(torch.stack(scores), 0)[row])
        return torch.stack(losses).sum() / batch.num_rows


def config_of(**options):
    return TrainConfig(
        model_name=str(shared(tiny_bert)),
        data_path="none",
        mixed_precision="no",
        **options,
    )


def build(config):
    return TokenVectors(Path(config.model.model_name)).double()


def step_on_rank(strategy, cache):
    config = config_of(strategy=strategy)
    with start_session(config) as session:
        model = build(config)
        loss = MaxSim()
        featuriser = Featuriser(described(config))
        model = session.prepare(model, ())
        budget = Budget(40, 10**9, cache)
        step, batch = step_of(model, loss, featuriser, session, examples(CASE), budget)
        num_vectors = [feature.length - 2 for feature in batch.features]
        batch = replace(batch, num_vectors=num_vectors)
        result = step.accumulate(batch, 3, weight=1.0, is_last_batch=True)
        step.synchronise(0.0)
        return {**full_gradients(model), "loss": result.loss_share}


def plain():
    """The same in one process, by autograd alone, each input by itself."""
    config = config_of()
    model = build(config)
    rows = examples(CASE)
    featuriser = Featuriser(described(config))

    def encode(item):
        features = featuriser.features([(item, "query")])
        return model([("text", featuriser.collate(features))])[0]

    queries = [encode(row.query) for row in rows]
    documents = [encode(row.positives[0]) for row in rows]
    scores = [
        [(query @ document.T).amax(1).sum() for document in documents]
        for query in queries
    ]
    logits = torch.stack([torch.stack(row) for row in scores])
    loss = F.cross_entropy(logits, torch.arange(len(rows)))
    loss.backward()
    return {**full_gradients(model), "loss": loss.detach()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_gradient_is_that_of_autograd(world_size, cache):
    strategy = "single" if world_size == 1 else "ddp"
    expected = plain()
    by_rank = run_ranks(step_on_rank, world_size, strategy, cache)
    total = sum(float(result["loss"]) for result in by_rank)
    assert total == pytest.approx(float(expected.pop("loss")), rel=1e-10)
    for result in by_rank:
        del result["loss"]
        assert max(gradient_errors(result, expected).values()) < 1e-10
