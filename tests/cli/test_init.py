"""`vembed init` on files as they come: other headers, ids and categories beside the texts, the sizes of the data."""

from __future__ import annotations

import csv
import logging
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Command
from tests.tiny import shared, tiny_bert, tiny_clip
from vembed.config.loading import load_config
from vembed.config.resolved import ResolvedRun
from vembed.data.language import is_english
from vembed.data_tools.init import columns, values
from vembed.data_tools.init.columns import guess
from vembed.pipelines import prediction

GERMAN = (
    "Drucker",
    "Rechnung",
    "Passwort",
    "Konto",
    "Bestellung",
    "Lieferung",
    "Garantie",
    "Termin",
    "Vertrag",
)


@pytest.fixture
def faq(vembed: Command) -> str:
    """A German export of a ticket system, with semicolons, a byte order mark, ids and a category."""
    draw = random.Random(0)
    with Path("faq.csv").open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(
            ["Ticket Nr.", "Kundenfrage (orig)", "L\u00f6sung/Text", "Kategorie"]
        )
        for number in range(120):
            first, second = draw.sample(GERMAN, 2)
            answer = (
                f"{first} finden Sie auf der Seite {second}. "
                + "Best\u00e4tigen Sie dort. " * draw.randint(1, 3)
            )
            table.writerow(
                [
                    f"T-{number:05d}",
                    f"Wie geht {first} mit {second} {number}?",
                    answer + str(number),
                    "A",
                ]
            )
    return "faq.csv"


def test_a_german_csv_goes_to_a_model_with_a_report_in_two_commands(
    vembed: Command, faq: str
) -> None:
    done = vembed("init", "--data", faq, "--model", str(shared(tiny_bert)))
    assert done.code == 0, done.err
    config = load_config("vembed.yaml")
    assert config.data.column_mapping == {
        "Kundenfrage (orig)": "query",
        "L\u00f6sung/Text": "positive",
    }
    assert config.data.val_split == 0.1 and config.batch.batch_size == 8
    text = Path("vembed.yaml").read_text(encoding="utf-8")
    assert (
        "# GUESSED, please check: Kundenfrage (orig) is the query (" in text
        and "end with a question mark" in text
    )
    assert "(measured)" in text and "of a process on this machine: fits" in text
    done = vembed("train", "vembed.yaml", "max_steps=2", "report_to=none")
    assert done.code == 0, done.err
    assert Path("output/report.html").is_file() and Path("output/final").is_dir()
    assert "10% of the queries of faq.csv" in Path("output/report.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("encoding", "name"), [("cp1252", "Windows-1252"), ("utf-16", "UTF-16")]
)
def test_a_csv_as_excel_saves_it_is_copied_to_utf8(
    vembed: Command, faq: str, encoding: str, name: str
) -> None:
    text = Path(faq).read_text(encoding="utf-8-sig")
    Path("export.csv").write_text(text, encoding=encoding)
    done = vembed("init", "--data", "export.csv", "--model", str(shared(tiny_bert)))
    assert (
        done.code == 0
        and f"note: export.csv is not UTF-8; export.utf8.csv is a copy that is, read as {name}"
        in done.err
    )
    assert Path("export.utf8.csv").read_text(encoding="utf-8") == text
    config = load_config("vembed.yaml")
    assert config.data.data_path == "export.utf8.csv"
    assert config.data.column_mapping == {
        "Kundenfrage (orig)": "query",
        "L\u00f6sung/Text": "positive",
    }
    assert (
        f"GUESSED, please check its letters: export.utf8.csv is a copy of export.csv in UTF-8, read as {name}"
        in Path("vembed.yaml").read_text(encoding="utf-8")
    )


def test_data_in_the_place_of_a_config_lead_to_init(vembed: Command, faq: str) -> None:
    done = vembed("data", faq)
    assert (
        done.code == 2
        and "Of data, `vembed init --data faq.csv` makes one." in done.err
    )
    Path("own.csv").write_text("Fr\u00e4ge;L\u00f6sung\na;b\n", encoding="cp1252")
    done = vembed("train", f"model_name={shared(tiny_bert)}", "data_path=own.csv")
    assert (
        done.code == 2
        and "save the file as UTF-8, or let `vembed init --data` make such a copy"
        in done.err
    )


def test_a_csv_in_another_encoding_is_refused(vembed: Command, faq: str) -> None:
    damaged = Path(faq).read_bytes().replace(b"Best\xc3\xa4tigen", b"Best\xe4tigen", 1)
    line = damaged[: damaged.index(b"Best\xe4tigen")].count(b"\n") + 1
    Path(faq).write_bytes(damaged)
    done = vembed("init", "--data", faq)
    assert (
        done.code == 2
        and f"faq.csv, line {line}: not UTF-8 text; save the file as UTF-8" in done.err
    )
    Path(faq).write_bytes(b"query,positive\n\x81\x8d,b\n")
    assert "faq.csv, line 2: not UTF-8 text" in vembed("init", "--data", faq).err
    Path("own.csv").write_text("query;positive\n\u00e4;b\n", encoding="cp1252")
    Path("own.utf8.csv").write_text("another")
    done = vembed("init", "--data", "own.csv")
    assert done.code == 2 and "own.utf8.csv, which is another file already" in done.err
    assert not Path("vembed.yaml").exists()


def test_columns_can_be_named(vembed: Command, faq: str) -> None:
    assert (
        vembed(
            "init",
            "--data",
            faq,
            "--query",
            "L\u00f6sung/Text",
            "--positive",
            "Kundenfrage (orig)",
        ).code
        == 0
    )
    assert load_config("vembed.yaml").data.column_mapping == {
        "L\u00f6sung/Text": "query",
        "Kundenfrage (orig)": "positive",
    }
    text = Path("vembed.yaml").read_text(encoding="utf-8")
    assert "GUESSED" not in text
    assert "is not on this machine; once it is, `vembed plan <this file>`" in text, (
        "no model was named"
    )
    assert (
        vembed(
            "init", "--data", faq, "--column-mapping", "{Kategorie: query}", "--force"
        ).code
        == 0
    )
    assert (load_config("vembed.yaml").data.column_mapping or {})[
        "Kategorie"
    ] == "query"
    done = vembed("init", "--data", faq, "--query", "Kundenfrage", "--force")
    assert done.code == 2
    assert (
        "faq.csv has no column 'Kundenfrage', did you mean 'Kundenfrage (orig)'?"
        in done.err
    )


def test_texts_that_are_not_english_get_a_model_of_many_languages(
    vembed: Command, faq: str
) -> None:
    assert vembed("init", "--data", faq).code == 0
    assert (
        load_config("vembed.yaml").model.model_name == "intfloat/multilingual-e5-base"
    )
    assert "of many languages: the texts are not English" in Path(
        "vembed.yaml"
    ).read_text(encoding="utf-8")
    assert is_english(
        ["How do I reset my password?", "The printer is in the hall, caf\u00e9 side."]
    )
    assert is_english(["red cat", "SKU 12"]), "no language to be seen"
    assert not is_english(["Comment est la livraison dans le pays", "Je ne sais pas"])
    assert not is_english(["\u043a\u0430\u043a \u0434\u0435\u043b\u0430"])


def test_a_mapping_of_a_column_that_is_not_there_names_the_nearest(
    vembed: Command, faq: str
) -> None:
    mapping = "column_mapping={Kundenfrage: query, L\u00f6sung/Text: positive}"
    done = vembed(
        "train", f"model_name={shared(tiny_bert)}", f"data_path={faq}", mapping
    )
    assert done.code == 2
    assert "Kundenfrage" in done.err and "did you mean 'Kundenfrage (orig)'" in done.err


def test_a_terminal_is_asked(faq: str) -> None:
    rows = [
        {
            "nr": f"{number}",
            "a": f"short text {number}",
            "b": f"a much longer text about it {number}",
        }
        for number in range(9)
    ]
    found = guess(rows, ["query", "positive"])
    assert found.mapping == {"a": "query", "b": "positive"}
    answers = iter(["7", "2", ""])
    asked: list[str] = []

    def read(prompt: str) -> str:
        asked.append(prompt)
        return next(answers)

    assert [one.name for one in found.candidates] == ["b", "a"]
    assert columns.confirm(found, ["query", "positive"], read) == {
        "a": "query",
        "b": "positive",
    }
    assert "1  b: a much longer text about it 0" in asked[0] and "nr" not in asked[0]
    assert asked[1] == "A number from 1 to 2: "


def test_a_clip_config_fits_the_model(vembed: Command) -> None:
    Path("train.jsonl").write_text('{"query": "a", "positive": {"image": "b.png"}}\n')
    done = vembed("init", "--family", "clip", "--model", str(shared(tiny_clip)))
    assert done.code == 0, done.err
    config = load_config("vembed.yaml")
    facts = values.model_facts(str(shared(tiny_clip)))
    assert facts is not None and facts.temperature is not None
    assert (
        config.model.max_length is not None
        and config.model.max_length <= facts.max_length
    )
    assert config.objective.temperature == facts.temperature


def test_a_folder_of_images_and_a_missing_file(vembed: Command) -> None:
    Path("pictures").mkdir()
    Path("pictures/a.png").touch()
    done = vembed("init", "--family", "clip", "--data", "pictures")
    assert (
        done.code == 2
        and "pictures is a folder of images, which says nothing of what belongs together"
        in done.err
    )
    assert not Path("vembed.yaml").exists()
    done = vembed("init", "--data", "nowhere.csv")
    assert (
        done.code == 0
        and "note: nowhere.csv is not here, so columns, lengths and sizes are defaults"
        in done.err
    )


def test_values_from_the_size_of_the_data() -> None:
    assert [
        values.fitting_batch(number, 64) for number in (0, 5, 100, 1000, 10_000)
    ] == [64, 5, 8, 32, 64]
    assert [values.fitting_epochs(number) for number in (100, 3_000, 50_000)] == [
        6,
        4,
        1,
    ]
    assert [values.held_out_share(number) for number in (20, 500, 1_000_000)] == [
        None,
        0.1,
        0.002,
    ]
    assert [values.steps_between(number) for number in (20, 148, 5_000)] == [
        None,
        10,
        500,
    ]
    lengths = values.measure(["word " * 30] * 99 + ["word " * 900], None)
    assert lengths is not None and not lengths.is_measured
    assert (
        values.fitting_length(lengths, 512, 512) == 64
        and values.fitting_length(lengths, 32, 512) == 32
    )


def test_the_data_of_a_config_on_one_page(
    vembed: Command, faq: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vembed("init", "--data", faq, "--model", str(shared(tiny_bert))).code == 0
    done = vembed("data", "vembed.yaml", "query_prompt=find: ", "max_length=16")
    assert done.code == 0, done.err
    for words in (
        "not used: Kategorie, Ticket Nr.",
        "queries: 108 different, 0 repetitions",
        "negatives: none given",
        "lengths in tokens, with prompts and special tokens (at most 16):",
        "[CLS]",
        "faq.csv:2",
    ):
        assert words in done.out, done.out
    Path("val.jsonl").write_text('{"query": "wie geht Konto", "positive": "a"}\n')
    Path("train.jsonl").write_text(
        '{"query": "Wie geht Konto?", "positive": "b", "negatives": ["B", "c"]}\n' * 2
    )
    monkeypatch.setattr(
        logging.root, "handlers", []
    )  # those of pytest: Python prints what no handler takes
    done = vembed(
        "data",
        f"model_name={shared(tiny_bert)}",
        "data_path=train.jsonl",
        "val_data_path=val.jsonl",
    )
    assert "are in the training data" not in done.err, "said once"
    assert (
        "warning: 1 of the 1 queries of the validation data (100%) are in the training data too"
        in done.out
    )
    assert "2 examples have one of their positives among their negatives" in done.out
    assert "pairs: 1 different, 1 repetition" in done.out
    done = vembed(
        "data", f"model_name={shared(tiny_bert)}", "data_path=[train.jsonl, val.jsonl]"
    )
    rows = [line.split() for line in done.out.splitlines()]
    assert ["source", "train.jsonl", "val.jsonl"] in rows and [
        "repeated",
        "queries",
        "50%",
        "0%",
    ] in rows
    assert ["negatives", "each", "2.0", "0.0"] in rows


def test_a_dry_run_shows_what_is_given_and_the_data(vembed: Command, faq: str) -> None:
    assert vembed("init", "--data", faq, "--model", str(shared(tiny_bert))).code == 0
    done = vembed("train", "vembed.yaml", "--dry-run")
    assert done.code == 0, done.err
    assert (
        "batch_size: 8  # vembed.yaml:" in done.out and "weight_decay" not in done.out
    )
    assert "==== data" in done.out and "samples, as the model reads them:" in done.out
    assert (
        "weight_decay: 0.01  # default"
        in vembed("train", "vembed.yaml", "--dry-run", "--all").out
    )
    assert "--all belongs to --dry-run" in vembed("train", "vembed.yaml", "--all").err
    Path("bad.jsonl").write_text('{"query": "a"}\n')
    done = vembed(
        "train",
        "vembed.yaml",
        "data_path=bad.jsonl",
        "column_mapping=null",
        "--dry-run",
    )
    assert done.code == 2 and "world size: 1" in done.out and "bad.jsonl:1" in done.err


def test_a_config_gets_the_settings_that_memory_needs(
    vembed: Command, faq: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("init", "--data", faq, "--model", str(shared(tiny_bert)), "--force")
    needs = {None: 9.0, True: 3.0}

    def placed(run: ResolvedRun, *_: object) -> SimpleNamespace:
        gigabytes = needs[run.config.model.gradient_checkpointing]
        memory = SimpleNamespace(total=gigabytes * 2**30)
        return SimpleNamespace(size=1, memory=4.0 * 2**30, predict=lambda _: memory)

    monkeypatch.setattr(prediction, "place_here", placed)
    assert vembed(*words).code == 0
    assert load_config("vembed.yaml").model.gradient_checkpointing is True
    text = Path("vembed.yaml").read_text(encoding="utf-8")
    assert (
        "# 9.0 GB of the 4.0 GB of a process on this machine without these settings"
        in text
    )
    needs[True] = 9.0
    assert vembed(*words).code == 0
    assert "of a process on this machine: take a smaller model" in Path(
        "vembed.yaml"
    ).read_text(encoding="utf-8")


def test_messages_name_what_is_wrong(vembed: Command) -> None:
    base = ("config", "model_name=m", "data_path=d")
    assert (
        "batch_size: 1e+20 is too large; a whole number must be below 2^63"
        in vembed(*base, "batch_size=1e20").err
    )
    assert "batch_size must be a whole number" in vembed(*base, "batch_size=1.5").err
    Path("list.yaml").write_text("- a\n- b\n")
    assert (
        "list.yaml: is a list of 2 entries, not a config"
        in vembed("config", "list.yaml").err
    )


def test_a_learning_rate_that_breaks_the_weights_is_blamed(
    vembed: Command, faq: str
) -> None:
    assert vembed("init", "--data", faq, "--model", str(shared(tiny_bert))).code == 0
    done = vembed(
        "train",
        "vembed.yaml",
        "lr=1e30",
        "max_steps=4",
        "warmup_ratio=0",
        "report_to=none",
        "eval_before=no",
    )
    assert done.code == 1
    assert (
        "all embeddings are non-finite, so the weights are: an earlier update with learning_rate: 1e+30"
        in done.err
    )
    assert (
        "no checkpoint was saved before" in done.err
        and "bf16" not in done.err
        and "faq.csv:" not in done.err
    )
