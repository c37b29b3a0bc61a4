"""The featuriser on texts: the token ids of Sentence Transformers, lengths known beforehand, one entry per input."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, ByT5Tokenizer

from tests import tiny
from tests.built import described
from tests.files.saving import config_of, load_in_sentence_transformers, save
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.errors import UserError

TEXTS = [
    *tiny.texts(6, seed=4, longest=30),
    "photo.jpg",
    "a/b/c",
    "Two\nlines  and   spaces",
    "z" * 400,
]
MODELS = [
    tiny.tiny_bert,
    tiny.tiny_roberta,
    tiny.tiny_qwen3,
    tiny.tiny_llama,
    tiny.tiny_gemma,
]


def featuriser(source, **options):
    """The featuriser of a model: a folder, or a function of tests.tiny that makes one."""
    cache_bytes = options.pop("cache_bytes", 2**20)
    return Featuriser(described(config_of(source, **options)), cache_bytes=cache_bytes)


def documents(*texts):
    return of_kind("document", *texts)


def of_kind(kind, *texts):
    return [(Item(text=text), kind) for text in texts]


def with_padding_on(side, source, directory):
    """The same model whose tokenizer pads on that side."""
    AutoModel.from_pretrained(source).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, padding_side=side).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("max_length", [5, 16, 64])
@pytest.mark.parametrize("make", MODELS)
def test_token_ids_are_those_of_sentence_transformers(make, max_length, tmp_path):
    prompt = "find this: "
    options = {"max_length": max_length, "query_prompt": prompt}
    theirs = load_in_sentence_transformers(save(make, tmp_path / "final", **options))
    mine = featuriser(make, **options)
    for kind, prefix in (("query", prompt), ("document", None)):
        features = mine.features(of_kind(kind, *TEXTS))
        batch = mine.collate(features)
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        expected = theirs.preprocess(TEXTS, prompt=prefix)
        assert torch.equal(ids, expected["input_ids"])
        assert torch.equal(mask, expected["attention_mask"])
        lengths = [feature.length for feature in features]
        assert lengths == mask.sum(dim=1).tolist()


def test_nothing_is_padded_where_all_are_of_one_length():
    mine = featuriser(tiny.tiny_qwen3)
    short, long = mine.features(documents("a", "the cat and the dog"))
    assert "attention_mask" in mine.collate([short, long])
    assert "attention_mask" not in mine.collate([short, short])


def test_equal_inputs_have_equal_keys_and_only_they():
    mine = featuriser(tiny.tiny_bert, query_prompt="find ", max_length=8)
    long = "cat dog bird fish horse house river mountain"
    features = mine.features(
        [
            (Item(text="a cat"), "query"),
            (Item(text="find a cat"), "document"),  # the same tokens, another content
            (Item(text="a cat"), "document"),
            (Item(text=f"{long} street"), "document"),  # the same after the cut
            (Item(text=f"{long} city"), "document"),
        ]
    )
    keys = [feature.key for feature in features]
    contents = [feature.content for feature in features]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] == keys[4]
    assert contents[0] == contents[2] != contents[1]
    assert contents[3] != contents[4]


def test_lower_casing_that_sentence_transformers_files_ask_for(tmp_path):
    folder = tiny.add_sentence_transformers_files(tiny.tiny_roberta(tmp_path))
    settings = {"max_seq_length": 32, "do_lower_case": True}
    tiny.write_json(tmp_path / "sentence_bert_config.json", settings)
    mine = featuriser(folder)
    upper, lower = mine.features(documents("The CAT", "the cat"))
    assert upper.key == lower.key
    saved = save(folder, tmp_path / "final")
    ids = load_in_sentence_transformers(saved).preprocess(["The CAT"])["input_ids"]
    assert torch.equal(ids, mine.collate([upper])["input_ids"])


def test_a_tokenizer_written_in_python_gives_its_own_ids(tmp_path):
    # Of bytes: others of its kind fill tables of a million characters.
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    tokenizer.save_pretrained(tmp_path)
    tiny.write_json(tmp_path / "config.json", {"model_type": "t5"})
    description = described(config_of(tiny.tiny_bert))
    mine = Featuriser(description.with_(source=str(tmp_path), max_length=9))
    batch = mine.collate(mine.features(documents(*TEXTS)))
    expected = tokenizer(TEXTS, truncation=True, max_length=9, padding=True)
    assert batch["input_ids"].tolist() == expected["input_ids"]


@pytest.mark.parametrize("make", MODELS)
def test_an_inputs_own_prompt_and_length_give_the_ids_of_a_run_with_these(make):
    mine = featuriser(make, max_length=64, query_prompt="find this: ")
    run = featuriser(make, max_length=9, query_prompt="other: ")
    for text in TEXTS:
        item = Item(text, prompt="other: ", max_length=9)
        changed, plain = mine.features([(item, "query"), (Item(text), "query")])
        (expected,) = run.features(of_kind("query", text))
        np.testing.assert_array_equal(changed.token_ids, expected.token_ids)
        assert changed.key != plain.key
        assert changed.content == plain.content


def test_a_text_is_tokenised_once_and_the_cache_is_bounded(monkeypatch):
    mine = featuriser(tiny.tiny_bert, cache_bytes=5_000)
    encode = Mock(wraps=mine.texts.encode)
    monkeypatch.setattr(mine.texts, "encode", encode)
    few = tiny.texts(5, seed=9)
    first = mine.features(documents(*few, *few))
    assert first[:5] == first[5:] == mine.features(documents(*few))
    ((_, tokenised, _),) = [call.args for call in encode.call_args_list if call.args[1]]
    assert list(tokenised) == few
    many = tiny.texts(500, seed=10)
    assert len(mine.features(documents(*many))) == 500
    assert len(mine._cache) < 20


def test_threads_may_share_a_featuriser():
    mine = featuriser(tiny.tiny_bert)
    units = documents(*tiny.texts(400, seed=5))
    features = featuriser(tiny.tiny_bert).features(units)

    def work(number):
        for place in np.random.default_rng(number).permutation(len(units)):
            (feature,) = mine.features([units[place]])
            assert feature.key == features[place].key

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_text_without_tokens_is_named(tmp_path):
    empty = tiny.byte_tokenizer(["<unk>"], "$A", unk_token="<unk>", pad_token="<unk>")
    empty.save_pretrained(tmp_path)
    description = described(config_of(tiny.tiny_bert)).with_(source=str(tmp_path))
    with pytest.raises(UserError, match="the text '' becomes no token at all"):
        Featuriser(description).features(documents(""))
