"""Training by a published model's own language-model head: gradients, files, refusals."""

from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import vembed
from tests import tiny
from tests.built import described, model_of
from tests.data.files import write_jsonl
from tests.harness import run_ranks
from tests.parity.engine import (
    Case,
    build,
    examples,
    full_gradients,
    step_on_rank,
    worst_error,
)
from tests.training.test_run import metrics
from tests.weights.variants import pairs
from vembed.config.loading import load_config
from vembed.data.features import Featuriser
from vembed.models.building import has_language_head
from vembed.models.heads import (
    IGNORED_TARGET,
    LanguageHead,
)
from vembed.parallel.session import start_session

ROUNDED = 2e-5
"""Error in float64: the norms and rotary positions of these models round to float32 inside."""
CASES = [
    Case("cached-rows", micro="row"),
    Case("kept-graphs", cache=False),
]


def tied_qwen(directory):
    """A Qwen3 whose head is its embedding matrix."""
    folder = tiny.tiny_qwen3(directory)
    config = Qwen3Config.from_pretrained(folder)
    config.tie_word_embeddings = True
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def config_of(folder, **more):
    """Training by the head alone."""
    return load_config(
        {"model_name": str(folder), "data_path": "none", "loss": "none", **more}
    )


def folders():
    """A head of its own, one that is the embedding matrix, and an encoder, whose head is new."""
    return [
        tiny.shared(tiny.tiny_llama),
        tiny.shared(tied_qwen),
        tiny.shared(tiny.tiny_bert),
    ]


DRAWN = LanguageHead.mask_tokens


def hidden_by_content(head, inputs):
    """An encoder's hidden tokens, a function of the tokens alone: the same on any number of ranks."""
    if head.is_causal:
        return DRAWN(head, inputs)
    ids = inputs["input_ids"]
    chosen = (ids % 3 == 0) & ~torch.isin(ids, head.special_tokens)
    assert head.mask_token is not None
    hidden = {**inputs, "input_ids": ids.masked_fill(chosen, head.mask_token)}
    return hidden, ids.masked_fill(~chosen, IGNORED_TARGET)


def on_ranks():
    """The gradients of each model and case through the real step on this rank, and its part of the loss."""
    actual = []
    options = {"strategy": "fsdp", "gradient_checkpointing": True}
    with (
        mock.patch.object(LanguageHead, "mask_tokens", hidden_by_content),
        start_session(config_of(folders()[0], strategy="fsdp")) as session,
    ):
        for folder in folders():
            config = config_of(folder, **options)
            for case in CASES:
                gradients, _ = step_on_rank(case, config, session, config.objective)
                actual.append(gradients)
    return actual


def wanted(folder):
    """The mean over the tokens of every text of the batch, as often as it occurs, by the head's matrix."""
    model, _, featuriser = build(config_of(folder, padding_free=False))
    inputs = inputs_of(featuriser, examples(CASES[0]))
    if not model.language_head.is_causal:
        # Its loss is compared with Transformers' below.
        with mock.patch.object(LanguageHead, "mask_tokens", hidden_by_content):
            _, (losses,) = model([("text", inputs)], with_auxiliary=True)
        sums, counts = losses["masked_token"]
        loss = sums.sum() / counts.sum()
        loss.backward()
        return {**full_gradients(model), "loss": loss.detach()}
    mask = inputs["attention_mask"]
    labels = inputs["input_ids"].masked_fill(mask == 0, IGNORED_TARGET)
    # No token tells the first of a text.
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, IGNORED_TARGET)
    states = model.backbone(**inputs).last_hidden_state
    assert not model.language_head.is_new
    matrix = model.language_head.whole.lm_head.weight
    if matrix is None:
        matrix = model.backbone.embed_tokens.weight
    logits = (states @ matrix.T)[:, :-1].flatten(0, 1)
    loss = cross_entropy(logits, labels[:, 1:].flatten())
    loss.backward()
    # The same by Transformers, whose norms and losses are float32.
    theirs = AutoModelForCausalLM.from_pretrained(folder)(**inputs, labels=labels).loss
    assert float(theirs.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    return {**full_gradients(model), "loss": loss.detach()}


def inputs_of(featuriser, rows):
    """Every text of the examples, as often as it occurs."""
    items = []
    for example in rows:
        items.append((example.query, "query"))
        for item in (*example.positives, *example.negatives):
            items.append((item, "document"))
    return featuriser.collate(featuriser.features(items))


def test_gradients_are_those_of_the_mean_over_all_tokens():
    ranks = run_ranks(on_ranks, 2)
    expected = []
    for folder in folders():
        expected += [wanted(folder)] * len(CASES)
    for number, gradients in enumerate(expected):
        name, error = worst_error(ranks[0][number], gradients)
        assert error < ROUNDED, (number, name, error)
        loss = sum(float(rank[number]["loss"]) for rank in ranks)
        assert loss == pytest.approx(float(gradients["loss"]), rel=1e-7)


def test_hidden_tokens_and_their_loss_are_those_of_transformers():
    folder = tiny.shared(tiny.tiny_bert)
    config = config_of(folder)
    description = described(config)
    model = model_of(config, description).double().eval()
    head = model.language_head
    assert head.is_new
    inputs = inputs_of(Featuriser(description), examples(CASES[0])[:1])
    ids = inputs["input_ids"]
    torch.manual_seed(4)
    (_,), (losses,) = model([("text", inputs)], with_auxiliary=True)
    torch.manual_seed(4)
    hidden, targets = head.mask_tokens(inputs)
    is_asked = targets != IGNORED_TARGET
    is_special = torch.isin(ids, head.special_tokens)
    num_tokens = (inputs["attention_mask"].bool() & ~is_special).sum()
    assert 0.1 < float(is_asked.sum() / num_tokens) < 0.6
    assert not (is_asked & is_special).any()
    assert torch.equal(hidden["input_ids"][~is_asked], ids[~is_asked])
    whole = AutoModelForMaskedLM.from_pretrained(folder).double().eval()
    weights = whole.state_dict()
    for name, tensor in model.state_dict().items():
        plain_name = name.removeprefix("language_head.whole.")
        plain_name = plain_name.replace("backbone.", "bert.")
        if plain_name in weights:
            weights[plain_name] = tensor
    embeddings = weights["bert.embeddings.word_embeddings.weight"]
    weights["cls.predictions.decoder.weight"] = embeddings
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"]
    whole.load_state_dict(weights)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        theirs = whole(hidden["input_ids"], attention_mask=mask, labels=targets)
    sums, counts = losses["masked_token"]
    loss = float((sums.sum() / counts.sum()).detach())
    assert loss == pytest.approx(float(theirs.loss), rel=1e-9)
    assert counts.tolist() == is_asked.sum(1).tolist()


def train_on_texts(folder, name, model, **more):
    """A short run on texts."""
    return vembed.train(
        {
            "model_name": str(model),
            "data_path": str(folder / "texts.jsonl"),
            "loss": "none",
            "batch_size": 8,
            "max_steps": 2,
            "report_to": [],
            "output_dir": str(folder / name),
            "learning_rate": 1e-2,
            "logging_steps": 1,
            **more,
        }
    )


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """An encoder that was trained on texts alone."""
    folder = tmp_path_factory.mktemp("adapted")
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in tiny.texts(40)])
    train_on_texts(folder, "first", tiny.shared(tiny.tiny_bert), max_steps=40)
    return folder


def test_an_adapted_model_has_learned_and_goes_on_with_its_head(adapted):
    first = metrics(adapted / "first", "loss/masked_token")
    final = adapted / "first" / "final"
    assert sum(first[-5:]) < 0.85 * sum(first[:5])
    _, info = AutoModelForMaskedLM.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"]
    train_on_texts(adapted, "second", final)
    assert metrics(adapted / "second", "loss/masked_token")[0] < 0.9 * first[0]


def test_a_contrastive_stage_follows(adapted):
    data = str(pairs(adapted / "pairs.jsonl", 20))
    final = adapted / "first" / "final"
    result = train_on_texts(adapted, "pairs", final, loss="infonce", data_path=data)
    assert vembed.Embedder(result.model_dir).encode(["a red cat"]).shape == (1, 32)
    assert "language" not in (adapted / "pairs" / "training_log.txt").read_text()


@pytest.mark.parametrize(
    ("make", "name", "options"),
    [
        (tiny.tiny_bert, "masked_token", {"loss": "infonce"}),
        (tiny.tiny_qwen3, "next_token", {"bidirectional_attention": True}),
        (tiny.tiny_vit, "next_token", {}),
    ],
)
def test_auxiliary_losses_without_a_head_are_refused(make, name, options):
    losses = {"auxiliary_losses": {name: 1.0}}
    config = config_of(tiny.shared(make), **losses, **options)
    with pytest.raises(vembed.UserError, match=f"{name} is not possible with"):
        has_language_head(config.objective, described(config))
