"""`vembed doctor --model-class`: good classes pass, and a broken rule gets the sentence that says which."""

import re

import pytest

from tests.commands import invoke
from tests.own.classes import BAG, BOTH, CONVOLUTIONS, FOLDER, FREE, FREE_SIZES, PACKED
from tests.tiny import read_json
from vembed.cli.check_class import check_model


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        (BAG, {"dropout": 0.2}),
        (CONVOLUTIONS, {}),
        (BOTH, {}),
        (FREE, FREE_SIZES),
        (FREE, {**FREE_SIZES, "use_latent": False}),
    ],
)
def test_good_classes_pass(named, arguments):
    actual = list(check_model(named, arguments))
    assert [broken for _, broken in actual if broken] == [] and len(actual) == 7
    if named == FREE:
        assert actual[-1][0].endswith(": DecoderBlock")


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "Padded": "padding changes the result of Padded",
        "Unused": r"no gradient reaches spare\.weight, spare\.bias of Unused",
        "Hidden": "draws from a hidden generator",
        "AlwaysDropped": "padding changes the result of AlwaysDropped",
        "MeanOfMeans": "the loss largest of MeanOfMeans is no sum over its inputs",
        "Forgetful": "gives something else after saving and loading",
    }.items(),
)
def test_a_broken_rule_gets_one_sentence(name, said):
    rules = dict(check_model(f"{FOLDER}/broken.py:{name}", {}))
    broken = [sentence for sentence in rules.values() if sentence]
    assert re.search(said, broken[0]) and "\n" not in broken[0]
    assert len(broken) == 1 or name == "AlwaysDropped"


def test_texts_in_one_row_are_tried_where_the_class_takes_them():
    rules = dict(check_model(PACKED, {}))
    assert len(rules) == 8 and not any(rules.values())
    assert "texts in one row, without padding, give the same result" in rules
    rules = dict(check_model(f"{FOLDER}/packed.py:Mixed", {}))
    (broken,) = filter(None, rules.values())
    assert "Mixed takes cu_seqlens, and texts in one row change each other" in broken


def test_the_command():
    words = ("doctor", "--model-class", BAG, "--model-config")
    assert "FSDP units" in invoke(*words, "{hidden_dim: 8}").output
    done = invoke(*words[:2], f"{FOLDER}/broken.py:Padded", code=1)
    assert "FAIL: padding changes the result" in done.output
    invoke(*words, "{size: 8}", code=2)


def test_init_makes_a_tokenizer(tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"what": "a red cat", "sees": "two zebras", "id": "jjj"}\n')
    target = tmp_path / "tokenizer"
    columns = ("--query", "what", "--column-mapping", "{sees: positive}")
    words = ("init", "--data", data, "--tokenizer", target, "--vocab-size", 300)
    invoke(*words, *columns)
    vocabulary = read_json(target / "tokenizer.json")["model"]["vocab"]
    assert "zebras" in "".join(vocabulary)
