"""docs/cli.md, generated from the commands: arguments and options of each. `python -m tests.docs.cli_page` prints it."""

import sys

from vembed.cli.main import COMMANDS, DATA_COMMANDS, load_command

HEAD = """\
# Commands

Every command with its arguments and options, written from the code by `python -m tests.docs.cli_page`.
`vembed COMMAND --help` prints the same.

```bash
vembed --help
```

Exit codes: 0 is done, 1 is failed, 2 is bad usage, config or data, and 130 or 143 is stopped by a signal after a
checkpoint was saved. A MODEL is a model folder, a name on the Hub, the folder of a run (its `final/`).

| command | purpose |
| --- | --- |
"""


def cli_page():
    """Return the page as Markdown."""
    rows = []
    sections = []
    for name in COMMANDS:
        command = load_command(name)
        text = " ".join((command.help or "").split())
        purpose = text.split(". ")[0].rstrip(".").replace("|", "\\|")
        rows.append(f"| [`{name}`](#vembed-{name}) | {purpose}. |")
        lines = plain_command(name, command)
        if name in DATA_COMMANDS:
            lines = data_command(name)
        sections.append("\n".join([f"## `vembed {name}`", "", text, "", *lines]) + "\n")
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(sections)


def usage(text):
    return ["```text", text.rstrip(), "```", ""]


def data_command(name):
    """The lines of a command with options of its own, in a file or as arguments."""
    lines = usage(f"vembed {name} [CFG] [KEY=VALUE | --OPTION VALUE] ...")
    return [*lines, f"`vembed {name} --help` lists the options."]


def plain_command(name, command):
    """The lines of a command with arguments and options of its own."""
    arguments = []
    details = []
    options = []
    for parameter in command.params:
        text = " ".join((getattr(parameter, "help", None) or "").split())
        if parameter.param_type_name == "argument":
            argument = parameter.metavar or parameter.name.upper()
            if text:
                details.append(f"- `{argument}`: {text}")
            if argument.endswith("..."):  # the words behind a config
                arguments.append(argument)
                continue
            if not parameter.required:
                argument = f"[{argument}]"
            arguments.append(argument + (" ..." if parameter.nargs == -1 else ""))
        elif "--help" not in parameter.opts:
            default = default_text(parameter.default)
            options.append(f"- `{', '.join(parameter.opts)}`{default}: {text}")
    more = " [OPTIONS]" if options else ""
    return [*usage(f"vembed {name} {' '.join(arguments)}{more}"), *details, *options]


def default_text(value):
    if value is None or value is False or value == "" or callable(value):
        return ""
    return f" (default `{value}`)"


if __name__ == "__main__":
    sys.stdout.write(cli_page())
