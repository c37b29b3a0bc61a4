"""The MODEL argument of the commands: a model folder, a Hub name, a run (its final/), or a checkpoint of a run."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vembed.errors import UserError

log = logging.getLogger("vembed")


@contextmanager
def usable_model(name: str) -> Iterator[str]:
    """Yield a model that can be loaded: `name` itself, or a temporary model made from a checkpoint."""
    path = Path(name).expanduser()
    from vembed.weights.checkpoints import (  # imported late: torch takes seconds
        is_checkpoint,
        whole_model,
    )

    if not is_checkpoint(path):
        yield name
        return
    # Each rank would make a model of its own, in a folder that the others do not know.
    if os.environ.get("LOCAL_RANK") is not None:
        raise UserError(
            f"{name} is a checkpoint: with --nproc, first make a model of it that all processes read "
            f"(`vembed export {name} FOLDER`)"
        )
    with tempfile.TemporaryDirectory(prefix="vembed-checkpoint-") as folder:
        made = whole_model(name, Path(folder) / "model")
        assert made is not None
        yield str(made)
