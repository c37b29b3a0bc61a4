"""Training by a published model's own language-model head: gradients, files, refusals."""

import json
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import vembed
from tests import tiny
from tests.built import described, model_of
from tests.harness import run_ranks
from tests.parity.engine import (
    Case,
    build,
    examples,
    full_gradients,
    step_on_rank,
    worst_error,
)
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
    Case("kept-graphs", micro="odd", cache=False),
]


def tied_qwen(directory):
    """A Qwen3 whose head is its embedding matrix."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

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


DRAWN = LanguageHead.hide


def hidden_by_content(head, inputs):
    """An encoder's hidden tokens, a function of the tokens alone: the same on any number of ranks."""
    if head.is_causal:
        return DRAWN(head, inputs)
    ids = inputs["input_ids"]
    chosen = (ids % 3 == 0) & ~torch.isin(ids, head.special_tokens)
    assert head.mask_token is not None
    hidden = {**inputs, "input_ids": ids.masked_fill(chosen, head.mask_token)}
    return hidden, ids.masked_fill(~chosen, IGNORED_TARGET)


def on_ranks(strategy):
    """The gradients of each model and case through the real step on this rank, and its part of the loss."""
    actual = []
    with (
        mock.patch.object(LanguageHead, "hide", hidden_by_content),
        start_session(config_of(folders()[0], strategy=strategy)) as session,
    ):
        for folder in folders():
            for case in CASES:
                config = config_of(
                    folder, strategy=strategy, gradient_checkpointing=strategy == "fsdp"
                )
                actual.append(step_on_rank(case, config, session, config.objective)[0])
    return actual


def wanted(folder):
    """The mean over the tokens of every text of the batch, as often as it occurs, by the head's matrix."""
    model, _, featuriser = build(config_of(folder, padding_free=False))
    items = [
        (item, kind)
        for example in examples(CASES[0])
        for item, kind in occurrences(example)
    ]
    inputs = featuriser.collate(featuriser.features(items))
    assert model.language_head is not None
    if (
        not model.language_head.is_causal
    ):  # its loss is compared with Transformers' below
        with mock.patch.object(LanguageHead, "hide", hidden_by_content):
            _, (losses,) = model([("text", inputs)], with_auxiliary=True)
        sums, counts = losses["masked_token"]
        mean = sums.sum() / counts.sum()
        mean.backward()
        return {**full_gradients(model), "loss": mean.detach()}
    labels = inputs["input_ids"].masked_fill(
        inputs["attention_mask"] == 0, IGNORED_TARGET
    )
    labels[:, 1:].masked_fill_(
        inputs["attention_mask"][:, :-1] == 0, IGNORED_TARGET
    )  # no token tells the first of a text
    states = model.backbone(**inputs).last_hidden_state
    assert not model.language_head.is_new
    parameters = dict(model.named_parameters())
    logits = (
        states
        @ parameters.get(
            "language_head.whole.lm_head.weight",
            parameters["backbone.embed_tokens.weight"],
        ).T
    )
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    loss.backward()
    # The same by Transformers, whose norms and losses are float32.
    theirs = AutoModelForCausalLM.from_pretrained(folder)(
        **inputs, labels=labels
    ).loss.detach()
    assert float(theirs) == pytest.approx(float(loss.detach()), rel=1e-5)
    return {**full_gradients(model), "loss": loss.detach()}


def occurrences(example):
    later = [(item, "document") for item in (*example.positives, *example.negatives)]
    return [(example.query, "query"), *later]


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_gradients_are_those_of_the_mean_over_all_tokens(strategy):
    ranks = (
        [on_ranks(strategy)]
        if strategy == "single"
        else run_ranks(on_ranks, 2, strategy, process_group=False)
    )
    expected = [wanted(folder) for folder in folders() for _ in CASES]
    for number, line in enumerate(expected):
        name, error = worst_error(ranks[0][number], line)
        assert error < ROUNDED, (number, name, error)
        assert sum(float(rank[number]["loss"]) for rank in ranks) == pytest.approx(
            float(line["loss"]), rel=1e-7
        )


def test_hidden_tokens_and_their_loss_are_those_of_transformers():
    from transformers import AutoModelForMaskedLM

    folder = tiny.shared(tiny.tiny_bert)
    config = config_of(folder)
    description = described(config)
    model = model_of(config, description).double().eval()
    assert model.language_head is not None and model.language_head.is_new
    featuriser = Featuriser(description)
    inputs = featuriser.collate(
        featuriser.features(
            [(item, kind) for item, kind in occurrences(examples(CASES[0])[0])]
        )
    )
    torch.manual_seed(4)
    (_,), (losses,) = model([("text", inputs)], with_auxiliary=True)
    torch.manual_seed(4)
    hidden, targets = model.language_head.hide(inputs)
    printed = hidden["input_ids"]
    asked = targets != IGNORED_TARGET
    special = torch.isin(inputs["input_ids"], model.language_head.special_tokens)
    assert (
        0.1
        < float(asked.sum() / (inputs["attention_mask"].bool() & ~special).sum())
        < 0.6
    )
    assert not bool((asked & special).any()) and bool(
        (printed[~asked] == inputs["input_ids"][~asked]).all()
    )
    whole = AutoModelForMaskedLM.from_pretrained(folder).double().eval()
    weights = {
        name.removeprefix("language_head.whole."): tensor
        for name, tensor in model.state_dict().items()
    }
    weights |= {
        name.replace("backbone.", "bert."): tensor
        for name, tensor in weights.items()
        if name.startswith("backbone.")
    }
    weights["cls.predictions.decoder.weight"] = weights[
        "bert.embeddings.word_embeddings.weight"
    ]
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"]
    whole.load_state_dict(
        {name: tensor for name, tensor in weights.items() if name in whole.state_dict()}
    )
    with torch.no_grad():
        logits = whole(
            input_ids=printed, attention_mask=inputs["attention_mask"]
        ).logits
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )
    sums, counts = losses["masked_token"]
    assert float((sums.sum() / counts.sum()).detach()) == pytest.approx(
        float(expected), rel=1e-9
    )
    assert counts.tolist() == asked.sum(1).tolist()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """An encoder that was trained on texts alone."""
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in tiny.texts(40, seed=2))
    )
    pairs = [
        {"query": entry, "positive": other}
        for entry, other in zip(*[iter(tiny.texts(40, seed=3))] * 2, strict=True)
    ]
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps(pair) + "\n" for pair in pairs)
    )
    vembed.train(
        settings(
            folder, "first", model_name=str(tiny.shared(tiny.tiny_bert)), max_steps=40
        )
    )
    return folder


def settings(folder, name, **more):
    """A short run on texts."""
    return {
        "data_path": str(folder / "texts.jsonl"),
        "loss": "none",
        "batch_size": 8,
        "max_steps": 2,
        "report_to": [],
        "output_dir": str(folder / name),
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "console": "quiet",
        **more,
    }


def losses_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        json.loads(line)["loss/masked_token"]
        for line in lines
        if "loss/masked_token" in json.loads(line)
    ]


def test_an_adapted_model_has_learned_and_keeps_its_head(adapted):
    from transformers import AutoModelForMaskedLM

    first = losses_of(adapted / "first")
    assert sum(first[-5:]) < 0.85 * sum(first[:5])
    _, info = AutoModelForMaskedLM.from_pretrained(
        adapted / "first" / "final", output_loading_info=True
    )
    assert not info["missing_keys"]
    vembed.train(
        settings(adapted, "second", model_name=str(adapted / "first" / "final"))
    )
    assert losses_of(adapted / "second")[0] < 0.9 * first[0], (
        "it goes on with the head of the first stage"
    )


def test_a_contrastive_stage_follows(adapted):
    inputs = settings(
        adapted, "pairs", model_name=str(adapted / "first" / "final"), loss="infonce"
    )
    result = vembed.train({**inputs, "data_path": str(adapted / "pairs.jsonl")})
    assert vembed.Embedder(result.model_dir).encode(["a red cat"]).shape == (1, 32)
    assert "language" not in (adapted / "pairs" / "training_log.txt").read_text()


def test_what_cannot_be_is_refused():
    bert, qwen, vit = (
        tiny.shared(entry) for entry in (tiny.tiny_bert, tiny.tiny_qwen3, tiny.tiny_vit)
    )

    def asks(folder, **options):
        config = config_of(folder, **options)
        return has_language_head(config.objective, described(config))

    assert asks(bert) and asks(qwen) and not asks(vit)
    assert asks(
        qwen, loss="infonce", auxiliary_losses={"next_token": 0.1}
    ) and not asks(qwen, loss="infonce")
    for folder, name, options in (
        (bert, "masked_token", {"loss": "infonce"}),
        (qwen, "next_token", {"bidirectional_attention": True}),
        (vit, "next_token", {}),
    ):
        with pytest.raises(vembed.UserError, match=f"{name} is not possible with"):
            asks(folder, auxiliary_losses={name: 1.0}, **options)
