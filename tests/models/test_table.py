"""The table of families is the only place that knows them: no other module names one, and a new record is enough."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from tests import tiny
from tests.docs.pages import ROOT
from tests.files.saving import save
from vembed.config.entries import FamilyName
from vembed.config.schema import TrainConfig
from vembed.inference.embedder import Embedder
from vembed.models.families import table
from vembed.models.families.decisions import describe
from vembed.models.families.description import DESCRIPTION_FILE, ModelDescription

NAMED_ELSEWHERE = {
    "cli/start.py": "default of --family",
    "config/rules.py": "rules between the values of two options",
    "config/entries.py": "values of the option model_family",
    "config/spelling.py": "name of a loss",
    "models/families/table.py": "the records",
    "cli/commands/selftest.py": "description of a model made for the test",
}


def test_every_name_has_one_record():
    assert tuple(table.FAMILIES) == get_args(FamilyName)
    assert all(name == family.name for name, family in table.FAMILIES.items())
    types = [kind for family in table.FAMILIES.values() for kind in family.model_types]
    assert len(types) == len(set(types))


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
    assert bool(family.model_types) == (family.evidence == "model_type")
    assert family.pools_itself == (family.pooling == "own")
    assert (family.starter.image_model_name is not None) == family.has_two_models


def test_no_other_module_names_a_family():
    named = set()
    for path in sorted((ROOT / "vembed").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in get_args(FamilyName)):
            continue
        constants = {
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if constants & set(get_args(FamilyName)):
            named.add(str(path.relative_to(ROOT / "vembed")))
    assert named - {"families/table.py"} == set(NAMED_ELSEWHERE)


def test_a_family_is_added_by_its_record_alone(tmp_path, monkeypatch):
    """A family recognised by BERT's model type with another pooling: described, built, saved and used."""
    texts = ["a red cat", "two dogs in the snow", "rain"]
    source = tiny.shared(tiny.tiny_bert)
    added = replace(
        table.FAMILIES["text_encoder"],
        name="added",
        evidence="model_type",
        model_types=frozenset({"bert"}),
        pooling="max",
        pooling_reason="a test",
        longest_by_default=9,
    )
    monkeypatch.setitem(table.FAMILIES, "added", added)
    description = describe(TrainConfig(model_name=str(source), data_path="unused"))
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


def test_a_description_saved_by_version_01_is_read():
    description = describe(
        TrainConfig(model_name=str(tiny.shared(tiny.tiny_qwen3_vl)), data_path="unused")
    )
    saved = description.to_dict()
    saved["lanes"] = [
        "vision" if one == "multimodal" else one for one in saved.pop("modalities")
    ]
    assert saved["lanes"] == ["text", "vision"]
    assert ModelDescription.from_dict(saved).modalities == ("text", "multimodal")
