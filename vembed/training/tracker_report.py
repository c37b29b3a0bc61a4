"""send_report(): the report of a finished run in a tracker: its text or page, and a picture of score and loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vembed.evaluation.report.pictures import picture_image, picture_svg
from vembed.evaluation.report.plots import Curve, curve_svg, evaluations_svg
from vembed.evaluation.report.record import RunRecord, metric_name, read_run

NAME = "report"
PICTURE = "report/picture"


def send_report(tracker: Any, output_dir: str | Path) -> None:
    """Send the report of a run to one of Accelerate's trackers. `tracker.name` says which."""
    folder = Path(output_dir)
    page = folder / "report.html"
    record = read_run(folder)
    picture, step = (
        report_picture(record),
        max((one.step for one in record.evaluations), default=0),
    )
    step = max(step, *(int(line["step"]) for line in record.steps[-1:]), 0)
    if tracker.name == "tensorboard":
        tracker.writer.add_text(
            NAME, (folder / "report.md").read_text(encoding="utf-8"), step
        )
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

        tracker.run.log(
            {
                NAME: wandb.Html(page.read_text(encoding="utf-8")),
                PICTURE: wandb.Image(picture),
            },
            step=step,
        )
    else:
        import trackio

        tracker.run.log({PICTURE: trackio.Image(picture)}, step=step)


def report_picture(record: RunRecord) -> np.ndarray:
    """Return [height, width, 3] uint8: the deciding score over the evaluations, and the loss over the steps."""
    key = record.headline
    scores = [
        (one.step, one.scores[key]) for one in record.evaluations if key in one.scores
    ]
    losses = [
        (line["step"], line["loss"])
        for line in record.steps
        if isinstance(line.get("loss"), float)
    ]
    curve = Curve(
        "loss",
        "",
        [step for step, _ in losses],
        [loss for _, loss in losses],
        "{:.3g}".format,
    )
    plots = [picture_svg(curve_svg(curve), "loss")]
    if scores:
        name = metric_name(key)
        svg = evaluations_svg(
            [step for step, _ in scores], [score for _, score in scores], name, None
        )
        plots.insert(0, picture_svg(svg, name))
    return np.concatenate([np.asarray(picture_image(one)) for one in plots], axis=1)
