"""Whatever stands in a config file or on the command line: a config or a UserError, soon. VEMBED_FUZZ=2500 for more."""

import json
import os

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vembed.cli.arguments import NO_FLAGS
from vembed.config.loading import load_config, resolve_run, save_config
from vembed.config.options import all_options
from vembed.errors import UserError

NUM_EXAMPLES = int(os.environ.get("VEMBED_FUZZ", "40"))
fuzz = settings(
    max_examples=NUM_EXAMPLES,
    deadline=10_000,  # milliseconds: nothing hangs
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAMES = st.sampled_from(
    [
        *all_options(),
        "lr",
        "fsdp",
        "fsdp.enabled",
        "bf16",
        "training",
        "use_wandb",
        "stage",
        "<<",
        "",
    ]
)
NUMBERS = (
    st.integers()
    | st.integers(min_value=10**17, max_value=10**400)
    | st.floats()
    | st.sampled_from([-0.0, 1e308])
)
CHOICES = {choice for option in all_options().values() for choice in option.choices}
SPECIAL = ["auto", "true", "no", "none", "null", "2e-5", "1_0", "FULL_SHARD", "~"]
LONG = ["0x" + "f" * 5000, "9" * 5000]
WORDS = st.text(max_size=20) | st.sampled_from([*SPECIAL, *LONG, *sorted(CHOICES)])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3)
    ),
    max_leaves=8,
)
CONFIGS = st.dictionaries(NAMES | WORDS, VALUES, max_size=6)
NEEDED = {"model_name": "m", "data_path": "d"}
YAML_BITS = st.sampled_from(
    [
        "model_name: m\n",
        "a: &a [*a, *a]\n",
        "b: !!python/object/apply:os.system [x]\n",
        "? [x]\n: y\n",
        *"-{}[]'\"\\\t#\n\x00\ud800\x85",
        "&a ",
        "*a ",
        "!!binary ",
        "!x ",
        "<<: *a\n",
        "|\n  ",
        "%YAML 9.9\n---\n",
        "fsdp:\n  ",
        "training_stages: ",
        "learning_rate: 1e999\n",
        "batch_size: " + "9" * 40 + "\n",
    ]
)


def outcome(source, overrides=None):
    """The config, or None for a UserError with a sentence; anything else fails the test."""
    try:
        return load_config(source, overrides or [])
    except UserError as error:
        assert str(error).strip()
        return None


def read_all(folder, content):
    """What comes of bytes in a file of each format."""
    results = []
    for suffix in ("yaml", "toml", "json"):
        file = folder / f"cfg.{suffix}"
        file.write_bytes(content)
        results.append(outcome(file))
    return results


@fuzz
@given(st.binary(max_size=200))
def test_bytes(tmp_path, content):
    read_all(tmp_path, content)


@fuzz
@given(st.lists(YAML_BITS | st.text(max_size=5), max_size=12))
def test_yaml_in_pieces(tmp_path, pieces):
    text = "model_name: m\ndata_path: d\n" + "".join(pieces)
    file = tmp_path / "cfg.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(file)


@fuzz
@given(
    CONFIGS,
    st.lists(st.tuples(NAMES | WORDS, WORDS | st.floats().map(repr)), max_size=3),
)
def test_values(tmp_path, values, overrides):
    values = NEEDED | values
    config = outcome(values, [f"{key}={value}" for key, value in overrides])
    try:
        text = json.dumps(values)
    except ValueError:  # a number of more than 4,300 digits
        return
    (tmp_path / "cfg.json").write_text(text, encoding="utf-8")
    outcome(tmp_path / "cfg.json")
    if config is not None:
        save_config(config, tmp_path / "again.yaml")
        again = load_config(tmp_path / "again.yaml")
        assert again.to_dict() == config.to_dict()


@fuzz
@example({"FSDP_VERSION": "!0"})
@given(
    st.dictionaries(
        st.sampled_from(["FSDP_VERSION", "FSDP_MIN_NUM_PARAMS", "FSDP_OFFLOAD_PARAMS"]),
        st.text(max_size=8),
    )
)
def test_launchers_environment(env):
    try:
        resolve_run(NEEDED, env=env | {"ACCELERATE_USE_FSDP": "true"})
    except UserError as error:
        assert "set by accelerate launch" in str(error) or "fsdp" in str(error)


@fuzz
@given(
    st.lists(
        st.one_of(
            WORDS,
            NAMES.map(lambda name: f"--{name.replace('_', '-')}"),
            st.tuples(NAMES, WORDS).map("=".join),
            st.sampled_from(["--set", "--config", "--", "-x", "cfg.yaml", "--resume"]),
        ),
        max_size=6,
    )
)
def test_words_of_the_command_line(words):
    try:
        arguments = NO_FLAGS.with_words(words)
    except UserError as error:
        assert str(error).strip()
        return
    again = NO_FLAGS.with_words(arguments.command_line())
    assert again.overrides == arguments.overrides


@pytest.mark.parametrize(
    "content",
    [
        b"a: " + b"[" * 10_000,
        b"- " * 25_000,
        b"a: '" + b"x" * 290_000,
        b"".join(b"k%d: 1\n" % number for number in range(4_000)),
        b'{"a": ' * 10_000,
    ],
    ids=range(5),
)
def test_large_nonsense_ends_soon(tmp_path, content):
    assert read_all(tmp_path, content) == [None] * 3
