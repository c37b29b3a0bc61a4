"""Identity of a run: what besides its options must stay when it is resumed."""

from __future__ import annotations

from typing import Any

from vembed.config.schema import TrainConfig
from vembed.config.terms import data_entries
from vembed.parallel.meeting import require_equal
from vembed.training.fingerprints import of_model
from vembed.training.image_files import of_evaluation, of_examples
from vembed.training.parts import RunData

OF_TASK = {"losses", "temperature", "batch_size", "global_batch_size"}
"""Options of a source that are no part of the data's fingerprint."""


def identity_of(config: TrainConfig, data: RunData) -> dict[str, Any]:
    """Return the identity. A model that is not on this machine yet (a Hub name) has no fingerprint."""
    models = {
        "model_files": config.model.model_name,
        "image_model_files": config.model.image_model_name,
    }
    prints = {
        name: of_model(one, config.model.model_revision)
        for name, one in models.items()
        if one is not None
    }
    tasks = [
        one.model_dump(mode="json", include=OF_TASK, exclude_none=True)
        for one in data_entries(config)
    ]
    prints["image_files"] = of_examples(data.examples)
    return {
        "data": data.examples.fingerprint,
        "tasks": tasks if any(tasks) else [],
        "global_batch_size": data.examples_per_step,
        **{name: found for name, found in prints.items() if found is not None},
    }


def require_same_data(identity: dict[str, Any], data: RunData) -> None:
    """Raise the same UserError on every rank unless all have read the same data, with the same images. Collective."""
    require_equal(
        "the data's content",
        data.examples.fingerprint,
        "give every machine the same data_path",
    )
    images = [identity.get("image_files"), of_evaluation(data.evaluation)]
    for name, found in zip(
        ("the data's", "the validation data's"), images, strict=True
    ):
        require_equal(
            f"the content of {name} image files",
            found,
            "give every machine the same images",
        )
