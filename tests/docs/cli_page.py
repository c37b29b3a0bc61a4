"""docs/cli.md: every verb of the command with its arguments and flags, generated from the commands."""

from __future__ import annotations

import sys
from typing import Any

import typer

from vembed.config.arguments import LAUNCH_FLAGS, VERB_FLAGS

HEAD = """\
# Commands

Every command with its arguments and options, written from the code by `python -m tests.docs.cli_page`.
`vembed COMMAND --help` prints the same.

```bash
vembed --help
```

Exit codes: 0 is done, 1 is failed, 2 is bad usage, config or data, and 130 or 143 is stopped by a signal after a
checkpoint was saved. A MODEL is a model folder, a name on the Hub, the folder of a run (its `final/`) or one of its
checkpoints.

| command | purpose |
| --- | --- |
"""


OWN_WORDS = frozenset({"mine", "judge", "generate", "audit"})
"""Verbs with options of their own, in a file or as words."""


def cli_page() -> str:
    """Return the page as Markdown."""
    from vembed.cli.main import app

    group: Any = typer.main.get_command(app)
    verbs = {
        name: command for name, command in group.commands.items() if not command.hidden
    }
    rows = [
        f"| [`{name}`](#vembed-{name}) | {_first_sentence(command.help)} |"
        for name, command in verbs.items()
    ]
    return (
        HEAD
        + "\n".join(rows)
        + "\n\n"
        + "\n".join(_verb(name, command) for name, command in verbs.items())
    )


def _verb(name: str, command: Any) -> str:
    lines = [f"## `vembed {name}`", "", " ".join((command.help or "").split()), ""]
    if command.context_settings.get("ignore_unknown_options"):
        words = "[CFG]" if name in OWN_WORDS else "CFG"
        words += " [KEY=VALUE | --OPTION VALUE] ..."
        lines += ["```text", f"vembed {name} {words}", "```", ""]
        if name == "train":
            lines += [
                f"- `{f'--{flag} {value}'.rstrip()}`: {text}"
                for flag, (value, text) in LAUNCH_FLAGS.items()
            ]
        elif name in OWN_WORDS:
            lines.append(f"`vembed {name} --help` lists the options.")
        else:
            lines += [
                f"- `--{flag} {value}`: {text}"
                for flag, (value, text) in VERB_FLAGS[name].items()
            ]
            lines += [
                "",
                "The config, its options and the flags are those of `vembed train`.",
            ]
        return "\n".join(lines) + "\n"
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [
        one
        for one in command.params
        if one.param_type_name == "option" and "--help" not in one.opts
    ]
    names = [one.metavar or one.name.upper() for one in arguments]
    usage = " ".join(
        (name if one.required else f"[{name}]") + (" ..." if one.nargs == -1 else "")
        for name, one in zip(names, arguments, strict=True)
    )
    lines += [
        "```text",
        f"vembed {name} {usage}{' [OPTIONS]' if options else ''}".rstrip(),
        "```",
        "",
    ]
    lines += [
        f"- `{name}`: {_text(one)}"
        for name, one in zip(names, arguments, strict=True)
        if _text(one)
    ]
    lines += [
        f"- `{', '.join(one.opts)}`{_default(one)}: {_text(one)}" for one in options
    ]
    return "\n".join(lines) + "\n"


def _first_sentence(text: str | None) -> str:
    words = " ".join((text or "").split())
    return words.split(". ")[0].rstrip(".").replace("|", "\\|") + "."


def _text(parameter: Any) -> str:
    return " ".join((getattr(parameter, "help", None) or "").split())


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or value == "" or callable(value):
        return ""
    return f" (default `{value}`)"


if __name__ == "__main__":
    sys.stdout.write(cli_page())
