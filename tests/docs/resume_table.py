"""The table of docs/resume.md: for every option, whether a resumed run may change it."""

from pathlib import Path

from vembed.config.options import all_options
from vembed.losses.table import LOSS_OPTIONS
from vembed.training.checkpoint.folders import BATCH, BY_CONTENT, JUDGES, MAY_CHANGE

BEGIN = "<!-- options: written by python -m tests.docs.resume_table -->"
END = "<!-- end of options -->"


def resume_table():
    """Return the table as Markdown, one section of options per row."""
    sections = {}
    for name, option in all_options().items():
        may, must = sections.setdefault(option.section, ([], []))
        if name in LOSS_OPTIONS:
            continue
        (may if name in MAY_CHANGE else must).append(f"`{name}`{_note(name)}")
    sections["objective"][1].append("the options of the losses")
    lines = ["| options of | may change | must stay |", "|---|---|---|"]
    lines += [
        f"| {name} | {', '.join(may)} | {', '.join(must)} |"
        for name, (may, must) in sections.items()
    ]
    return "\n".join(lines)


def updated(page):
    """Return the page with its table replaced."""
    before, _, others = page.partition(BEGIN)
    after = others.partition(END)[2]
    return f"{before}{BEGIN}\n\n{resume_table()}\n\n{END}{after}"


def _note(name):
    if name in JUDGES:
        return " (the best score starts anew)"
    if name in BATCH:
        return " (the examples per step stay)"
    return " (the content stays)" if name in BY_CONTENT else ""


if __name__ == "__main__":
    path = Path("docs/resume.md")
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
