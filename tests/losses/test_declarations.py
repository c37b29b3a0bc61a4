"""Attributes that a part spells in another way than its base class are named, for every kind of part."""

import pytest

from vembed.data.formats.base import Format
from vembed.data.formats.json_lines import JsonLines
from vembed.declarations import check_parts
from vembed.models.poolings.base import Mean, Pooling
from vembed.training.optimizer_kinds import OptimizerKind, Sgd
from vembed.training.trackers import TensorBoard, Tracker


def method(_):
    """A method."""


@pytest.mark.parametrize(
    ("base", "part", "misspelt", "declared"),
    [
        (Pooling, Mean, {"need_order": True}, "needs_order"),
        (Format, JsonLines, {"number_are_text": True}, "numbers_are_text"),
        (OptimizerKind, Sgd, {"train_half": True}, "trains_half"),
        (Tracker, TensorBoard, {"spelings": "tb"}, "spellings"),
    ],
)
def test_a_misspelt_attribute_is_named(base, part, misspelt, declared):
    body = {"name": "strange", "__module__": __name__, **misspelt}
    strange = type("Strange", (part,), body)
    (name,) = misspelt
    with pytest.raises(TypeError, match=f"Strange .*`{name}`.*`{declared}`"):
        check_parts("part", base, (strange,), lambda _: ())
    # That of a class between the two, too; and other names are free.
    below = type("Below", (strange,), {"__module__": __name__})
    with pytest.raises(TypeError, match=f"Below .*`{name}`"):
        check_parts("part", base, (below,), lambda _: ())
    free = type("Free", (part,), {"something_else": method, "__module__": __name__})
    check_parts("part", base, (free,), lambda _: ())


def test_another_optimizers_spelling_is_taken_and_a_size_of_nothing_is_declared():
    def names_of(kind):
        return (kind.name, *kind.spellings.split())

    body = {"name": "strange", "__module__": __name__, "spellings": "sgd"}
    strange = type("Strange", (Sgd,), body)
    with pytest.raises(TypeError, match=r"Strange .*: the name sgd is that of .*Sgd"):
        check_parts("optimizer", OptimizerKind, (Sgd, strange), names_of)
    # SGD has a state of 0 bytes.
    needed = ("state_bytes",)
    check_parts("optimizer", OptimizerKind, (Sgd,), names_of, needed=needed)
    bare = type("Bare", (OptimizerKind,), {"name": "bare", "__module__": __name__})
    with pytest.raises(TypeError, match=r"Bare .*`state_bytes`, `build`"):
        check_parts("optimizer", OptimizerKind, (bare,), names_of, needed=needed)
