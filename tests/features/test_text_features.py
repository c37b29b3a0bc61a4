"""The featuriser on texts: the token ids of Sentence Transformers, lengths known beforehand, one entry per input."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests import tiny
from tests.built import described
from tests.files.saving import load_in_sentence_transformers, save
from vembed.config.schema import TrainConfig
from vembed.data.examples import ImageRef, Item
from vembed.data.features import Featuriser
from vembed.errors import UserError

TEXTS = [
    *tiny.texts(6, seed=4, longest=30),
    "photo.jpg",
    "a/b/c",
    "Two\nlines  and   spaces",
    "z" * 400,
]
MODELS = {
    "bert": tiny.tiny_bert,
    "roberta": tiny.tiny_roberta,
    "qwen3": tiny.tiny_qwen3,
    "llama": tiny.tiny_llama,
    "gemma": tiny.tiny_gemma,
}


def featuriser(source, **options):
    cache = options.pop("cache_bytes", 2**20)
    config = TrainConfig.model_validate(
        {"model_name": str(source), "data_path": "unused", **options}
    )
    return Featuriser(described(config), cache_bytes=cache)


def documents(*texts):
    return [(Item(text=text), "document") for text in texts]


def with_padding_on(side, source, directory):
    """The same model whose tokenizer pads on that side."""
    from transformers import AutoModel, AutoTokenizer

    AutoModel.from_pretrained(source).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, padding_side=side).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("max_length", [5, 16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_token_ids_are_those_of_sentence_transformers(name, max_length, tmp_path):
    source = tiny.shared(MODELS[name])
    folder = save(
        source, tmp_path / "final", max_length=max_length, query_prompt="find this: "
    )
    theirs = load_in_sentence_transformers(folder)
    mine = featuriser(source, max_length=max_length, query_prompt="find this: ")
    for kind, prompt in (("query", "find this: "), ("document", None)):
        features = mine.features([(Item(text=text), kind) for text in TEXTS])
        expected = theirs.preprocess(TEXTS, prompt=prompt)
        batch = mine.collate(features)
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        assert torch.equal(ids, expected["input_ids"])
        assert torch.equal(mask, expected["attention_mask"])
        lengths = [feature.length for feature in features]
        assert lengths == mask.sum(dim=1).tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_goes_to_the_side_that_the_tokenizer_says(side, tmp_path):
    source = with_padding_on(side, tiny.shared(tiny.tiny_qwen3), tmp_path)
    built = featuriser(source)
    short, long = built.features(documents("a", "the cat and the dog"))
    batch = built.collate([short, long])
    mask = [0] * (long.length - short.length) + [1] * short.length
    assert batch["attention_mask"].tolist() == [
        mask if side == "left" else mask[::-1],
        [1] * long.length,
    ]
    assert "attention_mask" not in built.collate([short, short])  # nothing is padded


def test_equal_inputs_have_equal_keys_and_only_they():
    mine = featuriser(tiny.shared(tiny.tiny_bert), query_prompt="find ", max_length=8)
    long = "cat dog bird fish horse house river mountain"
    items = [
        (Item(text="a cat"), "query"),
        (Item(text="find a cat"), "document"),  # the same tokens, another content
        (Item(text="a cat"), "document"),
        (Item(text=long + " street"), "document"),  # the same after the cut
        (Item(text=long + " city"), "document"),
    ]
    keys = [feature.key for feature in mine.features(items)]
    contents = [feature.content for feature in mine.features(items)]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] == keys[4]
    assert contents[0] == contents[2] != contents[1]
    assert contents[3] != contents[4]


def test_lower_casing_that_sentence_transformers_files_ask_for(tmp_path):
    folder = tiny.add_sentence_transformers_files(tiny.tiny_roberta(tmp_path))
    (tmp_path / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 32, "do_lower_case": True})
    )
    mine = featuriser(folder)
    upper, lower = mine.features(documents("The CAT", "the cat"))
    assert upper.key == lower.key
    saved = save(folder, tmp_path / "final")
    ids = load_in_sentence_transformers(saved).preprocess(["The CAT"])["input_ids"]
    assert ids.tolist() == mine.collate([upper])["input_ids"].tolist()


def test_a_tokenizer_written_in_python_gives_its_own_ids(tmp_path):
    from transformers import (
        ByT5Tokenizer,  # bytes; others of its kind fill tables of a million characters
    )

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    tokenizer.save_pretrained(tmp_path)
    tiny.write_json(tmp_path / "config.json", {"model_type": "t5"})
    description = described(
        TrainConfig(model_name=str(tiny.shared(tiny.tiny_bert)), data_path="unused")
    )
    mine = Featuriser(description.with_(source=str(tmp_path), max_length=9))
    batch = mine.collate(mine.features([(Item(text=text), "query") for text in TEXTS]))
    expected = tokenizer(TEXTS, truncation=True, max_length=9, padding=True)[
        "input_ids"
    ]
    assert batch["input_ids"].tolist() == expected


@pytest.mark.parametrize("name", MODELS)
def test_an_inputs_own_prompt_and_length_give_the_ids_of_a_run_with_these(name):
    source = tiny.shared(MODELS[name])
    prefixed = featuriser(source, max_length=64, query_prompt="find this: ")
    run = featuriser(source, max_length=9, query_prompt="other: ")
    for text in TEXTS:
        item = Item(text, prompt="other: ", max_length=9)
        (mine,) = prefixed.features([(item, "query")])
        (plain,) = prefixed.features([(Item(text), "query")])
        (expected,) = run.features([(Item(text), "query")])
        np.testing.assert_array_equal(mine.token_ids, expected.token_ids)
        assert mine.key != plain.key and mine.content == plain.content


def test_a_text_is_tokenised_once_and_the_cache_is_bounded(monkeypatch):
    mine = featuriser(tiny.shared(tiny.tiny_bert), cache_bytes=5_000)
    tokenised = []
    encode = mine.texts.encode

    def counted(prompts, texts, limits):
        tokenised.extend(texts)
        return encode(prompts, texts, limits)

    monkeypatch.setattr(mine.texts, "encode", counted)
    few = tiny.texts(5, seed=9)
    first = mine.features(documents(*few, *few))
    assert tokenised == few
    assert first[:5] == first[5:] == mine.features(documents(*few))
    many = tiny.texts(500, seed=10)
    assert len(mine.features(documents(*many))) == 500
    assert len(mine._cache) < 20


def test_threads_may_share_a_featuriser():
    mine, alone = (featuriser(tiny.shared(tiny.tiny_bert)) for _ in range(2))
    units = documents(*tiny.texts(400, seed=5))
    expected = [feature.key for feature in alone.features(units)]

    def work(number):
        keys = {}
        for place in np.random.default_rng(number).permutation(len(units)):
            (feature,) = mine.features([units[place]])
            keys[int(place)] = feature.key
        return [keys[place] for place in range(len(units))]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [expected] * 4


def test_what_a_text_model_cannot_embed_is_named(tmp_path):
    mine = featuriser(tiny.shared(tiny.tiny_bert))
    with pytest.raises(UserError, match="embeds one text at a time, and got 1 image"):
        mine.features([(Item(images=(ImageRef(path="x.jpg"),)), "query")])
    with pytest.raises(UserError, match="and got 0 image"):
        mine.features([(Item(), "query")])
    adds_nothing = tiny.byte_tokenizer(
        ["<unk>"], "$A", unk_token="<unk>", pad_token="<unk>"
    )
    adds_nothing.save_pretrained(tmp_path)
    mine = Featuriser(mine.description.with_(source=str(tmp_path)))
    with pytest.raises(UserError, match="the text '' becomes no token at all"):
        mine.features(documents(""))
