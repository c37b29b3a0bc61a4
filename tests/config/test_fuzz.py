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

NUM_EXAMPLES = int(os.environ.get("VEMBED_FUZZ", "60"))
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
NUMBERS = st.one_of(
    st.integers(),
    st.integers(min_value=10**17, max_value=10**400),
    st.floats(),
    st.just(-0.0),
    st.just(1e308),
)
WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "auto",
            "true",
            "no",
            "none",
            "null",
            "2e-5",
            "1_0",
            "0x" + "f" * 5000,
            "9" * 5000,
            "FULL_SHARD",
            "~",
        ]
    ),
    st.sampled_from(
        sorted(
            {choice for option in all_options().values() for choice in option.choices}
        )
    ),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=3)
    ),
    max_leaves=8,
)
CONFIGS = st.dictionaries(st.one_of(NAMES, WORDS), VALUES, max_size=6)
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
        config = load_config(source, overrides or [])
    except UserError as error:
        assert str(error).strip()
        return None
    return config


@fuzz
@given(st.binary(max_size=200))
def test_bytes(tmp_path, content):
    for suffix in ("yaml", "toml", "json"):
        file = tmp_path / f"cfg.{suffix}"
        file.write_bytes(content)
        outcome(file)


@fuzz
@given(st.lists(st.one_of(YAML_BITS, st.text(max_size=5)), max_size=12))
def test_yaml_in_pieces(tmp_path, pieces):
    file = tmp_path / "cfg.yaml"
    file.write_bytes(
        ("model_name: m\ndata_path: d\n" + "".join(pieces)).encode(
            "utf-8", "surrogatepass"
        )
    )
    outcome(file)


@fuzz
@given(
    CONFIGS,
    st.lists(
        st.tuples(st.one_of(NAMES, WORDS), st.one_of(WORDS, st.floats().map(repr))),
        max_size=3,
    ),
)
def test_values(tmp_path, values, overrides):
    values = {"model_name": "m", "data_path": "d"} | values
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
        resolve_run(
            {"model_name": "m", "data_path": "d"},
            env=env | {"ACCELERATE_USE_FSDP": "true"},
        )
    except UserError as error:
        assert "set by accelerate launch" in str(error) or "fsdp" in str(error)


@fuzz
@given(
    st.lists(
        st.one_of(
            WORDS,
            NAMES.map(lambda name: f"--{name.replace('_', '-')}"),
            st.tuples(NAMES, WORDS).map("=".join),
            st.sampled_from(
                [
                    "--set",
                    "--config",
                    "--",
                    "-x",
                    "cfg.yaml",
                    "--resume",
                ]
            ),
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
    assert (
        NO_FLAGS.with_words(arguments.command_line()).overrides == arguments.overrides
    )


@pytest.mark.parametrize(
    "content",
    [
        b"a: " + b"[" * 200_000,
        b"- " * 100_000,
        b"a: '" + b"x" * 290_000,
        b"".join(b"k%d: 1\n" % number for number in range(20_000)),
        b'{"a": ' * 30_000,
    ],
    ids=range(5),
)
def test_large_nonsense_ends_soon(tmp_path, content):
    for suffix in ("yaml", "toml", "json"):
        file = tmp_path / f"cfg.{suffix}"
        file.write_bytes(content)
        assert outcome(file) is None
