"""The surface of the config: its list of options is frozen, documented in full, and needs no torch."""

import subprocess
import sys
from pathlib import Path

from vembed.config.options import all_options
from vembed.losses.table import LOSS_OPTIONS

ROOT = Path(__file__).parents[2]


def test_the_list_of_options_is_a_decision():
    """A new option is a promise: add it to options.txt on purpose. One that a new loss declares stands in its class."""
    frozen = (Path(__file__).parent / "options.txt").read_text().splitlines()
    added = set(all_options()) - set(frozen)
    assert sorted(added - set(LOSS_OPTIONS)) == []
    assert sorted(set(frozen) - set(all_options())) == []


def test_every_option_is_documented():
    for option in all_options().values():
        assert option.text.strip().endswith((".", ")")), option.name
        assert option.section, option.name
        assert option.accepts, option.name


def test_the_config_package_imports_no_torch():
    names = [
        path.stem
        for path in (ROOT / "vembed" / "config").glob("*.py")
        if path.stem != "__init__"
    ]
    code = f"import sys, vembed; from vembed.config import {', '.join(names)}\n"
    code += "heavy = {'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True)
