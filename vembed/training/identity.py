"""Identity of a run: what besides its options must stay when it is resumed."""

from __future__ import annotations

from typing import Any

from vembed.config.schema import TrainConfig
from vembed.training.fingerprints import of_model
from vembed.training.parts import RunData


def identity_of(config: TrainConfig, data: RunData) -> dict[str, Any]:
    """Return the identity. A model that is not on this machine yet (a Hub name) has no fingerprint."""
    models = {"model_files": config.model_name, "image_model_files": config.image_model_name}
    prints = {name: of_model(one, config.model_revision) for name, one in models.items() if one is not None}
    return {
        "data": data.examples.fingerprint,
        "global_batch_size": data.examples_per_step,
        **{name: found for name, found in prints.items() if found is not None},
    }
