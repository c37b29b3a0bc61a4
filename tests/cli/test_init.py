"""`vembed init` on files as they come: other headers, containers and kinds, doubts about them, and their sizes."""

import csv
import gzip
import json
import logging
import random
from pathlib import Path

import datasets
import pytest
from PIL import Image

from tests.tiny import shared, tiny_bert, tiny_clip
from vembed.config.loading import load_config
from vembed.data.language import is_english
from vembed.data_tools import starter
from vembed.data_tools.starter import guess
from vembed.models.families.table import FAMILIES

GERMAN = [
    "Drucker",
    "Rechnung",
    "Passwort",
    "Konto",
    "Bestellung",
    "Lieferung",
    "Garantie",
    "Vertrag",
]
MAPPING = {"Kundenfrage (orig)": "query", "Lösung/Text": "positive"}
QUESTIONS = [
    {
        "Question": f"where is number {number}?",
        "Answer": f"number {number} is behind {number + 1}",
    }
    for number in range(240)
]
BERT = str(shared(tiny_bert))
SIDES = ("messages", "positive_messages")


def write_rows(path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path(path).write_text(lines)
    return path


def text():
    return Path("vembed.yaml").read_text(encoding="utf-8")


@pytest.fixture
def start(vembed):
    """Writes a config for a data file, and returns it loaded."""

    def run(data, *words, model=BERT):
        named = () if model is None else ("--model", model)
        done = vembed("init --force --data", data, *named, *words)
        assert done.code == 0, done.err
        return load_config("vembed.yaml")

    return run


@pytest.fixture
def faq(vembed):
    """A German export of a ticket system, with semicolons, a byte order mark, ids and a category."""
    draw = random.Random(0)
    with Path("faq.csv").open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(["Ticket Nr.", *MAPPING, "Kategorie"])
        for number in range(120):
            first, second = draw.sample(GERMAN, 2)
            question = f"Wie geht {first} mit {second} {number}?"
            answer = f"{first} finden Sie auf der Seite {second}. "
            answer += "Bestätigen Sie dort. " * draw.randint(1, 3) + str(number)
            table.writerow([f"T-{number:05d}", question, answer, "A"])
    return "faq.csv"


def refused(done, *parts):
    assert done.code == 2
    for part in parts:
        assert part in done.err, done.err


def test_a_german_csv_goes_to_a_model_with_a_report_in_two_commands(vembed, start, faq):
    config = start(faq)
    assert config.data.column_mapping == MAPPING
    assert config.data.val_split == 0.1 and config.batch.batch_size == 8
    assert not config.optimizer.gives_length(), "early stopping may end the run"
    for part in (
        "# GUESSED, please check: Kundenfrage (orig) is the query (",
        "(measured)",
    ):
        assert part in text()
    done = vembed("train vembed.yaml max_steps=2 report_to=none")
    assert done.code == 0, done.err
    assert Path("output/report.html").is_file() and Path("output/final").is_dir()
    report = Path("output/report.md").read_text(encoding="utf-8")
    assert "10% of the queries of faq.csv" in report


def test_one_pass_is_no_passes(start, faq, monkeypatch):
    monkeypatch.setattr("vembed.cli.commands.init.fitting_epochs", lambda *_, **__: 1)
    start(faq)
    assert " 1 pass over " in text()


@pytest.mark.parametrize("has_negatives", [True, False])
def test_a_reranker_is_trained_in_two_commands(vembed, start, faq, has_negatives):
    """Pairs alone get hard negatives in a stage before the training."""
    pytest.importorskip("bm25s")
    data = faq
    if has_negatives:
        rows = []
        for number in range(60):
            texts = {"query": f"where is {number}?", "positive": f"{number} is here"}
            rows.append({**texts, "negatives": [f"{number + 1} is here"]})
        data = write_rows("train.jsonl", rows)
    config = start(data, "--task", "rerank")
    assert config.model.task == "rerank" and config.objective.loss == "bce"
    assert "mrl_dims" not in text() and "(measured)" in text()
    assert ("num_negatives: 7" in text()) != has_negatives
    done = vembed("train vembed.yaml max_steps=2 report_to=none")
    assert done.code == 0, done.err
    folder = Path("output") if has_negatives else Path("output/reranker")
    assert (folder / "final").is_dir()
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    scores = json.loads(metrics[-1])["eval"]
    assert 0 < scores["first_stage/ndcg@10"] <= 1


def test_images_get_no_reranker(vembed):
    write_rows("train.jsonl", [{"query": "a", "positive": "b"}] * 3)
    refused(vembed("init --task rerank --family clip"), "--task rerank", "text_encoder")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_for_each_family_loads(start, family):
    write_rows("train.jsonl", [{"query": "a", "positive": "b"}] * 3)
    config = start("train.jsonl", "--family", family, model=None)
    assert config.data.data_path == "train.jsonl"
    assert config.objective.loss == "infonce"
    assert config.optimizer.head_learning_rate is None
    assert all("#" in line for line in text().splitlines() if line.strip())


def test_a_file_is_not_written_over(vembed):
    Path("vembed.yaml").write_text("mine")
    refused(vembed("init"), "vembed.yaml")
    assert text() == "mine"
    refused(vembed("init --force"), "--data: train.jsonl does not exist")
    refused(vembed("init --family clipp --output a.yaml"), "'clip'")
    refused(vembed("init --output a.txt"), "a.txt")


@pytest.mark.parametrize(
    ("name", "content", "loss", "mapping"),
    [
        (
            "a.jsonl",
            '{"query": "a", "positive": "b", "negatives": ["c"]}',
            "infonce",
            None,
        ),
        (
            "a.jsonl",
            '{"sentence1": "a", "sentence2": "b", "score": 0.5}',
            "cosent",
            None,
        ),
        (
            "a.jsonl",
            '{"search": "a", "context": "b"}',
            "infonce",
            {"search": "query", "context": "positive"},
        ),
        (
            "a.csv",
            "ID;Subject;Resolution\n1;a;b\n",
            "infonce",
            {"Subject": "query", "Resolution": "positive"},
        ),
        (
            "a.jsonl",
            '{"caption": "a", "img": "b.png"}',
            "infonce",
            {"caption": "query", "img": "positive_image"},
        ),
    ],
)
def test_columns_are_known_by_their_names(start, name, content, loss, mapping):
    Image.new("RGB", (4, 4)).save("b.png")
    Path(name).write_text(content)
    config = start(name, "--val-data", name, model=None)
    assert config.objective.loss == loss
    assert config.data.column_mapping == mapping
    assert config.data.val_data_path == name


def test_rows_that_are_not_utf8_are_named(vembed, faq):
    rows = Path(faq).read_bytes().replace("Bestä".encode(), b"Best\xe4")
    Path(faq).write_bytes(rows)
    done = vembed("init --data", faq, "--model", BERT)
    refused(done, f"{faq}:2: not UTF-8")
    Path("own.csv").write_text("Fräge;Lösung\na;b\n", encoding="cp1252")
    refused(vembed(f"train model_name={BERT} data_path=own.csv"), "own.csv:1", "UTF-8")


def test_columns_can_be_named(vembed, start, faq):
    query, positive = MAPPING
    config = start(faq, "--query", positive, "--positive", query, model=None)
    assert config.data.column_mapping == {positive: "query", query: "positive"}
    assert "GUESSED" not in text()
    config = start(faq, "--column-mapping", "{Kategorie: query}")
    assert (config.data.column_mapping or {})["Kategorie"] == "query"
    done = vembed("init --force --data", faq, "--query", "Kundenfrage")
    refused(done, "faq.csv", "'Kundenfrage'", "'Kundenfrage (orig)'")
    mapping = "column_mapping={Kundenfrage: query, Lösung/Text: positive}"
    done = vembed("train", f"model_name={BERT}", f"data_path={faq}", mapping)
    refused(done, "Kundenfrage", "'Kundenfrage (orig)'")


def test_texts_that_are_not_english_get_a_model_of_many_languages(vembed, start, faq):
    model = start(faq, model=None).model.model_name
    assert model == "intfloat/multilingual-e5-base"
    done = vembed("init --force --model demo --data", faq)
    assert done.code == 0 and "multilingual" in done.err and "English" in done.err
    english = ["How do I reset my password?", "The printer is in the hall, café side."]
    assert is_english(english)
    assert is_english(["red cat", "SKU 12"]), "no language to be seen"
    assert not is_english(["Comment est la livraison dans le pays", "Je ne sais pas"])
    assert not is_english(["как дела"])


def test_a_wrong_answer_is_not_guessed_as_the_positive(start):
    rows = []
    for number in range(9):
        row = {
            "customer_said": f"question {number}?",
            "agent_said": f"a long answer {number}",
        }
        rows.append({**row, "wrong_reply": f"another long reply {number + 1}"})
    write_rows("train.jsonl", rows)
    config = start("train.jsonl")
    mapping = {"customer_said": "query", "agent_said": "positive"}
    assert config.data.column_mapping == mapping
    assert "wrong_reply: negative" in text()


def test_a_model_that_is_a_file_is_refused_in_a_dry_run(vembed, start, faq):
    start(faq)
    done = vembed("train vembed.yaml --dry-run --model-name", str(faq))
    assert done.code == 2 and "faq.csv" in done.err and "not a folder" in done.err


def test_numbers_are_no_texts():
    rows = []
    for number in range(9):
        row = {"nr": f"{number}", "a": f"short text {number}"}
        rows.append({**row, "b": f"a much longer text about it {number}"})
    mapping, _ = guess(rows, ["query", "positive"])
    assert mapping == {"a": "query", "b": "positive"}


def test_a_clip_config_fits_the_model(start):
    write_rows("train.jsonl", [{"query": "a", "positive": {"image": "b.png"}}])
    model = str(shared(tiny_clip))
    config = start("train.jsonl", "--family", "clip", model=model)
    facts = starter.model_facts(model)
    assert facts is not None
    assert (config.model.max_length or 1000) <= facts.max_length
    assert "temperature" not in config.objective.model_fields_set, "the model's"


def test_a_local_model_says_its_family(start):
    Image.new("RGB", (4, 4)).save("b.png")
    write_rows("train.jsonl", [{"photo": "b.png", "words": "a cat on a mat"}])
    config = start("train.jsonl", model=str(shared(tiny_clip)))
    assert config.data.column_mapping == {"photo": "positive_image", "words": "query"}
    assert "text and images" in text() or "CLIP" in text(), text()
    assert "BERT-like" not in text()


def test_values_from_the_size_of_the_data():
    sizes = (0, 5, 100, 1000, 10_000)
    batches = [starter.fitting_batch(size, 64) for size in sizes]
    assert batches == [64, 5, 8, 32, 64]
    epochs = [starter.fitting_epochs(size) for size in (100, 3_000, 50_000)]
    assert epochs == [6, 4, 1]
    shares = [starter.held_out_share(size) for size in (20, 500, 1_000_000)]
    assert shares == [None, 0.1, 0.002]
    lengths = starter.measure_lengths(["word " * 30] * 99 + ["word " * 900], None)
    assert lengths is not None and not lengths.is_measured
    assert starter.fitting_length(lengths, 512, 512) == 64
    assert starter.fitting_length(lengths, 32, 512) == 32


def test_the_data_of_a_config_on_one_page(vembed, start, faq, monkeypatch):
    start(faq)
    done = vembed("data vembed.yaml max_length=16", "query_prompt=find: ")
    assert done.code == 0, done.err
    for part in (
        "not used: Kategorie, Ticket Nr.",
        "queries: 107 different, 0 repetitions",
        "negatives:\n  none given",
        "(at most 16):",
        "[CLS]",
        "faq.csv:2",
    ):
        assert part in done.out, done.out
    write_rows("val.jsonl", [{"query": "wie geht Konto", "positive": "a"}])
    row = {"query": "Wie geht Konto?", "positive": "b", "negatives": ["B", "c"]}
    write_rows("train.jsonl", [row] * 2)
    # Without those of pytest Python prints what no handler takes.
    monkeypatch.setattr(logging.root, "handlers", [])
    model = f"model_name={BERT}"
    done = vembed("data data_path=train.jsonl val_data_path=val.jsonl", model)
    assert "are in the training data" not in done.err, "said once"
    for part in (
        "1 of the 1 queries of the validation data (100.0%) are in the training data",
        "2 examples have one of their positives among their negatives",
        "pairs: 1 different, 1 repetition",
    ):
        assert part in done.out
    assert "other positives in another record" not in done.out
    write_rows("train.jsonl", [row, {**row, "positive": "d"}])
    done = vembed("data data_path=train.jsonl", model)
    assert "warning: queries with other positives in another record: 1." in done.out
    assert "no_duplicates: true" in done.out
    done = vembed("data data_path=train.jsonl task=rerank", model)
    assert done.code == 0 and "other positives in another record" not in done.out


def test_a_dry_run_shows_what_is_given_and_the_data(vembed, start, faq):
    start(faq)
    done = vembed("train vembed.yaml --dry-run")
    assert done.code == 0, done.err
    assert "batch_size: 8  # vembed.yaml:" in done.out
    assert "weight_decay" not in done.out and "==== data" in done.out
    write_rows("bad.jsonl", [{"query": "a"}])
    words = "data_path=bad.jsonl column_mapping=null --dry-run"
    done = vembed(f"train vembed.yaml {words}")
    refused(done, "bad.jsonl:1")
    assert "world size: 1" in done.out


# ---- containers and kinds of data ----------------------------------------------------------------------------------


def write_container(kind):
    """Write QUESTIONS in a container of this name."""
    if kind == "saved":
        splits = {"train": QUESTIONS, "test": QUESTIONS[:3]}
        datasets.DatasetDict(
            {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
        ).save_to_disk(kind)
    elif kind.startswith("parts"):
        Path("parts").mkdir()
        for number in range(2):
            write_rows(f"parts/{number}.jsonl", QUESTIONS[number * 120 :][:120])
    else:
        lines = ["Question,Answer", *(",".join(row.values()) for row in QUESTIONS)]
        Path(kind).write_bytes(gzip.compress("\n".join(lines).encode()))


@pytest.mark.parametrize("data", ["saved", "a.csv.gz", "parts", "parts/*.jsonl"])
def test_columns_and_sizes_are_looked_at_in_every_container(vembed, start, data):
    write_container(data)
    config = start(data)
    assert config.data.data_path == data
    assert config.data.column_mapping == {"Question": "query", "Answer": "positive"}
    assert config.data.val_split == 0.1 and config.batch.batch_size == 8
    assert "# Data: 240 records" in text()
    assert vembed("train vembed.yaml --dry-run").code == 0


@pytest.mark.parametrize("kind", ["classes", "scores"])
def test_a_tenth_of_labelled_and_of_scored_data_is_held_out_too(vembed, start, kind):
    rows = []
    for number in range(240):
        animal = ("cat", "dog", "cow")[number % 3]
        row = {"text": f"{animal} number {number}", "label": number % 3}
        if kind == "scores":
            row = {
                "sentence1": f"cat {number}",
                "sentence2": f"dog {number}",
                "score": number % 7,
            }
        rows.append(row)
    assert start(write_rows("a.jsonl", rows)).data.val_split == 0.1
    done = vembed("train vembed.yaml max_steps=1 report_to=none")
    assert done.code == 0, done.err
    assert ("nDCG@10" if kind == "classes" else "Spearman") in done.err + done.out


@pytest.mark.parametrize(
    ("content", "doubt"),
    [
        (
            "Where is the cat?,In the house by the river\nWhere is the dog?,There\n",
            "if it is a record, put a line",
        ),
        ("sentence1,sentence2,label\na,b,0\nc,d,1\ne,f,2\n", "label (0, 1, 2)"),
        ("query,positive\na,b\n,d\n", "left out: a.csv:3: query is empty"),
        ("query,positive,page\na,b,1\nc,d,2\n", None),
    ],
)
def test_doubts_are_said_and_stand_in_the_config(vembed, content, doubt):
    Path("a.csv").write_text(content)
    done = vembed("init --data a.csv")
    assert done.code == 0
    if doubt is None:
        assert "note: " not in done.err and "CHECK" not in text()
    else:
        assert doubt in done.err and "# CHECK: " in text()


@pytest.mark.parametrize("kind", ["passages", "conversations", "for_excel"])
def test_shapes_of_other_programs(vembed, start, kind):
    passage = "word " * 60
    message = [{"role": "user", "content": passage}]
    name = "a.jsonl"
    if kind == "passages":
        passages = [{"title": "t", "text": passage}]
        write_rows(name, [{"query": "q", "positive_passages": passages}] * 60)
    elif kind == "conversations":
        write_rows(name, [{**dict.fromkeys(SIDES, message), "label": 0.5}] * 60)
    else:
        name = "a.csv"
        Path(name).write_text("sep=;\nquery;positive\n" + f"q;{passage}\n" * 60)
    config = start(name)
    assert (config.model.max_length or 0) >= 60, "a text of 60 words is not cut"
    loss = "cosent" if kind == "conversations" else "infonce"
    assert config.objective.loss == loss and config.data.column_mapping is None
    assert "# Data: 60 records" in text()
    done = vembed("train vembed.yaml val_split=null --dry-run")
    assert done.code == 0, done.err


@pytest.mark.parametrize("line", ['{"query": "where', '"oops"'])
def test_a_line_that_is_no_object_is_left_out(vembed, start, line):
    rows = [
        {"query": f"where is {number}?", "positive": f"{number} is here"}
        for number in range(60)
    ]
    lines = [json.dumps(row) for row in rows]
    lines.insert(1, line)
    Path("x.jsonl").write_text("\n".join(lines))
    config = start("x.jsonl")
    assert config.data.on_bad_record == "skip"
    assert "1 of 61 records" in text() and "x.jsonl:2: " in text()
    assert "the first 60 records have query, positive" in text()
    done = vembed("train vembed.yaml max_steps=1 report_to=none")
    assert done.code == 0, done.err
    Path("x.jsonl").write_text(line)
    done = vembed("init --force --data x.jsonl --model", BERT)
    assert done.code == 2 and "x.jsonl:1: " in done.err


def test_bad_records_and_images_are_counted_as_training_counts_them(vembed, start):
    """35 bad records beyond the first ones, and 5 broken images: the config leaves them out, and trains."""
    rows = [
        {"query": f"where is {number}?", "positive": f"{number} is here"}
        for number in range(400)
    ]
    for number in range(200, 235):
        rows[number]["query"] = ""
    config = start(write_rows("a.jsonl", rows))
    assert "35 of 400 records" in text()
    assert config.data.on_bad_record == "skip"
    done = vembed("train vembed.yaml max_steps=1 report_to=none")
    assert done.code == 0, done.err
    for number in range(20):
        Image.new("RGB", (8, 8), "red").save(f"{number}.png")
    for number in range(5):
        Path(f"{number}.png").write_bytes(b"no image")
    lines = [f"picture {number},{number}.png" for number in range(20)]
    Path("b.csv").write_text("\n".join(["text,image", *lines]))
    start("b.csv", "--family", "clip", model=None)
    assert "5 of 20 records" in text()


@pytest.mark.parametrize(("name", "is_used"), [("validation", True), ("test", False)])
def test_the_validation_split_of_a_saved_dataset_is_used(vembed, start, name, is_used):
    splits = {"train": QUESTIONS[30:], name: QUESTIONS[:30]}
    datasets.DatasetDict(
        {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
    ).save_to_disk("saved")
    config = start("saved")
    assert config.data.val_data_path == ("saved" if is_used else None)
    assert (config.data.val_split is None) == is_used
    if is_used:
        done = vembed("train vembed.yaml --dry-run")
        assert "30 queries over 30 documents" in done.out + done.err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"a": 1}\n'),
        ("a.jsonl", "\n"),
        # As pandas writes it without orient="records".
        ("a.json", '{"query": {"0": "a"}, "positive": {"0": "b"}}'),
        ("a.parquet", "nothing"),
        ("a.xlsx", "PK"),
        ("pictures/a.png", ""),
    ],
)
def test_what_cannot_be_trained_on_is_refused(vembed, name, content):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    data = path.parent if path.suffix == ".png" else path
    refused(vembed("init --data", str(data)), str(data))
    assert not Path("vembed.yaml").exists()
