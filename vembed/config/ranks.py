"""Options that may differ between the ranks of a run, each with its reason. All others must be equal."""

from __future__ import annotations

from vembed.config.schema import option_fields
from vembed.config.values import NamesFiles

MAY_DIFFER = {
    "output_dir": "machines may mount the shared folder under other names; all must see there what rank 0 writes",
    "image_root": "machines may keep the images in other folders",
    "accelerate_config": "the settings in the file are compared, not its place",
    "num_processes": "each launcher counts for its own machine; the number of processes of the whole run is compared",
    "num_workers": "threads of each process, by the cores of its machine",
    "console": "the console of rank 0 alone shows the run",
    "log_file": "rank 0 alone writes it",
    "report_to": "rank 0 alone starts trackers",
    "run_name": "rank 0 alone starts trackers",
    "wandb_project": "rank 0 alone starts trackers",
    "wandb_tags": "rank 0 alone starts trackers",
}
"""Option -> the reason why ranks may have different values of it."""


def _file_options() -> dict[str, str]:
    kinds = {}
    for name, field in option_fields().items():
        for entry in field.metadata:
            if isinstance(entry, NamesFiles):
                kinds[name] = str(entry)
    return kinds


FILE_OPTIONS = _file_options()
"""Option that names files or folders -> their kind: model, data or code.

The schema marks them. They are compared by their content, under whatever name, between the ranks of a run and between a
run and its checkpoint.
"""
