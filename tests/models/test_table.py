"""The contract of every family in the table: described, built, saved and used; and a record is enough for a new one."""

from typing import get_args

import numpy as np
import pytest

import vembed.models.families
from tests import tiny
from tests.built import model_of
from tests.docs.pages import ROOT
from tests.models.families import pictures
from tests.parts import from_its_test, values_in
from vembed.config.schema import TrainConfig
from vembed.inference.embedder import Embedder
from vembed.models.families import table
from vembed.models.families.family import Family, Forward
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


@pytest.mark.parametrize(
    "family", table.FAMILIES.values(), ids=lambda family: family.name
)
def test_a_record_agrees_with_itself(family):
    towers = {"text": {"text"}, "image": {"vision"}, "multimodal": {"text", "vision"}}
    expected = set().union(*(towers[modality] for modality in family.forward_kinds))
    assert set(family.towers) == expected
    assert set(family.forward_kinds.values()) <= set(get_args(Forward))
    assert set(family.projections) <= set(family.forward_kinds)
    assert set(family.adapter_targets) <= set(family.towers)
    assert family.pools_itself == (family.pooling == "own")
    assert (family.starter.image_model_name is not None) == family.is_composed


CASES = {
    "text_encoder": tiny.tiny_bert,
    "text_decoder": tiny.tiny_qwen3,
    "clip": tiny.tiny_clip,
    "siglip": tiny.tiny_siglip,
    "image_encoder": tiny.tiny_dinov2,
    "vision_language": tiny.tiny_qwen3_vl,
    "composed": tiny.tiny_bert,
    "own_text_image": tiny.tiny_bert,
}
"""Family -> a tiny model of it.

A new family NAME has the function `tiny_model` in tests/models/test_NAME.py.
"""


@pytest.mark.parametrize("name", table.FAMILIES)
def test_a_model_of_each_family_is_described_built_saved_and_used(name, tmp_path):
    make = CASES.get(name) or from_its_test("models", name, "tiny_model")
    source = str(tiny.shared(make))
    options = {"model_name": source}
    if name == "composed":
        options["image_model_name"] = str(tiny.shared(tiny.tiny_dinov2))
    if name == "own_text_image":
        options = {"model_name": BOTH, "tokenizer_name": source, "model_class": BOTH}
    config = TrainConfig(data_path="unused", **options)
    model = model_of(config).eval()
    description = model.description
    assert description.family == name
    folder = save_model(tmp_path / "final", model, model.state_dict())
    embedder = Embedder(folder, mixed_precision="no", trust_remote_code=True)
    assert embedder.description.family == name
    inputs = pictures(2)
    if "text" in description.modalities:
        # A text that looks like a path is a text.
        inputs = ["red cat", "cats/dog.jpg"]
    vectors = embedder.encode(inputs)
    assert vectors.shape == (2, description.embedding_dim)
    embedder.model = model
    np.testing.assert_allclose(vectors, embedder.encode(inputs), atol=1e-6)
