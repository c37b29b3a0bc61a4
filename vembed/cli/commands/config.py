"""`vembed config`, `schema` and `version`: the resolved config, all options, and what is installed."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

from typer import Option

from vembed.cli.support import ConfigArguments, read_config_arguments

HEAD = """\
# Options

Every option with its values, default and meaning, written from `vembed/config/schema.py` by `vembed schema --format markdown`.

One option per line of a flat YAML, TOML or JSON file, `key=value` on the command line, or a flag (`--batch-size 8`).
The command line comes before the file, that before the launcher's environment, an Accelerate file or preset, and these
before the defaults. `vembed config CFG` shows where each value of a config comes from. Values that are words may be
written in upper or lower case. Relative paths start in the current directory or, where nothing is there, beside the
config file. An option given twice with two values is an error, and so is a key that is not on this page.

"""
OTHER_NAMES = """\
## Other names

These keys of other systems are understood too, and set the option that says the same. `vembed config CFG` lists what was translated:

{}.

Options may also stand in blocks, as `fsdp: {{sharding_strategy: FULL_SHARD}}`:

{}, and `training_stages`, of which `--stage NAME` chooses one.
"""


def config(args: ConfigArguments = None) -> dict[str, Any]:
    """Print the resolved config, with where each value comes from. Fails if a file is missing."""
    from vembed.config.loading import render, resolve_run
    from vembed.config.paths import require_paths

    arguments = read_config_arguments("config", config.__doc__, args)
    run = resolve_run(arguments.source, arguments.overrides, stage=arguments.stage)
    sys.stdout.write(render(run.config, run.origins))
    lines = [f"# translated: {line}\n" for line in run.translated]
    lines += [f"# note: {line}\n" for line in run.notes]
    if lines:
        sys.stdout.write("\n" + "".join(lines))
    sys.stdout.flush()
    require_paths(run.config.model, run.config.data, run.origins)
    return {
        "options": run.config.to_dict(),
        "origins": run.origins,
        "translated": run.translated,
        "notes": run.notes,
    }


def schema(
    form: Annotated[Literal["json", "markdown"], Option("--format")] = "json",
) -> None:
    """Print the JSON schema of a config, with which editors complete and check it.

    Args:
        form: json, for editors, or markdown, the page of options.
    """
    from vembed.config.schema import json_schema

    if form == "markdown":
        sys.stdout.write(options_page())
    else:
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def version() -> dict[str, str]:
    """Print the versions of vembed, Python and its main dependencies."""
    import platform
    from importlib.metadata import version as version_of

    import vembed

    versions = {"vembed": vembed.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "accelerate", "peft"):
        versions[name] = version_of(name)
    for name, number in versions.items():
        sys.stdout.write(f"{name} {number}\n")
    return versions


def options_page() -> str:
    """Return docs/options.md: every option with type, default, meaning and other names."""
    from vembed.config.aliases import ALIASES, BLOCKS, SPELLINGS, TRANSLATED
    from vembed.config.options import all_options

    def code(names: Any) -> str:
        return ", ".join(f"`{name}`" for name in names)

    page = HEAD
    section = ""
    for option in all_options().values():
        if option.section != section:
            section = option.section
            page += f"## {section[0].upper()}{section[1:]}\n\n"
        default = str(option.default)
        if option.default is None:
            default = "none"
        elif isinstance(option.default, bool):
            default = default.lower()
        default = "required" if option.is_required else f"default `{default}`"
        page += f"### `{option.name}`\n\n{option.accepts}, {default}\n\n"
        page += " ".join(option.text.split()) + "\n\n"
        if option.name in ALIASES:
            page += f"Also: {code(ALIASES[option.name].split())}.\n\n"
        spellings = []
        for word, names in SPELLINGS.get(option.name, {}).items():
            spellings += [f"`{other}` for `{word}`" for other in names.split()]
        if spellings:
            page += f"Also as values: {', '.join(spellings)}.\n\n"
    return page + OTHER_NAMES.format(code(TRANSLATED), code(BLOCKS))
