"""Pairs of options that contradict each other: what becomes of an earlier run, where validation data come from, and
what is rounded."""

from __future__ import annotations

from vembed.config.schema import TrainConfig


def contradictions(config: TrainConfig) -> list[tuple[tuple[str, ...], str]]:
    """Return the options involved and the message of each contradiction."""
    found: list[tuple[tuple[str, ...], str]] = []
    if config.run.resume is not False and config.run.overwrite:
        said = (
            f"resume: {str(config.run.resume).lower()} goes on with the run in output_dir and overwrite: true replaces it: "
            "keep one of them"
        )
        found.append((("resume", "overwrite"), said))
    if config.data.val_split is not None and config.data.val_data_path is not None:
        said = (
            f"val_split: {config.data.val_split:g} and val_data_path: {config.data.val_data_path} both give validation data: "
            "keep one of them"
        )
        found.append((("val_split", "val_data_path"), said))
    if config.model.quantize_weights is not None and (
        config.adapters.use_lora or config.adapters.use_qlora
    ):
        said = (
            f"quantize_weights: {config.model.quantize_weights} rounds the weights that are trained, and "
            f"{'use_lora' if config.adapters.use_lora else 'use_qlora'}: true trains adapters beside weights that are not: keep "
            "one of them"
        )
        found.append(
            (
                (
                    "quantize_weights",
                    "use_lora" if config.adapters.use_lora else "use_qlora",
                ),
                said,
            )
        )
    return found
