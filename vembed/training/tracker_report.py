"""send_report(): the report of a finished run in a tracker: its text or page, and a picture of score and loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vembed.report.record import RunRecord, metric_name, read_run

NAME = "report"
PICTURE = "report/picture"


def send_report(tracker: Any, output_dir: str | Path) -> None:
    """Send the report of a run to one of Accelerate's trackers. `tracker.name` says which."""
    folder = Path(output_dir)
    page = folder / "report.html"
    record = read_run(folder)
    picture, step = report_picture(record), max((one.step for one in record.evaluations), default=0)
    step = max(step, *(int(line["step"]) for line in record.steps[-1:]), 0)
    if tracker.name == "tensorboard":
        tracker.writer.add_text(NAME, (folder / "report.md").read_text(encoding="utf-8"), step)
        tracker.writer.add_image(PICTURE, picture, step, dataformats="HWC")
    elif tracker.name == "mlflow":
        from PIL import Image

        tracker.log_artifact(str(page))
        place = folder / "report.png"
        Image.fromarray(picture).save(place)
        tracker.log_artifact(str(place))
        place.unlink()
    elif tracker.name == "wandb":
        import wandb

        tracker.run.log({NAME: wandb.Html(page.read_text(encoding="utf-8")), PICTURE: wandb.Image(picture)}, step=step)
    else:
        import trackio

        tracker.run.log({PICTURE: trackio.Image(picture)}, step=step)


def report_picture(record: RunRecord) -> np.ndarray:
    """Return [height, width, 3] uint8: the deciding score over the evaluations, and the loss over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    key = record.headline
    scores = [(one.step, one.scores[key]) for one in record.evaluations if key in one.scores]
    losses = [(line["step"], line["loss"]) for line in record.steps if isinstance(line.get("loss"), float)]
    drawn: list[tuple[str, Sequence[tuple[float, float]]]] = [("loss", losses)]
    if scores:
        drawn.insert(0, (metric_name(key), scores))
    figure = Figure(figsize=(4.8 * len(drawn), 3.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for axes, (title, points) in zip(np.ravel(figure.subplots(1, len(drawn))), drawn, strict=True):
        axes.plot([step for step, _ in points], [value for _, value in points], marker="o", markersize=3)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    canvas.draw()
    found: np.ndarray = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return found
