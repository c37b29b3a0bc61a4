"""What a user sees of reading a config: numbers are numbers, and every mistake is named with file, line and way out."""

import json

import pytest

from tests.config.conftest import assert_options
from vembed.config.loading import load_config
from vembed.errors import UserError


def test_three_formats_say_the_same(write_config):
    values = {
        "model_name": "some/model",
        "data_path": "train.jsonl",
        "learning_rate": 2e-5,
        "mrl_dims": [512, 256],
        "use_mrl": True,
        "column_mapping": {"question": "query"},
    }
    toml = (
        'model_name = "some/model"\ndata_path = "train.jsonl"\nlearning_rate = 2e-5\n'
    )
    toml += (
        "mrl_dims = [512, 256]\nuse_mrl = true\n[column_mapping]\nquestion = 'query'\n"
    )
    yaml = "learning_rate: 2e-5\nmrl_dims: [512, 256]\nuse_mrl: true\n"
    files = [
        write_config(yaml + "column_mapping: {question: query}\n"),
        write_config(toml, name="cfg.toml", needed=""),
        write_config(json.dumps(values), name="cfg.json", needed=""),
    ]
    expected = load_config(values)
    assert [load_config(file) for file in files] == [expected] * 3
    assert expected.optimizer.learning_rate == 2e-5


@pytest.mark.parametrize(
    ("text", "value"), {"2e-5": 2e-5, "'2e-5'": 2e-5, ".5": 0.5, "1_0": 10.0}.items()
)
def test_numbers_as_people_write_them(read, text, value):
    in_a_file = read(f"learning_rate: {text}\n")
    typed = read("", f"learning_rate={text}")
    for config in (in_a_file, typed):
        assert config.optimizer.learning_rate == value


def test_words_that_yaml_11_takes_for_something_else(read):
    text = "mixed_precision: no\nrun_name: 2024-01-02\nquery_prompt: 12:30\nuse_lora: yes\nresume: off\n"
    assert_options(
        read(text + "wandb_tags: [no, 1]\n"),
        mixed_precision="no",
        run_name="2024-01-02",
        query_prompt="12:30",
        use_lora=True,
        resume=False,
        wandb_tags=["no", "1"],
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epochs: many", "epochs must be auto or a number (above 0), but is 'many'"),
        ("batch_size: 2.5", "batch_size must be a whole number (above 0), but is 2.5"),
        ("pooling: meen", "but is 'meen', did you mean 'mean'?"),
        ("lora_dropout: 1.5", "(0 or above, at most 1), but is 1.5"),
        ("use_lora: perhaps", "use_lora must be true or false, but is 'perhaps'"),
        ("report_to: [wandbb]", "trackio or mlflow, but is ['wandbb']"),
        ("data_path: {a: 1}", "data_path must be text or a list"),
        ("nproc: 0", "nproc (num_processes) must be auto or a whole number"),
    ],
)
@pytest.mark.promise("B04")
def test_wrong_value(refused, line, words):
    message = refused(line + "\n", needed="")
    assert message.startswith("cfg.yaml, line 1: ")
    assert words in message


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("wieght: 2", "unknown key 'wieght', did you mean 'weight'?"),
        ("losses: []", "losses"),
    ],
)
def test_a_source_with_a_wrong_key_or_value(refused, key, said):
    text = "model_name: m\ndata_path:\n- {path: a.jsonl, weight: 2}\n- {path: b.jsonl, %s}\n"
    message = refused(text % key, needed="")
    assert "data_path, entry 2" in message and said in message


def test_all_problems_at_once_the_first_in_the_first_line(refused):
    text = "batch_size: x\nlearning_rat: 1\nfsdp: {cpu_offlod: true}\n"
    first, second, third, fourth = refused(text, "epochs=0").splitlines()
    assert "line 3" in first and "batch_size" in first
    assert "learning_rate" in second
    assert "cpu_offload" in third
    assert "command line" in fourth


TWICE = '{"seed": 1,\n"epochs": 1,\n"seed": 2%s}'
IN_TOML = 'model_name = "m"\n\n[fsdp]\nenabled = true\nmin_num_param = 5\n'
IN_JSON = '{\n  "model_name": "m",\n  "data_path": "d",\n  "batch_sise": 3\n}\n'


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("epochs: 1\n", "a.yaml", ["model_name is missing", "data_path is missing"]),
        (
            "epochs: 3\n\n# a comment\n\nlearning_rat: 1e-5\n",
            "a.yaml",
            ["line 5", "'learning_rat'", "did you mean 'learning_rate'"],
        ),
        (IN_TOML, "a.toml", ["'min_num_param'"]),
        (IN_JSON, "a.json", ["line 4"]),
        ("seed: 1\nseed: 2\n", "a.yaml", ["line 2: 'seed' is already given in line 1"]),
        (TWICE % "", "a.json", ["line 3: 'seed' is already given in line 1"]),
        # Which of three the second one is, the reader does not know.
        (
            TWICE % ', "training": {"seed": 3}',
            "a.json",
            ["'seed' is already given in line"],
        ),
        ("seed = 1\nseed = 2\n", "a.toml", ["not valid TOML"]),
    ],
)
def test_wrong_keys(refused, text, name, said):
    message = refused(text, name=name, needed="")
    assert message.startswith(name)
    for part in said:
        assert part in message


def test_one_option_under_two_names(read, refused):
    message = refused("lr: 1e-5\nlearning_rate: 2e-5\n")
    assert "lr: 1e-05 (cfg.yaml, line 3) both set learning_rate" in message
    same = read("lr: 1e-5\nlearning_rate: 1.0e-5\n")
    assert same.optimizer.learning_rate == 1e-5
    typed = refused("", "lr=1e-5", "learning_rate=1e-4")
    assert "both set learning_rate" in typed


def test_yaml_tags_and_bombs(refused):
    tag = "!!python/object/apply:os.system"
    message = refused(f"run_name: {tag} ['true']\n")
    assert f"the tag {tag} is not allowed" in message
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for number in range(1, 9):
        aliases = ", ".join([f"*a{number - 1}"] * 10)
        levels.append(f"a{number}: &a{number} [{aliases}]")
    assert "anchors expand to more than" in refused("\n".join(levels) + "\n")
    assert "nested deeper than" in refused("a: &a [*a]\n")
    assert "recursion depth" in refused("a: " + "[" * 5000 + "]" * 5000 + "\n")


def test_anchors_and_merge_keys_work(read):
    text = "training: &base {batch_size: 8, epochs: 2}\n"
    config = read(text + "trainer:\n  <<: *base\n  seed: 7\n")
    assert_options(config, batch_size=8, epochs=2, seed=7)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cfg.txt", "a: 1", "ends in .yaml, .yml, .toml or .json"),
        ("cfg.yaml", "a: [1\n", "line 2, column 1: not valid YAML: expected"),
        (
            "cfg.yaml",
            "a:\n\tb: 1\n",
            "line 2, column 1: not valid YAML: there is a tab",
        ),
        ("cfg.yaml", 'a: "m\nb: 1\n', "line 1, column 4: not valid YAML: the quote"),
        (
            "cfg.yaml",
            "a: 1\nb 2\nc: 3\n",
            "line 2, column 1: not valid YAML: there is no colon",
        ),
        ("cfg.yaml", "a: 1\n  b: 2\n", "line 2, column 4: not valid YAML: this colon"),
        ("cfg.yaml", "a: @b\n", "line 1, column 4: not valid YAML: a value cannot"),
        ("cfg.json", '{"a" 1}', "line 1, column 6: not valid JSON: expected"),
        ("cfg.yaml", "", "has no options"),
        ("cfg.yaml", "- a\n- b\n", "has no options"),
        ("cfg.yaml", "model_name: m\nrun_name: caf\xe9\n", "line 2: not UTF-8 text"),
        ("cfg.yaml", "a: 1\n" * 100_000, "too many for a config"),
        ("nowhere.yaml", None, "there is no such config file"),
    ],
)
def test_broken_files(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / name)
    assert said in str(caught.value)
    assert name in str(caught.value)


def test_overrides_read_values_as_yaml_and_text_as_it_stands(read):
    config = read(
        "",
        "mrl_dims=[512, 256]",
        "use_mrl=true",
        "query_prompt=query: ",
        "run_name=2024",
        "document_prompt=null",
        "freeze=vision,embeddings",
        "fsdp.sharding_strategy=shard_grad_op",
        "profile_steps=10,12",
        "column_mapping.question=query",
        "column_mapping.a.b=positive",
        "data_path=a=b.jsonl",
        "resume=true",
    )
    assert_options(
        config,
        mrl_dims=[512, 256],
        query_prompt="query: ",
        run_name="2024",
        document_prompt=None,
        freeze=["vision", "embeddings"],
        column_mapping={"question": "query", "a.b": "positive"},
        fsdp_sharding_strategy="SHARD_GRAD_OP",
        profile_steps=[10, 12],
        data_path="a=b.jsonl",
        resume=True,
    )


def test_a_mapping_on_the_command_line(read, refused):
    config = read("", "column_mapping={Subject: query, My Answer: positive}")
    assert config.data.column_mapping == {"Subject": "query", "My Answer": "positive"}
    assert "{yours: ours}" in refused("", "column_mapping={Subject,Answer}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("epochs", "'epochs' is not of the form key=value"),
        ("epoch=1", "unknown option 'epoch', did you mean 'epochs'"),
    ],
)
def test_override_that_is_none(refused, override, said):
    assert f"command line: {said}" in refused("", override)


def test_value_of_the_command_line_wins(read):
    config = read("batch_size: 8\n", "global_batch_size=64")
    assert config.batch.global_batch_size == 64


@pytest.mark.parametrize("name", ["max_steps", "global_batch_size"])
def test_null_on_the_command_line_leaves_what_the_option_replaces(read, name):
    config = read(f"epochs: 3\nbatch_size: 16\n{name}: 20\n", f"{name}=null")
    assert config.batch.batch_size == 16
    assert config.optimizer.epochs == 3


def test_an_option_in_the_place_of_the_config_file():
    with pytest.raises(UserError, match="Give the config file first"):
        load_config("model_name=m")
