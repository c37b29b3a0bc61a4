"""Progress: a bar on a terminal, few plain lines elsewhere, nothing where nobody asked."""

import io

import pytest
from rich.console import Console

from vembed import progress
from vembed.progress import ProgressReport


def console(terminal):
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=100, color_system=None
    )


def test_anything_else_gets_a_plain_line_now_and_then(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    screen = console(terminal=False)
    with ProgressReport("encoding", console=screen) as report:
        for done in range(1, 41):
            clock[0] += 1
            report(done * 10, 1000)
        clock[0] += 20
        report(500, None)
    assert screen.file.getvalue().splitlines() == [
        "encoding: 150 of 1,000 (15%), 1 min 25 s left, 10/s",
        "encoding: 300 of 1,000 (30%), 1 min 10 s left, 10/s",
        "encoding: 500, 8/s",
    ]


def test_lines_go_where_they_are_asked_to_go_and_no_bar_is_drawn(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    screen = console(terminal=True)
    lines = []
    with ProgressReport("encoding", console=screen, log=lines.append) as report:
        report(1, 2)
    assert screen.file.getvalue() == ""
    assert len(lines) == 1 and lines[0].startswith("encoding: 1 of 2 (50%)")


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_is_shown_where_nobody_asked(terminal, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    screen = console(terminal)
    with ProgressReport("encoding", active=False, console=screen) as report:
        report(1, 2)
    assert screen.file.getvalue() == ""
