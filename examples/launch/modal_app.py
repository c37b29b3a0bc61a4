"""vembed on Modal; run it in the checkout.

    modal volume put vembed cfg.yaml data/ /
    modal run --detach examples/launch/modal_app.py --config cfg.yaml --words "epochs=2 learning_rate=2e-5"
    modal volume get vembed run/final

The volume holds config, data and run, so that a function that was moved to another machine resumes.
"""

from __future__ import annotations

import shlex
import subprocess

import modal

app = modal.App("vembed")
volume = modal.Volume.from_name("vembed", create_if_missing=True)
image = modal.Image.from_dockerfile("Dockerfile").entrypoint([])


@app.function(
    image=image, gpu="H100:2", timeout=24 * 3600, volumes={"/work": volume}, retries=3
)
def train(config: str, words: list[str]) -> None:
    """Train in the volume, with one process per GPU."""
    command = ["vembed", "train", config, "resume=auto", "output_dir=run", *words]
    try:
        subprocess.run(command, cwd="/work", check=True)
    finally:
        volume.commit()


@app.local_entrypoint()
def main(config: str = "cfg.yaml", words: str = "") -> None:
    """Start the training and wait for its end."""
    train.remote(config, shlex.split(words))
