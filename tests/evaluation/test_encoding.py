"""The one encode path: order, equal inputs, budgets, modules' modes, and ranks in step with uneven shares."""

import numpy as np
import pytest

from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert_st
from tests.tiny_tokenizers import WORDS
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.inference import encoding
from vembed.inference.encoding import encode_items, unit_rows
from vembed.models.building import load_embedder
from vembed.parallel.session import start_command_session


def items(number):
    """Items of different texts and lengths."""
    built = []
    for row in range(number):
        first = 7 * row % len(WORDS)
        words = (WORDS + WORDS)[first : first + 1 + row * 5 % 11]
        built.append(Item(text=" ".join(words)))
    return built


def encoded(*arguments, **options):
    """Vectors of length 1."""
    return unit_rows(encode_items(*arguments, **options))


@pytest.fixture(scope="module")
def model():
    return load_embedder(shared(tiny_bert_st))


@pytest.fixture(scope="module")
def featuriser(model):
    return Featuriser(model.description)


@pytest.fixture
def shapes(model):
    """The shape of each batch that goes through the model."""
    noted = []

    def note(_, arguments):
        noted.extend(batch["input_ids"].shape for _, batch in arguments[0])

    with model.register_forward_pre_hook(note):
        yield noted


def test_the_budget_limits_what_goes_through_the_model_at_once(
    model, featuriser, shapes
):
    inputs = items(30)
    whole = encoded(model, featuriser, inputs, "document")
    shapes.clear()
    actual = encoded(model, featuriser, inputs, "document", budget_tokens=48)
    assert max(rows * length for rows, length in shapes) <= 48
    assert len(shapes) > 3
    np.testing.assert_allclose(actual, whole, atol=1e-6)


def test_equal_items_are_encoded_once(model, featuriser, shapes):
    actual = encode_items(model, featuriser, items(5) * 3, "query")
    assert sum(rows for rows, _ in shapes) == 5
    assert (actual[:5] == actual[5:10]).all()


def test_every_module_is_in_its_mode_afterwards_and_no_graph_is_kept():
    model = load_embedder(shared(tiny_bert_st)).requires_grad_(True)
    featuriser = Featuriser(model.description)
    model.train()
    (frozen,) = [
        module for name, module in model.named_modules() if name.endswith("layer.0")
    ]
    frozen.eval()
    modes = [module.training for module in model.modules()]
    recorded = []

    def note(module, _, outputs):
        recorded.append((module.training, outputs[0].requires_grad))

    with model.register_forward_hook(note):
        encode_items(model, featuriser, items(2), "document")
    assert recorded == [(False, False)]
    assert [module.training for module in model.modules()] == modes


def _on_a_rank(folder, numbers):
    encoding.INPUTS_PER_CHUNK = 3
    with start_command_session() as session:
        model = load_embedder(folder)
        featuriser = Featuriser(model.description)
        micro_batches = []
        model.register_forward_pre_hook(lambda *_: micro_batches.append(1))
        actual = []
        for number in numbers:
            micro_batches.clear()
            embeddings = encoded(
                model,
                featuriser,
                items(number),
                "document",
                budget_tokens=24,
                session=session,
            )
            actual.append((embeddings, len(micro_batches)))
        return actual


@pytest.mark.promise("B15")
def test_ranks_encode_uneven_shares_in_step_and_in_order(model, featuriser):
    numbers = [7, 0, 1, 3, 20]
    by_rank = run_ranks(_on_a_rank, 3, shared(tiny_bert_st), numbers)
    for place, number in enumerate(numbers):
        expected = encoded(model, featuriser, items(number), "document")
        num_forwards = set()
        for entry in by_rank:
            embeddings, count = entry[place]
            np.testing.assert_allclose(embeddings, expected, atol=1e-6)
            num_forwards.add(count)
        assert len(num_forwards) == 1, (
            "every forward of a sharded model is a collective"
        )
