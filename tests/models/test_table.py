"""The contract of every family in the table: described, built, saved and used; and a record is enough for a new one."""

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

import vembed.models.families
from tests import tiny
from tests.built import described, model_of
from tests.docs.pages import ROOT
from tests.files.saving import save
from tests.models.families import pictures
from tests.parts import from_its_test, values_in
from vembed.config.schema import TrainConfig
from vembed.declarations import check_parts
from vembed.inference.embedder import Embedder
from vembed.models.families import table
from vembed.models.families.description import DESCRIPTION_FILE
from vembed.models.families.family import Family
from vembed.models.families.table import FamilyName
from vembed.saving.files import save_model

BOTH = f"{ROOT / 'tests/own/both.py'}:Both"


def test_every_name_has_one_record():
    assert tuple(table.FAMILIES) == get_args(FamilyName)
    assert all(name == family.name for name, family in table.FAMILIES.items())
    missing = []
    for module, value in values_in(vembed.models.families):
        if isinstance(value, Family) and value not in table.FAMILIES.values():
            missing.append(f"{value.name} of {module}")
    assert not missing, f"list these in vembed/models/families/table.py: {missing}"


def test_records_that_contradict_each_other_are_named():
    clip = table.FAMILIES["clip"]
    for names_of in (lambda family: (family.name,), lambda family: family.model_types):
        with pytest.raises(
            TypeError, match=r"model family clip: the name .* is that of"
        ):
            check_parts("model family", Family, (clip, replace(clip)), names_of)


@pytest.mark.parametrize(
    "family", table.FAMILIES.values(), ids=lambda family: family.name
)
def test_a_record_agrees_with_itself(family):
    towers = {"text": {"text"}, "image": {"vision"}, "multimodal": {"text", "vision"}}
    assert set(family.towers) == set().union(
        *(towers[modality] for modality in family.modalities)
    )
    assert set(family.projections) <= set(family.modalities) and set(
        family.adapter_targets
    ) <= set(family.towers)
    assert family.pools_itself == (family.pooling == "own")
    assert (family.starter.image_model_name is not None) == family.has_two_models


CASES = {
    "text_encoder": (tiny.tiny_bert, {}),
    "text_decoder": (tiny.tiny_qwen3, {}),
    "clip": (tiny.tiny_clip, {}),
    "siglip": (tiny.tiny_siglip, {}),
    "image_encoder": (tiny.tiny_dinov2, {}),
    "vision_language": (tiny.tiny_qwen3_vl, {}),
    "composed": (tiny.tiny_bert, {"image_model_name": tiny.tiny_dinov2}),
    "own_text_image": (tiny.tiny_bert, {"model_class": BOTH}),
}
"""Family -> a tiny model of it, with further options.

A new family NAME has the function `tiny_model` in tests/models/test_NAME.py.
"""


@pytest.mark.parametrize("name", table.FAMILIES)
def test_a_model_of_each_family_is_described_built_saved_and_used(name, tmp_path):
    make, expected = CASES.get(name) or (
        from_its_test("models", name, "tiny_model"),
        {},
    )
    source = tiny.shared(make)
    options = {
        key: value if isinstance(value, str) else str(tiny.shared(value))
        for key, value in expected.items()
    }
    if "model_class" in options:
        options |= {"model_name": BOTH, "tokenizer_name": str(source)}
    config = TrainConfig(
        **{"model_name": str(source), "data_path": "unused", **options}
    )
    model = model_of(config).eval()
    description = model.description
    assert description.family == name
    folder = save_model(tmp_path / "final", model, model.state_dict())
    embedder = Embedder(folder, mixed_precision="no", trust_remote_code=True)
    assert embedder.description.family == name
    inputs = pictures(2)
    if description.traits.reads_text:
        inputs = ["red cat", "parse"]
    vectors = embedder.encode(inputs)
    assert vectors.shape == (2, description.embedding_dim)
    embedder.model = model
    np.testing.assert_allclose(vectors, embedder.encode(inputs), atol=1e-6)


def test_a_family_is_added_by_its_record_alone(tmp_path, monkeypatch):
    """A family recognised by BERT's model type with another pooling: described, built, saved and used."""
    texts = ["a red cat", "two dogs in the snow", "rain"]
    source = tiny.shared(tiny.tiny_bert)
    added = replace(
        table.FAMILIES["text_encoder"],
        name="added",
        model_types=frozenset({"bert"}),
        pooling="max",
        pooling_reason="a test",
        longest_by_default=9,
    )
    monkeypatch.setitem(table.FAMILIES, "added", added)
    monkeypatch.setitem(table.FAMILY_OF_TYPE, "bert", added)
    description = described(TrainConfig(model_name=str(source), data_path="unused"))
    assert (description.family, description.pooling, description.max_length) == (
        "added",
        "max",
        9,
    )
    assert description.reasons["pooling"] == "a test"
    folder = save(source, tmp_path / "final")
    assert json.loads((folder / DESCRIPTION_FILE).read_text())["family"] == "added"
    same = save(
        source,
        tmp_path / "asked",
        model_family="text_encoder",
        pooling="max",
        max_length=9,
    )
    assert np.array_equal(Embedder(folder).encode(texts), Embedder(same).encode(texts))
