"""What a class misspells, declares in vain or takes over from another part is named, for every kind of part."""

from typing import ClassVar

import pytest

from vembed.data.formats.delimited import TsvFile
from vembed.data.formats.json_lines import JsonLines
from vembed.data.formats.table import check_formats
from vembed.declarations import IDENTITY, check_parts
from vembed.losses.table import LOSSES, check_losses
from vembed.models.poolings.base import Mean
from vembed.models.poolings.table import check_poolings
from vembed.training.trackers.accelerate_trackers import TensorBoard


def method(_):
    """A method."""


@pytest.mark.parametrize(
    ("part", "misspelt", "declared"),
    [(Mean, "need_order", "needs_order"), (TensorBoard, "spelings", "spellings")],
)
def test_a_misspelt_attribute_is_named(part, misspelt, declared):
    (base,) = part.__bases__
    identity = dict.fromkeys(IDENTITY & vars(part).keys(), "strange")
    strange = type("Strange", (part,), {**identity, misspelt: ""})
    # That of a class between the two, too; and other names of methods are free.
    below = type("Below", (strange,), identity)
    for kind in (strange, below):
        with pytest.raises(
            TypeError, match=f"{kind.__name__} .*`{misspelt}`.*`{declared}`"
        ):
            check_parts("part", base, (kind,), lambda _: ())
    free = type("Free", (part,), {**identity, "something_else": method})
    check_parts("part", base, (free,), lambda _: ())


class Quoted(JsonLines):
    """With a declaration that no format has."""

    endings = (".quoted",)
    title = "quoted"
    own: ClassVar[int] = 3
    quote_character = ";"


class Semicolons(TsvFile):
    """Without a title."""

    endings = (".semicolons",)


class OtherTriplet(LOSSES["triplet"]):
    """Without a sentence for the documentation."""

    name = "other_triplet"


class Half(Mean):
    """Another pooling, which servers would take for the mean."""

    name = "half"
    spellings = ""
    modes = ()


def test_a_declaration_that_nothing_reads_is_named_with_those_that_are_read():
    message = "Quoted .*`quote_character`.* columns, endings, .*`quote_character: "
    with pytest.raises(TypeError, match=message):
        check_formats((Quoted,))


@pytest.mark.parametrize(
    ("check", "part", "attribute", "other"),
    [
        (check_formats, Semicolons, "title", "TsvFile"),
        (check_losses, OtherTriplet, "summary", "Triplet"),
        (check_poolings, Half, "servers", "Mean"),
    ],
)
def test_what_a_part_takes_over_from_another_part_is_named(
    check,
    part,
    attribute,
    other,
):
    with pytest.raises(TypeError, match=f"{part.__name__} .*`{attribute}` .*{other}"):
        check((part,))


class OneMode(Half):
    """With a text in which the names of two modes are."""

    name = "one_mode"
    spellings = ""
    servers = {}  # noqa: RUF012
    modes = "weightedmean"


def test_a_text_in_place_of_several_names_is_refused():
    with pytest.raises(TypeError, match=r"OneMode .*'weightedmean' where"):
        check_poolings((OneMode,))
