"""`vembed init` on files as they come: other headers, containers and kinds, doubts about them, and their sizes."""

import csv
import gzip
import json
import logging
import random
from functools import partial
from pathlib import Path

import datasets
import pytest

from tests.data.files import numbered, pair, write_jsonl
from tests.data.pictures import write
from tests.tiny import shared, tiny_bert, tiny_clip, tiny_qwen3_reranker
from vembed.config.loading import load_config
from vembed.data.examples import Example, Item
from vembed.data.features import build_featuriser
from vembed.data_tools import starter
from vembed.models.families.description import describe
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
    {"Question": f"where is number {number}?", "Answer": f"it is behind {number + 1}"}
    for number in range(240)
]
TICKETS = {"Subject": "query", "Resolution": "positive"}
CAPTIONS = {"caption": "query", "img": "positive_image"}
BERT = str(shared(tiny_bert))


def write_rows(path, rows):
    return str(write_jsonl(Path(path), rows))


def save_splits(**splits):
    """Save splits as a dataset, in the folder `saved`."""
    saved = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(saved).save_to_disk("saved")


def text():
    return Path("vembed.yaml").read_text(encoding="utf-8")


@pytest.fixture
def start(vembed):
    """Writes a config for a data file, and returns it loaded."""

    def run(data, *words, model=BERT):
        named = () if model is None else ("--model", model)
        vembed("init --force --data", data, *named, *words)
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


@pytest.fixture
def trained(vembed):
    """Trains with the config that was written."""
    return partial(vembed, "train vembed.yaml report_to=none")


def test_a_german_csv_goes_to_a_model_with_a_report_in_two_commands(
    trained, start, faq
):
    config = start(faq)
    assert config.data.column_mapping == MAPPING
    assert config.data.val_split == 0.1 and config.batch.batch_size == 8
    assert not config.optimizer.sets_length(), "early stopping may end the run"
    assert "# GUESSED, please check: Kundenfrage (orig) is the query (" in text()
    assert "(measured)" in text()
    trained("max_steps=2")
    assert Path("output/report.html").is_file() and Path("output/final").is_dir()
    report = Path("output/report.md").read_text(encoding="utf-8")
    assert "10% of the queries of faq.csv" in report


@pytest.mark.parametrize("is_swapped", [True, False])
def test_answers_under_the_name_of_questions_are_suspected(start, is_swapped):
    first, second = ("Answer", "Question") if is_swapped else ("Question", "Answer")
    rows = [{first: row["Question"], second: row["Answer"]} for row in QUESTIONS]
    start(write_rows("faq.jsonl", rows))
    assert ("swapped" in text()) == is_swapped


@pytest.mark.parametrize("has_negatives", [True, False])
def test_a_reranker_is_trained_in_two_commands(trained, start, faq, has_negatives):
    """Pairs alone get hard negatives in a stage before the training."""
    pytest.importorskip("bm25s")
    data = faq
    if has_negatives:
        rows = []
        for number in range(60):
            row = pair(f"where is {number}?", f"{number} is here")
            rows.append({**row, "negatives": [f"{number + 1} is here"]})
        data = write_rows("train.jsonl", rows)
    config = start(data, "--task", "rerank")
    assert config.model.task == "rerank" and config.objective.loss == "bce"
    assert "mrl_dims" not in text() and "(measured)" in text()
    assert ("num_negatives: 7" in text()) != has_negatives
    trained("max_steps=2")
    folder = Path("output") if has_negatives else Path("output/reranker")
    assert (folder / "final").is_dir()
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    scores = json.loads(metrics[-1])["eval"]
    assert 0 < scores["first_stage/ndcg@10"] <= 1


def test_a_question_around_a_pair_counts_in_its_length(start):
    rows = [pair(f"where is {number}?", f"{number} is here") for number in range(60)]
    data = write_rows("train.jsonl", rows)
    model = str(shared(tiny_qwen3_reranker))
    config = start(data, "--task", "rerank", model=model)
    featuriser = build_featuriser(describe(config.model))
    (unit,) = featuriser.units(Example(Item("where is 1?"), (Item("1 is here"),)))
    (features,) = featuriser.features([unit])
    assert features.length < config.model.max_length


def test_images_get_no_reranker(refused):
    write_rows("train.jsonl", numbered(3))
    refused("init --task rerank --family clip", "--task rerank", "text_encoder")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_for_each_family_loads(start, family):
    write_rows("train.jsonl", numbered(3))
    config = start("train.jsonl", "--family", family, model=None)
    assert config.data.data_path == "train.jsonl"
    assert config.objective.loss == "infonce"
    assert config.optimizer.head_learning_rate is None
    assert all("#" in line for line in text().splitlines() if line.strip())


def test_a_file_is_not_written_over(refused):
    Path("vembed.yaml").write_text("mine")
    refused("init", "vembed.yaml")
    assert text() == "mine"
    refused("init --force", "--data: train.jsonl does not exist")
    refused("init --family clipp --output a.yaml", "'clip'")
    refused("init --output a.txt", "a.txt")


@pytest.mark.parametrize(
    ("content", "loss", "mapping"),
    [
        ("query,positive,negative\na,b,c", "infonce", None),
        ("sentence1,sentence2,score\na,b,0.5", "cosent", None),
        ("search,context\na,b", "infonce", {"search": "query", "context": "positive"}),
        ("ID;Subject;Resolution\n1;a;b", "infonce", TICKETS),
        ("caption,img\na,b.png", "infonce", CAPTIONS),
    ],
)
def test_columns_are_known_by_their_names(start, content, loss, mapping):
    write(Path("b.png"), "PNG")
    Path("a.csv").write_text(content)
    config = start("a.csv", "--val-data", "a.csv", model=None)
    assert config.objective.loss == loss
    assert config.data.column_mapping == mapping
    assert config.data.val_data_path == "a.csv"


def test_a_file_of_another_encoding_is_refused(refused, start, faq):
    def damage(num_rows):
        lines = Path(faq).read_bytes().splitlines(keepends=True)
        for number in range(1, 1 + num_rows):
            lines[number] = lines[number].replace("Bestä".encode(), b"Best\xe4")
        Path(faq).write_bytes(b"".join(lines))

    damage(12)
    assert start(faq).data.on_bad_record == "skip"
    assert "12 of 120 records cannot be used" in text()
    damage(13)
    words = f"init --force --data {faq} --model {BERT}"
    parts = ("13 of the first 120 records", f"is {faq}:2", "iconv -f latin1 -t utf-8")
    refused(words, *parts)


def test_a_model_that_is_not_here_is_said(vembed, faq):
    done = vembed(f"init --data {faq} --model nosuch/model")
    assert "note: nosuch/model could not be looked at" in done.err
    assert "--family" in text()


def test_columns_can_be_named(refused, vembed, start, faq):
    query, positive = MAPPING
    config = start(faq, "--query", positive, "--positive", query, model=None)
    assert config.data.column_mapping == {positive: "query", query: "positive"}
    assert "GUESSED" not in text()
    config = start(faq, "--column-mapping", "{Kategorie: query}")
    assert (config.data.column_mapping or {})["Kategorie"] == "query"
    there_is = "'Kundenfrage (orig)'"
    words = f"--data {faq} --query Kundenfrage"
    refused(f"init --force {words}", "faq.csv", "'Kundenfrage'", there_is)
    mapping = "column_mapping={Kundenfrage: query, Lösung/Text: positive}"
    words = f"train model_name={BERT} data_path={faq}"
    assert there_is in vembed(words, mapping, code=2).err


def test_texts_that_are_not_english_get_a_model_of_many_languages(vembed, start, faq):
    model = start(faq, model=None).model.model_name
    assert model == "intfloat/multilingual-e5-base"
    done = vembed("init --force --model demo --data", faq)
    assert "multilingual" in done.err and "English" in done.err
    model = tiny_bert(Path("model"))
    for language in ("de", "en"):
        front = f"---\nlanguage: {language}\n---\n# A model"
        (model / "README.md").write_text(front)
        done = vembed(f"init --force --model {model} --data", faq)
        assert ("model is a model of English alone" in done.err) == (language == "en")


def test_a_wrong_answer_and_a_number_are_not_guessed_as_the_positive(start):
    rows = []
    for number in range(9):
        row = {
            "nr": f"{number}",
            "customer_said": f"question {number}?",
            "agent_said": f"a long answer {number}",
            "wrong_reply": f"another long reply {number + 1}",
        }
        rows.append(row)
    config = start(write_rows("train.jsonl", rows))
    mapping = {"customer_said": "query", "agent_said": "positive"}
    assert config.data.column_mapping == mapping
    assert "wrong_reply: negative" in text()


def test_a_model_that_is_a_file_is_refused_in_a_dry_run(refused, start, faq):
    start(faq)
    words = f"train vembed.yaml --dry-run --model-name {faq}"
    refused(words, "faq.csv", "not a folder")


def test_a_local_model_says_its_family_and_what_fits_it(start):
    write(Path("b.png"), "PNG")
    write_rows("train.jsonl", [{"photo": "b.png", "words": "a cat on a mat"}])
    config = start("train.jsonl", model=str(shared(tiny_clip)))
    assert config.data.column_mapping == {"photo": "positive_image", "words": "query"}
    assert "text and images" in text() and "BERT-like" not in text()
    assert config.model.max_length <= 77
    assert "temperature" not in config.objective.model_fields_set, "the model's"


def test_values_from_the_size_of_the_data():
    sizes = (0, 5, 100, 1000, 10_000)
    batches = [starter.fitting_batch(size, 64) for size in sizes]
    assert batches == [64, 5, 8, 32, 64]
    epochs = [starter.fitting_epochs(size) for size in (100, 3_000, 50_000)]
    assert epochs == [6, 4, 1]
    shares = [starter.held_out_share(size) for size in (20, 500, 1_000_000)]
    assert shares == [None, 0.1, 0.002]
    lengths = starter.measure_lengths(["word " * 30] * 99 + ["word " * 900], None)
    assert not lengths.is_measured
    assert starter.fitting_length(lengths, 512, 512) == 64
    assert starter.fitting_length(lengths, 32, 512) == 32


def test_the_data_of_a_config_on_one_page(vembed, start, faq, monkeypatch):
    start(faq)
    done = vembed("data vembed.yaml max_length=16", "query_prompt=find: ")
    for part in (
        "not used: Kategorie, Ticket Nr.",
        "queries: 107 different, 0 repetitions",
        "negatives:\n  none given",
        "(at most 16):",
        "[CLS]",
        "faq.csv:2",
    ):
        assert part in done.out, done.out
    write_rows("val.jsonl", [pair("wie geht Konto")])
    row = pair("Wie geht Konto?", "b", negatives=["B", "c"])
    write_rows("train.jsonl", [row] * 2)
    # Without those of pytest Python prints what no handler takes.
    monkeypatch.setattr(logging.root, "handlers", [])
    model = f"model_name={BERT}"
    done = vembed("data data_path=train.jsonl val_data_path=val.jsonl", model)
    assert "are in the training data" not in done.err, "said once"
    for part in (
        "in the training data too: 1 of 1 (100.0%)",
        "2 examples have one of their positives among their negatives",
        "pairs: 1 different, 1 repetition",
    ):
        assert part in done.out
    other = "other positives in another record"
    assert other not in done.out
    write_rows("train.jsonl", [row, {**row, "positive": "d"}])
    done = vembed("data data_path=train.jsonl", model)
    assert f"warning: queries with {other}: 1." in done.out
    assert "no_duplicates: true" in done.out
    done = vembed("data data_path=train.jsonl task=rerank", model)
    assert other not in done.out


def test_a_dry_run_shows_what_is_given_and_the_data(refused, trained, start, faq):
    start(faq)
    out = trained("--dry-run").out
    assert "batch_size: 8  # vembed.yaml:" in out
    assert "weight_decay" not in out and "==== data" in out
    write_rows("bad.jsonl", [{"query": "a"}])
    words = "data_path=bad.jsonl column_mapping=null --dry-run"
    done = refused(f"train vembed.yaml {words}", "bad.jsonl:1")
    assert "world size: 1" in done.out
    refused("train vembed.yaml eval_metric=ndgc@10 --dry-run", "eval_metric: ndgc@10")
    refused("train vembed.yaml output_dir=bad.jsonl --dry-run", "output_dir")
    refused("train vembed.yaml data_path=bad.jsnl --dry-run", "mean bad.jsonl?")


# ---- containers and kinds of data ----------------------------------------------------------------------------------


def write_container(kind):
    """Write QUESTIONS in a container of this name."""
    if kind == "saved":
        save_splits(train=QUESTIONS, test=QUESTIONS[:3])
    elif kind.startswith("parts"):
        Path("parts").mkdir()
        for number in range(2):
            write_rows(f"parts/{number}.jsonl", QUESTIONS[number * 120 :][:120])
    else:
        lines = ["Question,Answer", *(",".join(row.values()) for row in QUESTIONS)]
        Path(kind).write_bytes(gzip.compress("\n".join(lines).encode()))


@pytest.mark.parametrize("data", ["saved", "a.csv.gz", "parts/*.jsonl"])
def test_columns_and_sizes_are_looked_at_in_every_container(trained, start, data):
    write_container(data)
    config = start(data)
    assert config.data.data_path == data
    assert config.data.column_mapping == {"Question": "query", "Answer": "positive"}
    assert config.data.val_split == 0.1 and config.batch.batch_size == 8
    assert "# Data: 240 records" in text()
    trained("--dry-run")


@pytest.mark.parametrize("metric", ["nDCG@10", "Spearman"])
def test_a_tenth_of_labelled_and_of_scored_data_is_held_out_too(trained, start, metric):
    rows = []
    for number in range(240):
        row = {"text": f"{GERMAN[number % 3]} {number}", "label": number % 3}
        if metric == "Spearman":
            row = {"sentence1": f"cat {number}", "sentence2": f"dog {number}"}
            row["score"] = number % 7
        rows.append(row)
    assert start(write_rows("a.jsonl", rows)).data.val_split == 0.1
    done = trained("max_steps=1")
    assert metric in done.err + done.out


@pytest.mark.parametrize(
    ("content", "doubt"),
    [
        (
            "Where is the cat?,In the house by the river\nWhere is the dog?,There\n",
            "if it is a record, put a line",
        ),
        ("sentence1,sentence2,label\na,b,0\nc,d,1\ne,f,2\n", "label (0, 1, 2)"),
        ("query,positive\na,b\n,d\n", "left out: a.csv:3: query is empty"),
        # Each fault, not only the first one.
        ("query,positive\na,b\n,d\nc,\n", "left out: a.csv:4: positive is empty"),
        ("query,positive,page\na,b,1\nc,d,2\n", "a.csv: not used: page\n"),
        ("query,positive\na,b\nc,d\n", None),
    ],
)
def test_doubts_are_said_and_stand_in_the_config(vembed, content, doubt):
    Path("a.csv").write_text(content)
    done = vembed("init --data a.csv")
    if doubt is None:
        assert "note: " not in done.err and "CHECK" not in text()
    else:
        assert doubt in done.err and "# CHECK: " in text()


@pytest.mark.parametrize("kind", ["passages", "conversations", "for_excel"])
def test_shapes_of_other_programs(trained, start, kind):
    passage = "word " * 60
    name = "a.jsonl"
    if kind == "passages":
        passages = [{"title": "t", "text": passage}]
        write_rows(name, [{"query": "q", "positive_passages": passages}] * 60)
    elif kind == "conversations":
        message = [{"role": "user", "content": passage}]
        row = {"messages": message, "positive_messages": message, "label": 0.5}
        write_rows(name, [row] * 60)
    else:
        name = "a.csv"
        Path(name).write_text("sep=;\nquery;positive\n" + f"q;{passage}\n" * 60)
    config = start(name)
    assert config.model.max_length >= 60, "a text of 60 words is not cut"
    loss = "cosent" if kind == "conversations" else "infonce"
    assert config.objective.loss == loss and config.data.column_mapping is None
    assert "# Data: 60 records" in text()
    trained("val_split=null", "--dry-run")


@pytest.mark.parametrize("line", ['{"query": "where', '"oops"'])
def test_a_line_that_is_no_object_is_left_out(refused, start, line):
    lines = [json.dumps(row) for row in numbered(60)]
    lines.insert(1, line)
    Path("x.jsonl").write_text("\n".join(lines))
    config = start("x.jsonl")
    assert config.data.on_bad_record == "skip"
    assert "1 of 61 records" in text() and "x.jsonl:2: " in text()
    assert "60 looked at, with query, positive" in text()
    Path("x.jsonl").write_text(line)
    refused(f"init --force --data x.jsonl --model {BERT}", "x.jsonl:1: ")


def test_bad_records_and_images_are_counted_as_training_counts_them(trained, start):
    """35 bad records beyond the first ones, and 5 broken images: the config leaves them out, and trains."""
    rows = numbered(400)
    rows[200:235] = [pair(query="")] * 35
    config = start(write_rows("a.jsonl", rows))
    assert "35 of 400 records" in text()
    # 365 without the tenth that is held out.
    assert "over 328 examples" in text()
    assert config.data.on_bad_record == "skip"
    trained("max_steps=1")
    lines = ["text,image"]
    for number in range(20):
        if number < 5:
            Path(f"{number}.png").write_bytes(b"no image")
        else:
            write(Path(f"{number}.png"), "PNG")
        lines.append(f"picture {number},{number}.png")
    Path("b.csv").write_text("\n".join(lines))
    start("b.csv", "--family", "clip", model=None)
    assert "5 of 20 records" in text()


@pytest.mark.parametrize(("name", "is_used"), [("validation", True), ("test", False)])
def test_the_validation_split_of_a_saved_dataset_is_used(trained, start, name, is_used):
    save_splits(**{"train": QUESTIONS[30:], name: QUESTIONS[:30]})
    config = start("saved")
    assert config.data.val_data_path == ("saved" if is_used else None)
    assert (config.data.val_split is None) == is_used
    if is_used:
        done = trained("--dry-run")
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
def test_what_cannot_be_trained_on_is_refused(refused, name, content):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    data = path.parent if path.suffix == ".png" else path
    refused(f"init --data {data}", str(data))
    assert not Path("vembed.yaml").exists()
