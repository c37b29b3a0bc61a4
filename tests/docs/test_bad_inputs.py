"""The table of bad inputs in docs/security.md counts the cases of the tests."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.data import test_broken_files, test_images, test_records
from tests.docs.pages import ROOT
from tests.models import test_broken_folders
from tests.training import test_checkpoint_schema

ROWS: dict[str, tuple[Callable[..., Any], ...]] = {
    "model folders": (
        test_broken_folders.test_a_broken_folder_is_one_sentence_before_weights_are_read,
    ),
    "checkpoints": (
        test_checkpoint_schema.test_altered_contents_are_one_sentence_and_then_the_checkpoint_before,
        test_checkpoint_schema.test_pipes_and_links_are_not_opened,
    ),
    "data": (
        test_broken_files.test_bad_lines_of_json,
        test_broken_files.test_files_that_cannot_be_read,
        test_records.test_bad_records,
        test_records.test_conversations_that_mean_nothing,
        test_images.test_a_relative_path_may_not_lead_out,
        test_images.test_paths_that_are_none,
        test_images.test_truncated_images_are_refused_by_name,
        test_images.test_files_that_are_no_images,
        test_images.test_damage_inside_of_an_image_is_seen_by_the_check,
    ),
}


def cases(function: Callable[..., Any]) -> int:
    marks = function.__dict__["pytestmark"]
    return math.prod(len(mark.args[1]) for mark in marks if mark.name == "parametrize")


@pytest.mark.parametrize("name", ROWS)
def test_the_table_counts_the_cases(name: str) -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    (said,) = re.findall(rf"^\| {name}: .*?\| (\d+) \|", page, re.MULTILINE)
    assert int(said) == sum(cases(function) for function in ROWS[name])
