"""Options of mine, audit, judge and generate: from their own file, from a training config, and from arguments."""

import pytest

from tests.data.files import write_beir, write_jsonl
from tests.mining.data import pair
from tests.tiny import read_json
from vembed import UserError, audit, generate, judge, mine
from vembed.cli.commands.make_data import audit as run_audit
from vembed.mining.options import (
    AuditConfig,
    GenerateConfig,
    JudgeConfig,
    MineConfig,
    load_options,
)

TRAINING = """
model_name: some/model
data:
  train_file: train.jsonl
val_data: val.jsonl
query_instruction: "query: "
max_seq_length: 128
learning_rate: 2.0e-5
use_lora: true
seed: 5
image_root: pictures
column_mapping: {title: query}
mine: {num_negatives: 3, every_epochs: 2}
"""


@pytest.fixture
def training(tmp_path):
    path = tmp_path / "cfg.yaml"
    path.write_text(TRAINING)
    row = pair("a question", "an answer")
    write_jsonl(tmp_path / "train.jsonl", [row] * 3)
    write_jsonl(tmp_path / "val.jsonl", [row])
    return path


@pytest.mark.parametrize(
    "kind, arguments, expected",
    [
        (
            MineConfig,
            ["output_path=x.jsonl"],
            {"model_name": "some/model", "max_length": 128, "num_negatives": 3},
        ),
        (
            MineConfig,
            ["output_path=x.jsonl", "retrievers=[bm25]", "num_negatives=2"],
            {"model_name": None, "retrievers": ["bm25"], "num_negatives": 2},
        ),
        (
            JudgeConfig,
            ["output_path=x.jsonl", "judges=[{model: a/judge}]"],
            {"column_mapping": {"title": "query"}},
        ),
        (
            GenerateConfig,
            ["output_path=x.jsonl", "corpus_path=docs.txt"],
            {"model_name": None, "image_root": "pictures", "seed": 5},
        ),
    ],
)
def test_a_training_config_serves(training, kind, arguments, expected):
    config = load_options(kind, training, arguments)
    assert {name: getattr(config, name) for name in expected} == expected
    paths = {"data_path": "train.jsonl", "val_data_path": "val.jsonl"}
    for name, path in paths.items():
        if name in kind.model_fields:
            assert getattr(config, name) == str(training.parent / path), "beside it"


def test_options_of_the_command_win_over_those_of_training(training):
    with training.open("a") as file:
        file.write("num_negatives: 7\noutput_path: mined.jsonl\nmax_length: 64\n")
    text = training.read_text().replace("max_seq_length: 128\n", "")
    training.write_text(text)
    config = load_options(MineConfig, training)
    assert (config.num_negatives, config.max_length, config.seed) == (7, 64, 5)


def test_a_limit_that_is_taken_for_an_option_of_training_is_named(training, caplog):
    with training.open("a") as file:
        file.write("margin: 0.1\noutput_path: mined.jsonl\n")
    config = load_options(MineConfig, training)
    assert config.margin is None
    (message,) = caplog.messages
    assert message.startswith(f"margin: 0.1 ({training}, line 14)")
    assert load_options(MineConfig, training, ["margin=0.2"]).margin == 0.2
    assert len(caplog.messages) == 1


def test_a_model_on_the_command_line_wins_over_retrievers_of_the_file(tmp_path):
    """Both in one place are refused."""
    path = tmp_path / "mine.yaml"
    lines = "data_path: a.jsonl\noutput_path: x.jsonl\nretrievers: [bm25]\n"
    path.write_text(lines)
    config = load_options(MineConfig, path, ["model_name=a/model"])
    assert (config.model_name, list(config.retrievers)) == ("a/model", [])
    path.write_text(f"{lines}model_name: m\n")
    with pytest.raises(UserError, match=r"mine\.yaml: .*model_name or retrievers"):
        load_options(MineConfig, path)


@pytest.mark.parametrize(
    "line, parts",
    [
        ("near_duplicat: 0.5", ["line 14", "near_duplicat", "near_duplicate"]),
        ("top_k: many", ["line 14", "top_k", "many"]),
    ],
)
def test_mistakes_are_named(training, line, parts):
    with training.open("a") as file:
        file.write(line)
    with pytest.raises(UserError) as error:
        load_options(AuditConfig, training)
    for part in [str(training), *parts]:
        assert part in str(error.value)


def test_audit_of_a_training_config(training, tmp_path, capsys):
    training.write_text(training.read_text().replace("{title: query}", "null"))
    page = tmp_path / "audit.html"
    arguments = [str(training), "model_name=null", f"output_path={page}"]
    run_audit(arguments)
    assert page.is_file()
    assert "3 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "values", "option", "read"),
    [
        (
            mine,
            {
                "model_name": "bm25",
                "data_path": "rows/train.jsonl",
                "output_path": "link.jsonl",
            },
            "output_path",
            "data_path",
        ),
        (
            judge,
            {
                "judges": [{"model": "some/judge"}],
                "data_path": "rows/t*.jsonl",
                "output_path": "rows/../rows/train.jsonl",
            },
            "output_path",
            "data_path",
        ),
        (
            audit,
            {
                "data_path": "rows",
                "output_path": "page.html",
                "cleaned_path": "rows/train.jsonl",
            },
            "cleaned_path",
            "data_path",
        ),
        (
            generate,
            {
                "corpus_path": ["corpus.jsonl", "rows/train.jsonl"],
                "output_path": "rows/train.jsonl",
            },
            "output_path",
            "corpus_path",
        ),
    ],
)
def test_an_output_that_is_an_input_is_refused(
    tmp_path, monkeypatch, command, values, option, read
):
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows" / "train.jsonl"
    rows.parent.mkdir()
    write_jsonl(rows, [pair("a", "b")] * 3)
    write_jsonl(tmp_path / "corpus.jsonl", [{"text": "b"}])
    (tmp_path / "link.jsonl").symlink_to(rows)
    before = rows.read_bytes()
    with pytest.raises(UserError, match=rf"^{option}: .* is read as {read}: "):
        command(values)
    assert rows.read_bytes() == before


def test_another_output_is_replaced_also_in_a_beir_folder(tmp_path):
    texts = {"d0": "a text", "d1": "one text"}
    write_beir(tmp_path, texts, texts, {"d1": ["d1"]})
    options = {"model_name": "bm25", "data_path": str(tmp_path)}
    output = tmp_path / "mined.jsonl"
    output.write_text("older\n")
    mine(options | {"output_path": str(output)})
    assert read_json(output)["query_id"] == "d1"
    with pytest.raises(UserError, match="is read as data_path"):
        mine(options | {"output_path": str(tmp_path / "corpus.jsonl")})
