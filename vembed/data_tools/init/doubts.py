"""Doubts about the first records of a data file, for the comments of a starter config: what training would refuse, or
would take for something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vembed.data.columns import (
    Columns,
    Layout,
    classes_as_scores,
    unread_judgement,
    unread_negatives,
    unread_prompt,
)
from vembed.data.examples import BadRecord
from vembed.data.images.files import ImageRoot
from vembed.data.messages import shown
from vembed.data.records import Mode, RecordFormat
from vembed.data_tools.init.sample import FileSample
from vembed.errors import UserError

WORDS_OF_A_RECORD = 4
"""Words from which the name of a column looks like a text."""


def doubts_about(
    sample: FileSample,
    data: str,
    mapping: Mapping[str, str],
    loss: str,
    mode: Mode = "auto",
) -> list[str]:
    """Return sentences on what may be wrong. Raise UserError if none of the records can be used for training."""
    columns = Columns(mapping)
    layout = columns.layout(sample.columns)
    found = [
        _bad_records(sample, data, columns, loss, mode),
        _header(sample),
        _classes(sample, layout),
    ]
    if layout.label is None:
        read = set(layout.columns())
        unused = [name for name in sample.columns if name not in read]
        found.append(unread_judgement(unused) if layout.score is None else None)
        found += [unread_negatives(unused), unread_prompt(unused)]
    return [one for one in found if one is not None]


def _bad_records(
    sample: FileSample, data: str, columns: Columns, loss: str, mode: Mode
) -> str | None:
    folder = data if Path(data).is_dir() else str(Path(data).parent)
    images = ImageRoot(folder, allow_urls=True)  # references alone: no image is opened
    form = RecordFormat(
        columns, images, mode=mode, losses=(loss,), numbers_in_text=sample.is_delimited
    )
    first, count = None, 0
    for number, record in enumerate(sample.records, 1):
        try:
            form.example(record, "")
        except BadRecord as error:
            count += 1
            first = first or f"record {number:,d}: {error}"
    if count == len(sample.records):
        raise UserError(
            f"{data}: none of the first {count:,d} records can be used, {first}"
        )
    if first is None:
        return None
    return (
        f"{count:,d} of the first {len(sample.records):,d} records cannot be used, {first}; mend them, or set "
        "on_bad_record: skip"
    )


def _header(sample: FileSample) -> str | None:
    if not sample.is_delimited or any(
        len(name.split()) < WORDS_OF_A_RECORD for name in sample.columns
    ):
        return None
    return (
        f"the first line is taken for the names of the columns ({shown(sample.columns[0])}); if it is a record, put a "
        "line with names before it, such as query,positive"
    )


def _classes(sample: FileSample, layout: Layout) -> str | None:
    """Return a doubt about a column `label` of few whole numbers, which is a score beside sentence1 and sentence2."""
    if layout.score != "label":
        return None
    values = {str(record.get("label")) for record in sample.records}
    return (
        classes_as_scores([float(value) for value in values])
        if all(map(str.isdigit, values))
        else None
    )
