"""`vembed demo`: its data, its files, and one real run of the quick size."""

import importlib.util
from dataclasses import astuple
from types import SimpleNamespace

import pytest

from vembed import UserError
from vembed.cli.commands import demo
from vembed.cli.commands.demo import (
    FULL,
    FunctionPair,
    split_by_module,
    standard_library_pairs,
)
from vembed.config.loading import load_config
from vembed.data.near_duplicates import normal_text
from vembed.evaluation.report.record import read_run


@pytest.fixture(scope="module")
def pairs():
    return standard_library_pairs()


SOURCE = '''
import os


class Thing:
    @property
    async def reader(self, a,
                     b=1):
        """Read what is there.
        And more of it.

        Not this paragraph.
        """
        # a comment stays
        value = a + b

        return value

    def no_words(self):
        """Too short."""
        return 1

    def nothing_but_docstring(self):
        """A docstring without any code below."""

    def no_docstring(self):
        return 2


def twin(a, b):
    """Read what is there. And more of it."""
    return a
'''


def test_a_function_is_cut_out_as_it_is_written_less_its_docstring(tmp_path):
    for name in ("package/module.py", "package/test_module.py", "test/other.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (actual,) = standard_library_pairs(tmp_path)
    assert actual == FunctionPair(
        module="package.module",
        query="Read what is there. And more of it.",
        positive=(
            "async def reader(self, a,\n                 b=1):\n    # a comment stays\n    value = a + b\n\n"
            "    return value"
        ),
    )


def test_no_module_is_in_both_parts_and_the_split_is_the_same_each_time(pairs):
    train, val = split_by_module(pairs, FULL.num_train, FULL.num_val)
    assert (len(train), len(val)) == (FULL.num_train, FULL.num_val)
    packages = [{pair.module.split(".")[0] for pair in part} for part in (train, val)]
    assert packages[0].isdisjoint(packages[1])
    assert min(map(len, packages)) > 20, "many modules on both sides"
    assert split_by_module(list(pairs), FULL.num_train, FULL.num_val) == (train, val)
    trained = {normal_text(text) for pair in train for text in astuple(pair)[1:]}
    measured = [normal_text(text) for pair in val for text in astuple(pair)[1:]]
    assert len(set(measured)) == len(measured) == 2 * FULL.num_val
    assert trained.isdisjoint(measured)
    with pytest.raises(UserError, match=r"the demo needs 1,536 and 1,000"):
        split_by_module(pairs[:100], 1536, 1000)


def test_a_missing_and_an_empty_model_package_are_named(monkeypatch, tmp_path):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    message = r'"vembed\[demo\]"'
    for package in (None, spec):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, value=package: value)
        with pytest.raises(UserError, match=message):
            demo.demo(output=str(tmp_path / "demo"))
    assert not (tmp_path / "demo").exists()


def test_quick_demo_from_end_to_end(tmp_path, capsys, monkeypatch, pairs):
    # Reading the standard library takes seconds.
    monkeypatch.setattr(demo, "standard_library_pairs", lambda: pairs)
    monkeypatch.setattr(demo, "QUICK", demo.DemoSize(32, 40, 16, 48))
    folder = tmp_path / "demo # one: two"
    assert demo.demo(["report_to=none"], str(folder), quick=True) == 0
    record = read_run(folder)
    output = capsys.readouterr().out
    assert record.before["ndcg@10"] > 0.3, "the model is a real one"
    assert set(record.before) == set(record.after)
    assert record.dims == [384, 256, 128, 64]
    assert [line["step"] for line in record.steps] == [1, 2]
    name = "dim64/ndcg@10"
    assert f"{record.before[name]:.4f}" in output
    assert f"{record.after[name]:.4f}" in output
    config = load_config(folder / "demo.yaml")
    assert config.optimizer.learning_rate == "auto", (
        "`vembed demo use_lora=true` would learn little at the rate of all weights"
    )
    for path in (folder / "final", folder / "report.html", folder / "demo.yaml"):
        assert path.exists()
        assert str(path) in output
    assert (folder / "final" / "modules.json").is_file()
    assert "vembed train" in output
