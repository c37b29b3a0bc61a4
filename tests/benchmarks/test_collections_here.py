"""Collections of the benchmarks: no picture is in both sets, and one that is not installed says so."""

from pathlib import Path

import pytest

from benchmarks import collections_here
from benchmarks.collections_here import manual, pictures
from benchmarks.tiny_models import MODELS, made


def test_no_picture_is_in_both_sets():
    both = pictures(400, 100)
    train, val = (
        [Path(row["positive"]["image"]).read_bytes() for row in rows]
        for rows in (both.train, both.val)
    )
    assert len(set(train)) == 400
    assert len(set(val)) == 100
    assert not set(train) & set(val)
    assert {row["query"] for row in both.train} == {row["query"] for row in both.val}


def test_without_manual_pages_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(collections_here, "MANUAL", tmp_path)
    with pytest.raises(SystemExit, match="holds nothing to make pairs of"):
        manual(300, 100)


def test_a_model_is_made_once(tmp_path, monkeypatch):
    calls = []

    def small(folder):
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        return folder

    monkeypatch.setitem(MODELS, "decoder", small)
    assert (
        made("decoder", tmp_path) == made("decoder", tmp_path) == tmp_path / "decoder"
    )
    assert len(calls) == 1
