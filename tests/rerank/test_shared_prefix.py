"""What the questions of a decoder begin with is computed once for all of a micro-batch: same scores, same gradients."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional
from transformers import MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.built import described, model_of
from tests.harness import run_ranks
from tests.measure import gradient_errors
from tests.models.families import gradients_of
from tests.parity.engine import (
    Case,
    examples,
    reference,
    steps_on_ranks,
    worst_error,
)
from tests.tiny import shared, tiny_answering, tiny_qwen3_reranker
from vembed.data import features
from vembed.models.attention import SHARED_PREFIX
from vembed.parallel.step_memory import Budget

EXACT = 1e-9


@dataclass(frozen=True)
class AnswerCase(Case):
    """Lists of questions of very different lengths, several in each micro-batch."""

    def folder(self):
        """The model that is trained."""
        return shared(tiny_qwen3_reranker)

    def budget(self):
        """Micro-batches of three to eight questions."""
        return Budget(1600, self.kept_tokens, self.cache)


@contextmanager
def exact_norms():
    """The norms of Qwen3 and Mistral round float64 to float32. Here they do not."""

    def forward(norm, states):
        shape = tuple(norm.weight.shape)
        return functional.rms_norm(states, shape, norm.weight, norm.variance_epsilon)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3RMSNorm, "forward", forward)
        patch.setattr(MistralRMSNorm, "forward", forward)
        yield


def exact_gradients(case, folder, strategy, more):
    with exact_norms():
        ((gradients, *_),) = steps_on_ranks([(case, folder)], strategy, more)
    return gradients


@pytest.mark.parametrize(
    ("world_size", "strategy", "cache"),
    [(1, "single", True), (2, "ddp", False), (2, "fsdp", True)],
)
def test_gradients_are_those_of_whole_questions(
    world_size, strategy, cache, monkeypatch
):
    options = {"task": "rerank", "loss": "infonce", "temperature": 1.0}
    case = AnswerCase("answer", options, cache=cache)
    ranks = run_ranks(exact_gradients, world_size, case, case.folder(), strategy, {})
    monkeypatch.setattr(features, "shared_length", lambda rows, limit: 0)
    with exact_norms():
        expected = reference(case, world_size)
    for gradients in ranks:
        name, error = worst_error(gradients, expected)
        assert error < EXACT, name


def scores_and_gradients(model, inputs):
    model.zero_grad(set_to_none=True)
    scores = torch.cat([model([("text", batch)])[0] for batch in inputs])[:, 0]
    weights = torch.arange(1, len(scores) + 1, dtype=scores.dtype)
    (scores * weights).sum().backward()
    return scores.detach(), gradients_of(model)


def question_batches(case):
    """Return the model, all questions in one batch, and each in its own, which has nothing to share."""
    config = case.config(case.folder())
    description = described(config)
    recompute = case.options.get("gradient_checkpointing", False)
    model = model_of(config, description, recompute=recompute).double().train()
    featuriser = features.PairFeaturiser(description)
    units = []
    for example in examples(case):
        units += featuriser.units(example)
    questions = featuriser.features(units)
    alone = [featuriser.collate([question]) for question in questions]
    assert not any(SHARED_PREFIX in inputs for inputs in alone)
    return model, featuriser.collate(questions), alone


def assert_equal_scores_and_gradients(model, together, alone):
    with exact_norms():
        scores, gradients = scores_and_gradients(model, [together])
        expected_scores, expected_gradients = scores_and_gradients(model, alone)
    torch.testing.assert_close(scores, expected_scores, rtol=EXACT, atol=EXACT)
    errors = gradient_errors(gradients, expected_gradients)
    assert max(errors.values()) < EXACT


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_scores_are_those_of_each_question_alone(padding_free, checkpointing):
    options = {"padding_free": padding_free, "gradient_checkpointing": checkpointing}
    case = AnswerCase("answer", {"task": "rerank", **options})
    model, together, alone = question_batches(case)
    template = features.ANSWER_PROMPT + "<Instruct>: " + model.description.query_prompt
    texts = features.PairFeaturiser(model.description).texts
    assert texts is not None
    assert texts.decoded(together[SHARED_PREFIX].numpy()).startswith(template[:100])
    assert_equal_scores_and_gradients(model, together, alone)


class SlidingCase(AnswerCase):
    """A decoder whose window is shorter than the questions."""

    def folder(self):
        """The model that is trained."""
        return shared(tiny_answering, MistralForCausalLM, sliding_window=64)


def test_no_padding_stands_in_a_sliding_window():
    case = SlidingCase("answer", {"task": "rerank", "padding_free": False})
    assert_equal_scores_and_gradients(*question_batches(case))


def test_nothing_is_shared_where_the_template_sees_the_texts():
    options = {"task": "rerank", "bidirectional_attention": True}
    model, together, alone = question_batches(AnswerCase("answer", options))
    assert model.packs_texts()
    assert_equal_scores_and_gradients(model, together, alone)


def test_memory_is_measured_with_whole_documents():
    case = AnswerCase("answer", {"task": "rerank"})
    featuriser = features.PairFeaturiser(described(case.config(case.folder())))
    question = featuriser.dummy("text")
    inputs = featuriser.collate([question, question])
    _, _, document_mark, end = features.answer_form(featuriser.description)
    assert featuriser.texts is not None
    others = featuriser.texts.decoded(inputs["input_ids"][0].numpy())
    assert others.endswith(end)
    assert document_mark + "a" in others
