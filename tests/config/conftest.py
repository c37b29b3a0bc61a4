"""A config file in an empty folder, which is the current one."""

from pathlib import Path

import pytest

from vembed.config.loading import resolve_run
from vembed.errors import UserError

NEEDED = "model_name: some/model\ndata_path: train.jsonl\n"


@pytest.fixture
def write_config(tmp_path, monkeypatch):
    """Writes `text` after the two lines that every config needs, and returns the relative path."""
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_USE_FSDP", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def write(text="", *, name="cfg.yaml", needed=NEEDED):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(needed + text, encoding="utf-8")
        return Path(name)

    return write


@pytest.fixture
def resolved(write_config):
    """Resolves such a config, with options of the command line and an environment."""

    def run(text="", *overrides, env=None, **file):
        return resolve_run(write_config(text, **file), overrides, env=env or {})

    return run


@pytest.fixture
def read(resolved):
    """Reads such a config."""

    def run(text="", *overrides, **file):
        return resolved(text, *overrides, **file).config

    return run


@pytest.fixture
def refused(resolved):
    """Returns what is said of such a config."""

    def run(text="", *overrides, **file):
        with pytest.raises(UserError) as caught:
            resolved(text, *overrides, **file)
        return str(caught.value)

    return run


def assert_options(config, **expected):
    """Compare some options with what they should be."""
    options = config.option_values()
    assert {name: options[name] for name in expected} == expected
