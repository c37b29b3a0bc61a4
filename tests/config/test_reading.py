"""What a user sees of reading a config: numbers are numbers, and every mistake is named with file, line and way out."""

import json
from pathlib import Path

import pytest

from tests.config.conftest import assert_options
from vembed.config.loading import load_config
from vembed.errors import UserError


def error_of(source, overrides=None):
    with pytest.raises(UserError) as caught:
        load_config(source, overrides or [])
    return str(caught.value)


def test_three_formats_say_the_same(write_config):
    text = "learning_rate: 2e-5\nmrl_dims: [512, 256]\nuse_mrl: true\ncolumn_mapping: {question: query}\n"
    from_yaml = load_config(write_config(text))
    toml = 'model_name = "some/model"\ndata_path = "train.jsonl"\nlearning_rate = 2e-5\nmrl_dims = [512, 256]\n'
    from_toml = load_config(
        write_config(
            toml + "use_mrl = true\n[column_mapping]\nquestion = 'query'\n",
            name="cfg.toml",
            needed="",
        )
    )
    values = {
        "model_name": "some/model",
        "data_path": "train.jsonl",
        "learning_rate": 2e-5,
        "mrl_dims": [512, 256],
        "use_mrl": True,
        "column_mapping": {"question": "query"},
    }
    from_json = load_config(
        write_config(json.dumps(values), name="cfg.json", needed="")
    )
    assert from_yaml == from_toml == from_json == load_config(values)
    assert from_yaml.optimizer.learning_rate == 2e-5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("'2e-5'", 2e-5),
        (".5", 0.5),
        ("1_0", 10.0),
    ],
)
def test_numbers_as_people_write_them(write_config, text, value):
    assert (
        load_config(write_config(f"learning_rate: {text}\n")).optimizer.learning_rate
        == value
    )
    assert (
        load_config(write_config(), [f"learning_rate={text}"]).optimizer.learning_rate
        == value
    )


def test_words_that_yaml_11_takes_for_something_else(write_config):
    text = "mixed_precision: no\nrun_name: 2024-01-02\nquery_prompt: 12:30\nuse_lora: yes\nresume: off\n"
    config = load_config(write_config(text + "wandb_tags: [no, 1]\n"))
    assert config.model.mixed_precision == "no"
    assert (config.logging.run_name, config.model.query_prompt) == (
        "2024-01-02",
        "12:30",
    )
    assert config.adapters.use_lora is True
    assert config.run.resume is False
    assert config.logging.wandb_tags == ["no", "1"]


def test_unknown_key_is_named_with_nearest_file_and_line(write_config):
    file = write_config("epochs: 3\n\n# a comment\n\nlearning_rat: 1e-5\n")
    message = error_of(file)
    assert "cfg.yaml, line 7" in message
    assert "'learning_rat'" in message
    assert "did you mean 'learning_rate'" in message


def test_unknown_key_of_toml_and_json(write_config):
    toml = 'model_name = "m"\ndata_path = "d"\n\n[fsdp]\nenabled = true\nmin_num_param = 5\n'
    message = error_of(write_config(toml, name="cfg.toml", needed=""))
    assert message.startswith("cfg.toml: ") and "'min_num_param'" in message
    text = '{\n  "model_name": "m",\n  "data_path": "d",\n  "batch_sise": 3\n}\n'
    assert "cfg.json, line 4" in error_of(
        write_config(text, name="cfg.json", needed="")
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epochs: many", "epochs must be auto or a number (above 0), but is 'many'"),
        ("batch_size: 2.5", "batch_size must be a whole number (above 0), but is 2.5"),
        ("pooling: meen", "but is 'meen', did you mean 'mean'?"),
        (
            "lora_dropout: 1.5",
            "lora_dropout must be a number (0 or above, at most 1), but is 1.5",
        ),
        ("use_lora: perhaps", "use_lora must be true or false, but is 'perhaps'"),
        (
            "report_to: [wandbb]",
            "each entry tensorboard, wandb, trackio or mlflow, but is ['wandbb']",
        ),
        ("data_path: {a: 1}", "data_path must be text or a list"),
    ],
)
@pytest.mark.promise("B04")
def test_wrong_value(write_config, line, words):
    message = error_of(write_config(line + "\n", needed=""))
    assert message.startswith("cfg.yaml, line 1: ")
    assert words in message


def test_a_source_with_a_mistyped_key(write_config):
    text = "model_name: m\ndata_path:\n- {path: a.jsonl, weight: 2}\n- {path: b.jsonl, wieght: 2}\n"
    assert (
        "data_path, entry 2: unknown key 'wieght', did you mean 'weight'?"
        in error_of(write_config(text, needed=""))
    )


def test_all_problems_at_once_the_first_in_the_first_line(write_config):
    lines = error_of(
        write_config("batch_size: x\nlearning_rat: 1\nfsdp: {cpu_offlod: true}\n"),
        ["epochs=0"],
    ).splitlines()
    assert len(lines) == 4
    assert "line 3" in lines[0] and "batch_size" in lines[0]
    assert [
        words in line
        for words, line in zip(
            ("learning_rate", "cpu_offload", "command line"), lines[1:], strict=True
        )
    ]


def test_missing_options(write_config):
    message = error_of(write_config("epochs: 1\n", needed=""))
    assert "model_name is missing" in message and "data_path is missing" in message


def test_key_given_twice(write_config):
    assert "cfg.yaml, line 4: 'seed' is already given in line 3" in error_of(
        write_config("seed: 1\nseed: 2\n")
    )
    twice = '{"seed": 1,\n"epochs": 1,\n"seed": 2%s}'
    assert "a.json, line 3: 'seed' is already given in line 1" in error_of(
        write_config(twice % "", name="a.json", needed="")
    )
    # Which of three the second one is, the reader does not know.
    inner = ', "training": {"seed": 3}'
    assert "'seed' is already given in line" in error_of(
        write_config(twice % inner, name="a.json", needed="")
    )
    assert "not valid TOML" in error_of(
        write_config("seed = 1\nseed = 2\n", name="a.toml", needed="")
    )


def test_one_option_under_two_names(write_config):
    message = error_of(write_config("lr: 1e-5\nlearning_rate: 2e-5\n"))
    assert "lr: 1e-05 (cfg.yaml, line 3) both set learning_rate" in message
    assert (
        load_config(
            write_config("lr: 1e-5\nlearning_rate: 1.0e-5\n")
        ).optimizer.learning_rate
        == 1e-5
    )
    assert "both set learning_rate" in error_of(
        write_config(), ["lr=1e-5", "learning_rate=1e-4"]
    )


def test_yaml_tags_and_bombs(write_config):
    assert "the tag !!python/object/apply:os.system is not allowed" in error_of(
        write_config("run_name: !!python/object/apply:os.system ['true']\n")
    )
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [
        f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]"
        for number in range(1, 9)
    ]
    assert "anchors expand to more than" in error_of(
        write_config("\n".join(levels) + "\n")
    )
    assert "nested deeper than" in error_of(write_config("a: &a [*a]\n"))
    nested = write_config("a: " + "[" * 5000 + "]" * 5000 + "\n")
    assert "recursion depth" in error_of(nested)


def test_anchors_and_merge_keys_work(write_config):
    text = (
        "training: &base {batch_size: 8, epochs: 2}\ntrainer:\n  <<: *base\n  seed: 7\n"
    )
    config = load_config(write_config(text))
    assert (config.batch.batch_size, config.optimizer.epochs, config.run.seed) == (
        8,
        2,
        7,
    )


def test_broken_files(write_config):
    assert "there is no such config file" in error_of("nowhere.yaml")
    assert "ends in .yaml, .yml, .toml or .json" in error_of(
        write_config(name="cfg.txt")
    )
    message = error_of(write_config("a: [1\n"))
    assert (
        "cfg.yaml, line 4: not valid YAML" in message and "line 3, column 4" in message
    )
    assert "has no options" in error_of(write_config(needed=""))
    assert "cfg.yaml: has no options" in error_of(write_config("- a\n- b\n", needed=""))
    Path("latin.yaml").write_bytes(b"model_name: m\nrun_name: caf\xe9\n")
    assert "latin.yaml, line 2: not UTF-8 text" in error_of("latin.yaml")
    Path("large.yaml").write_text("a: 1\n" * 100_000)
    assert "too many for a config" in error_of("large.yaml")


def test_overrides_read_values_as_yaml_and_text_as_it_stands(write_config):
    overrides = [
        "mrl_dims=[512, 256]",
        "use_mrl=true",
        "query_prompt=query: ",
        "run_name=2024",
        "document_prompt=null",
    ]
    overrides += [
        "freeze=vision,embeddings",
        "fsdp.sharding_strategy=shard_grad_op",
        "profile_steps=10,12",
    ]
    overrides += [
        "column_mapping.question=query",
        "column_mapping.a.b=positive",
        "data_path=a=b.jsonl",
        "resume=true",
    ]
    config = load_config(write_config(), overrides)
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


def test_a_mapping_on_the_command_line(write_config):
    text = "{Subject: query, My Answer: positive}"
    config = load_config(write_config(), [f"column_mapping={text}"])
    assert config.data.column_mapping == {"Subject": "query", "My Answer": "positive"}
    assert "{yours: ours}" in error_of(
        write_config(), ["column_mapping={Subject,Answer}"]
    )


def test_override_that_is_none(write_config):
    assert "command line: 'epochs' is not of the form key=value" in error_of(
        write_config(), ["epochs"]
    )
    assert "command line: unknown option 'epoch', did you mean 'epochs'" in error_of(
        write_config(), ["epoch=1"]
    )


def test_value_of_the_command_line_wins(write_config):
    assert (
        load_config(write_config("batch_size: 8\n"), ["batch_size=4"]).batch.batch_size
        == 4
    )
    config = load_config(write_config("batch_size: 8\n"), ["global_batch_size=64"])
    assert config.batch.global_batch_size == 64


def test_an_option_in_the_place_of_the_config_file():
    with pytest.raises(
        UserError,
        match="Give the config file first, and options as key=value behind it",
    ):
        load_config("model_name=m")
