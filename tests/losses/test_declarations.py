"""Attributes that a part spells in another way than its base class are named, for every kind of part."""

import pytest

from vembed.declarations import check_parts
from vembed.models.poolings.base import Mean
from vembed.training.optimizer_kinds import OptimizerKind, Sgd
from vembed.training.trackers.accelerate_trackers import TensorBoard


def method(_):
    """A method."""


@pytest.mark.parametrize(
    ("part", "misspelt", "declared"),
    [(Mean, "need_order", "needs_order"), (TensorBoard, "spelings", "spellings")],
)
def test_a_misspelt_attribute_is_named(part, misspelt, declared):
    (base,) = part.__bases__
    strange = type("Strange", (part,), {"name": "strange", misspelt: ""})
    # That of a class between the two, too; and other names are free.
    below = type("Below", (strange,), {})
    for kind in (strange, below):
        with pytest.raises(
            TypeError, match=f"{kind.__name__} .*`{misspelt}`.*`{declared}`"
        ):
            check_parts("part", base, (kind,), lambda _: ())
    free = type("Free", (part,), {"something_else": method})
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
