"""Names of parameters, whatever wraps the model."""

from __future__ import annotations

WRAPPERS = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
)
"""Components that FSDP1, checkpointing and compilation add to names."""


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the components that wrappers add."""
    return ".".join(
        part
        for part in name.removeprefix("module.").split(".")
        if part and part not in WRAPPERS
    )
