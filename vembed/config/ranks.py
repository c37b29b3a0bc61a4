"""Options that may differ between the ranks of a run, each with its reason. All others must be equal."""

from __future__ import annotations

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

BY_CONTENT = {
    "model_name": "model",
    "image_model_name": "model",
    "teachers": "model",
    "teacher": "model",
    "guide": "model",
    "losses": "model",
    "data_path": "data",
    "val_data_path": "data",
    "guards": "data",
}
"""Options that name models or data. Files and folders are compared by their content, under whatever name."""
