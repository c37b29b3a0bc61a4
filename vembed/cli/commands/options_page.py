"""docs/options.md: every option with type, default, meaning and other names, generated from the schema."""

from __future__ import annotations

from vembed.config.aliases import ALIASES, BLOCKS, TRANSLATED
from vembed.config.options import Option, all_options
from vembed.config.spelling import SPELLINGS

HEAD = """\
# Options

Every option with its values, default and meaning, written from `vembed/config/schema.py` by `vembed schema --format markdown`.

One option per line of a flat YAML, TOML or JSON file, `key=value` on the command line, or a flag (`--batch-size 8`).
The command line comes before the file, that before the launcher's environment, an Accelerate file or preset, and these
before the defaults. `vembed config CFG` shows where each value of a config comes from. Values that are words may be
written in upper or lower case. Relative paths start in the current directory or, where nothing is there, beside the
config file. An option given twice with two values is an error, and so is a key that is not on this page.
"""


def options_page() -> str:
    """Return the page as Markdown."""
    lines = [HEAD]
    section = ""
    for option in all_options().values():
        if option.section != section:
            section = option.section
            lines.append(f"## {section[0].upper()}{section[1:]}\n")
        lines.append(_entry(option))
    lines.append("## Other names\n")
    lines.append(
        "These keys of other systems are understood too, and set the option that says the same. `vembed config CFG` "
        "lists what was translated:\n"
    )
    lines.append(f"{_code(TRANSLATED)}.\n")
    lines.append(
        "Options may also stand in blocks, as `fsdp: {sharding_strategy: FULL_SHARD}`:\n"
    )
    lines.append(
        f"{_code(BLOCKS)}, and `training_stages`, of which `--stage NAME` chooses one."
    )
    return "\n".join(lines) + "\n"


def _entry(option: Option) -> str:
    default = (
        "required" if option.is_required else f"default `{_shown(option.default)}`"
    )
    parts = [
        f"### `{option.name}`\n",
        f"{option.accepts}, {default}\n",
        " ".join(option.text.split()) + "\n",
    ]
    if option.name in ALIASES:
        parts.append(f"Also: {_code(ALIASES[option.name].split())}.\n")
    spellings = [
        f"`{other}` for `{word}`"
        for word, names in SPELLINGS.get(option.name, {}).items()
        for other in names.split()
    ]
    if spellings:
        parts.append(f"Also as values: {', '.join(spellings)}.\n")
    return "\n".join(parts)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _code(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)  # type: ignore[attr-defined]
