"""The one encode path: order, equal inputs, budgets, modules' modes, and ranks in step with uneven shares."""

import numpy as np
import pytest
import torch

from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert_st
from tests.tiny_tokenizers import WORDS
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.inference import encoding
from vembed.inference.encoding import encode_items
from vembed.models.building import load_embedder
from vembed.parallel.session import start_session


def items(number):
    built = []
    for i in range(number):
        words = [
            WORDS[(i * 7 + number) % len(WORDS)] for number in range(1 + i * 5 % 11)
        ]
        built.append(Item(text=" ".join(words)))
    return built


@pytest.fixture(scope="module")
def model():
    return load_embedder(shared(tiny_bert_st))


@pytest.fixture(scope="module")
def featuriser(model):
    return Featuriser(model.description)


def one_by_one(model, featuriser, value, kind="document"):
    rows = []
    for item in value:
        (features,) = featuriser.features([(item, kind)])
        with torch.no_grad():
            rows.append(
                model([(features.modality, featuriser.collate([features]))])[0][0]
            )
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()


@pytest.mark.parametrize(
    ("budget", "max_inputs"), [(1, None), (40, None), (40, 2), (10_000, None)]
)
def test_order_and_numbers_do_not_depend_on_the_budget(
    model, featuriser, budget, max_inputs
):
    inputs = items(17)
    actual = encode_items(
        model,
        featuriser,
        inputs,
        "document",
        budget_tokens=budget,
        max_inputs=max_inputs,
    )
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, one_by_one(model, featuriser, inputs), atol=1e-6)


def test_the_budget_limits_what_goes_through_the_model_at_once(model, featuriser):
    sizes = []

    def note(_, arguments):
        sizes.extend(batch["input_ids"].numel() for _, batch in arguments[0])

    with model.register_forward_pre_hook(note):
        encode_items(model, featuriser, items(30), "document", budget_tokens=48)
    assert max(sizes) <= 48
    assert len(sizes) > 3


def test_equal_items_are_encoded_once(model, featuriser):
    rows = []

    def note(_, arguments):
        rows.extend(batch["input_ids"].shape[0] for _, batch in arguments[0])

    inputs = items(5) * 3
    with model.register_forward_pre_hook(note):
        actual = encode_items(model, featuriser, inputs, "query")
    assert sum(rows) == 5
    assert (actual[:5] == actual[5:10]).all()


def test_every_module_is_in_its_mode_afterwards_and_no_graph_is_kept():
    model = load_embedder(shared(tiny_bert_st)).requires_grad_(True)
    featuriser = Featuriser(model.description)
    model.train()
    frozen = next(
        module for name, module in model.named_modules() if name.endswith("layer.0")
    )
    frozen.eval()
    before = {name: module.training for name, module in model.named_modules()}
    recorded = []
    with model.register_forward_hook(
        lambda module, _, out: recorded.append((module.training, out[0].requires_grad))
    ):
        encode_items(model, featuriser, items(2), "document")
    assert recorded == [(False, False)]
    assert {name: module.training for name, module in model.named_modules()} == before


def _on_a_rank(folder, numbers, chunk):
    encoding.INPUTS_PER_CHUNK = chunk
    with start_session(
        TrainConfig(model_name="m", data_path="d", strategy="ddp")
    ) as session:
        model = load_embedder(folder)
        featuriser = Featuriser(model.description)
        micro_batches = []
        model.register_forward_pre_hook(lambda *_: micro_batches.append(1))
        actual = []
        for number in numbers:
            micro_batches.clear()
            embeddings = encode_items(
                model,
                featuriser,
                items(number),
                "document",
                budget_tokens=24,
                session=session,
            )
            actual.append((embeddings, len(micro_batches)))
        return actual


@pytest.mark.parametrize(("num_ranks", "chunk"), [(2, 3), (4, 16_384)])
@pytest.mark.promise("B15")
def test_ranks_encode_uneven_shares_in_step_and_in_order(
    model, featuriser, num_ranks, chunk
):
    numbers = [7, 0, 1, 3, 20]
    arguments = (shared(tiny_bert_st), numbers, chunk)
    by_rank = run_ranks(_on_a_rank, num_ranks, *arguments, process_group=False)
    for place, number in enumerate(numbers):
        expected = encode_items(model, featuriser, items(number), "document")
        for embeddings, _ in (entry[place] for entry in by_rank):
            np.testing.assert_allclose(embeddings, expected, atol=1e-6)
        num_forwards = {entry[place][1] for entry in by_rank}
        assert len(num_forwards) == 1, (
            "every forward of a sharded model is a collective"
        )
