"""The losses that vembed has, and what follows from their declarations. Imports no torch.

A new loss needs its class in a file of this folder, its entry in the list below, and a
function `reference` in tests/losses/test_NAME.py that computes it plainly.
"""

from collections.abc import Sequence
from typing import get_args

from pydantic.fields import FieldInfo

from vembed.declarations import check_parts, text_of_values
from vembed.losses.contrastive import Circle, InfoNCE, Sigmoid, Triplet
from vembed.losses.declaration import (
    Follows,
    LossDeclaration,
    Negatives,
    RequiredRecords,
)
from vembed.losses.scored import (
    BCE,
    KL,
    MSE,
    Angle,
    CoSENT,
    Cosine,
    Lambda,
    Listwise,
    MarginMSE,
    RankNet,
    ScoreMSE,
)
from vembed.losses.vectors import (
    Anchor,
    Embedding,
    NoLoss,
    Relational,
    SpreadOut,
)

_CLASSES: tuple[type[LossDeclaration], ...] = (
    InfoNCE,
    Sigmoid,
    Circle,
    Triplet,
    CoSENT,
    Angle,
    Cosine,
    KL,
    MarginMSE,
    ScoreMSE,
    Listwise,
    RankNet,
    BCE,
    Lambda,
    MSE,
    Embedding,
    Relational,
    SpreadOut,
    Anchor,
    NoLoss,
)


def check_losses(
    classes: Sequence[type[LossDeclaration]],
) -> tuple[dict[str, type[LossDeclaration]], dict[str, FieldInfo]]:
    """Return the losses and their options, by name. Raise TypeError for a declaration that lacks something."""
    losses = check_parts(
        "loss",
        LossDeclaration,
        classes,
        lambda loss: (loss.name,),
        needed=("name", "summary", "records", "negatives"),
        allowed={
            "records": get_args(RequiredRecords),
            "negatives": get_args(Negatives),
            "follows": get_args(Follows),
        },
    )
    owners: dict[str, type[LossDeclaration]] = {}
    for loss in classes:
        where = f"loss {loss.__name__} of {loss.__module__}"
        for option, field in loss.model_fields.items():
            if field.description is None:
                raise TypeError(f"{where} has no text under its option `{option}`")
            # Its option is one of every run, also of those with another loss.
            if field.is_required():
                raise TypeError(f"{where} has no default for its option `{option}`")
            owner = owners.setdefault(option, loss)
            known = owner.model_fields[option]
            if (known.annotation, known.default) != (field.annotation, field.default):
                raise TypeError(
                    f"{where} has `{option}: {field.annotation} = {field.default}`, and {owner.__name__} has "
                    f"`{option}: {known.annotation} = {known.default}`: an option that losses share has one type and default"
                )
    options = {name: owner.model_fields[name] for name, owner in owners.items()}
    return losses, options


LOSSES, LOSS_OPTIONS = check_losses(_CLASSES)
"""Every loss, and every option of the losses, by name."""
_RECORDS: dict[RequiredRecords, str] = {
    "matches": "pairs",
    "scores": "pairs with scores",
    "pairs": "pairs",
    "texts": "pairs or single texts",
}
_NEGATIVES: dict[Negatives, str] = {
    "unread": "",
    "optional": ", negatives optional",
    "some": ", with negatives",
    "each": ", negatives in every record",
}
_TEACHERS: dict[Follows, str] = {
    "nobody": "",
    "scores_or_teacher": ", graded scores or a teacher",
    "teacher": ", scores of a teacher or of the data",
    "vectors": ", vectors of a teacher",
    "start_model": "",
}


def _sentence(loss: type[LossDeclaration]) -> str:
    data = _RECORDS[loss.records] + _NEGATIVES[loss.negatives] + _TEACHERS[loss.follows]
    return f"{loss.summary}. Data: {data}"


LOSS_TEXT = text_of_values(
    "What is trained, and the data that it needs.",
    {name: _sentence(loss) for name, loss in LOSSES.items()},
)
"""Text of the option `loss`."""


LOSS_ENTRY_ONLY = (
    "guide_margin",
    "hardness_alpha",
    "hardness_scope",
    "focal_gamma",
    "mix_negatives",
    "distill_candidates",
)
"""Options of losses that only entries of `losses` have, since few runs set them."""


def read_options(name: str) -> set[str]:
    """Return the names of the config's options that a loss reads."""
    loss = LOSSES[name]
    options = set(loss.model_fields)
    if loss.negatives != "unread":
        options.add("max_negatives")
    return options
