"""`vembed encode`: rows in the order of the lines, in both formats, from all kinds of input, by one process and two."""

import gzip
import io
import shutil
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import command, invoke
from tests.data.files import read_jsonl, write_jsonl
from tests.data.pictures import write
from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert_st, tiny_clip, tiny_qwen3_st
from vembed import Embedder, UserError
from vembed.cli import encode_files
from vembed.cli.commands import encode
from vembed.files import replaced_file
from vembed.inference.encoding import quantized, ranges_of

TEXTS = [
    "red cat",
    "the old house by the river and a bridge",
    "bird",
    "red cat",
    "naïve — 猫",
    "fast train",
]
BERT = str(shared(tiny_bert_st))
CLIP = str(shared(tiny_clip))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder, and no packed copies of other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    return tmp_path


@pytest.fixture
def texts(folder):
    (folder / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    return "texts.txt"


def vectors_of(source, target="out.npy", model=BERT, **options):
    """Encode a file and read what was written."""
    encode.encode(model, str(source), target, **options)
    return vectors_in(target)


def vectors_in(path):
    if path.endswith(".npy"):
        return np.load(path)
    return np.array(pq.read_table(path).column("embedding").to_pylist(), np.float32)


def refuses(message, source, *words, **options):
    with pytest.raises(UserError, match=message):
        vectors_of(source, *words, **options)


def expected(kind="document", make=tiny_bert_st, **options):
    return Embedder(shared(make), device="cpu").encode(TEXTS, kind=kind, **options)


def assert_close(vectors, reference=None):
    """Compare vectors with those of TEXTS, unless others are given."""
    reference = expected() if reference is None else reference
    np.testing.assert_allclose(vectors, reference, atol=1e-6)


def ids_in(path):
    return pq.read_table(path).column("id").to_pylist()


def test_text_to_npy(texts, folder, capsys):
    result = encode.encode(BERT, texts, "out.npy")
    vectors = np.load("out.npy", mmap_mode="r")
    assert vectors.dtype == np.float32
    assert_close(vectors)
    assert (result.num_rows, result.num_dims) == vectors.shape
    captured = capsys.readouterr()
    assert "6 x 32 float32" in captured.err.replace("\n", "")
    assert captured.out == ""
    assert not (folder / "out.npy.part").exists()


@pytest.mark.parametrize("stages", ["", "stages: [{name: a}, {name: b}]\n"])
def test_a_training_config_stands_for_the_model_of_its_run(texts, folder, stages):
    config = folder / "cfg.yaml"
    config.write_text(
        f"model_name: some/model\ndata_path: t.jsonl\noutput_dir: runs/one\n{stages}"
    )
    run = folder / "runs" / "one"
    if stages:
        run /= "b"
    refuses(f"cfg.yaml has not been trained.*{run.name}", texts, model="cfg.yaml")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    refuses("is a run that has not finished", texts, model="cfg.yaml")
    shutil.copytree(BERT, run / "final")
    vectors = vectors_of(texts, model="cfg.yaml")
    assert_close(vectors)


def test_kind_and_cut(texts):
    model = str(shared(tiny_qwen3_st))
    for options in (
        {"truncate_dim": 8},
        {"truncate_dim": 8, "normalize": True},
        {"normalize": False},
    ):
        vectors = vectors_of(
            texts, model=model, kind="query", batch_tokens=20, **options
        )
        reference = expected("query", tiny_qwen3_st, **options)
        np.testing.assert_allclose(vectors, reference, atol=1e-5)


@pytest.mark.parametrize(
    "record_of",
    [
        lambda text: text,
        lambda text: {"title": "no", "body": text},
        lambda text: dict(
            zip(("title", "text"), text.partition(" ")[::2], strict=True)
        ),
        lambda text: {"_id": text[:3], "text": text},
        lambda text: {"query": "no", "positive": [text]},
        lambda text: {"query": "no", "document": {"text": text}},
    ],
    ids=["texts", "column", "title", "id", "list", "object"],
)
def test_forms_of_records(folder, record_of):
    records = [record_of(text) for text in TEXTS]
    write_jsonl(folder / "data.jsonl", records)
    column = "body" if "body" in records[0] else None
    assert_close(vectors_of("data.jsonl", "out.parquet", column=column))
    table = pq.read_table("out.parquet")
    kind = "fixed_size_list<element: float>[32]"
    assert str(table.schema.field("embedding").type) == kind
    if "_id" in records[0]:
        assert ids_in("out.parquet") == [record["_id"] for record in records]
    else:
        assert table.column_names == ["embedding"]


def test_the_kind_chooses_the_side_of_a_pair(folder, capsys):
    records = [{"query": f"query {text}", "positive": text} for text in TEXTS]
    write_jsonl(folder / "pairs.jsonl", records)
    assert_close(vectors_of("pairs.jsonl"))
    log = capsys.readouterr().err.replace("\n", " ")
    assert "pairs.jsonl: encoding positive, not query" in log
    queries = Embedder(BERT).encode([record["query"] for record in records], "query")
    assert_close(vectors_of("pairs.jsonl", kind="query"), queries)


def test_what_holds_for_all_is_not_decided_by_the_rows_read_first(folder, monkeypatch):
    """Neither the levels of int8 nor whether there are ids."""
    monkeypatch.setattr(encode_files, "FIRST_ROWS", 2)
    records = [{"text": text} for text in TEXTS]
    records[3]["id"] = "d3"
    write_jsonl(folder / "data.jsonl", [{"text": ""}, {"text": ""}, *records])
    options = {"precision": "int8", "on_bad_record": "skip"}
    vectors_of("data.jsonl", "out.parquet", **options)
    assert ids_in("out.parquet") == [None, None, None, "d3", None, None]
    ranges = np.load("out.ranges.npy")
    np.testing.assert_allclose(ranges, ranges_of(expected()), atol=1e-6)


def test_an_address(texts, folder):
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    expected = vectors_of(texts)
    np.testing.assert_array_equal(vectors_of(f"file://{folder}/texts.jsonl"), expected)


def test_several_files(folder):
    (folder / "a.jsonl").write_text('{"text": "red"}\n')
    (folder / "b.jsonl").write_text('{"text": "red"}\n{broken\n')
    refuses(r"\n  b\.jsonl:2: not JSON", "*.jsonl")


def test_two_commands_that_write_one_file(texts, folder):
    with replaced_file(folder / "out.npy") as partial:
        partial.write_text("of the first")
        done = command("encode", BERT, texts, "out.npy", code=2)
    assert "error: out.npy is being written by another process: wait" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (folder / "out.npy").read_text() == "of the first"


def test_standard_input(monkeypatch):
    def stream(lines):
        return io.TextIOWrapper(io.BytesIO("\r\n".join(lines).encode()))

    monkeypatch.setattr(sys, "stdin", stream(TEXTS))
    assert_close(vectors_of("-"))
    monkeypatch.setattr(sys, "stdin", stream(['{"text": "red"}']))
    refuses("standard input is text", "-")


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_rows_of_a_table(folder, name):
    ids = [f"t{number}" for number in range(len(TEXTS))]
    table = pa.table({"id": ids, "Subject": TEXTS, "vector": [[0.5]] * len(TEXTS)})
    if name == "a.parquet":
        pq.write_table(table, name)
    else:
        frame = table.drop(["vector"]).to_pandas()
        frame.to_csv(name, sep=";", index=False, encoding="utf-8-sig")
    vectors = vectors_of(name, "out.parquet", column="Subject")
    assert_close(vectors)
    assert ids_in("out.parquet") == ids
    line = 1 if name == "a.parquet" else 2
    refuses(rf"{name}:{line}: .*it has id", name)


def test_an_empty_file_gives_no_rows_and_a_warning(folder, capsys):
    (folder / "empty.txt").touch()
    for name in ("out.npy", "out.parquet"):
        assert len(vectors_of("empty.txt", name)) == 0
        warning = f"warning: empty.txt is empty, and {name} has no rows"
        assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\n\xff\xfe\n", r"a\.txt:2: not UTF-8"),
        ("a.jsonl", b'{"text": "one"}\n{broken\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"image": 3}\n', r"a\.jsonl:1: image has a number"),
        (
            "a.csv.gz",
            gzip.compress(b'text\none\n""\n', mtime=0),
            r"a\.csv\.gz:3: no text",
        ),
    ],
)
def test_a_bad_line_is_named_and_an_old_file_stays(folder, name, content, message):
    (folder / name).write_bytes(content)
    np.save("out.npy", np.zeros(3))
    refuses(message, name)
    assert np.load("out.npy").shape == (3,)
    names = {path.name for path in folder.iterdir()} - {".cache"}
    assert names == {name, "out.npy"}


def test_packed_files_and_saved_data_sets(texts, folder):
    records = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS)]
    frame = datasets.Dataset.from_list(records)
    frame.save_to_disk("saved")
    (folder / "texts.txt.gz").write_bytes(gzip.compress((folder / texts).read_bytes()))
    assert_close(vectors_of("texts.txt.gz"))
    assert_close(vectors_of("saved", "out.parquet"))
    ids = ids_in("out.parquet")
    assert ids == [record["id"] for record in records]
    datasets.DatasetDict(train=frame, test=frame).save_to_disk("both")
    refuses("both holds several data sets", "both")


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("texts.txt", "out.csv", {}, r"writes \.npy and \.parquet"),
        ("table.csv", "out.npy", {}, r"--column.*\n  table\.csv:2: .*has Nr, Frage, id.*\n  table\.csv:3: the same$"),
        ("table.csv", "out.parquet", {"column": "Frage", "keep": "Nrr"}, "--keep Nrr: .*did you mean 'Nr'.*has Nr"),
        ("table.csv", "out.npy", {"column": "Farge"}, "--column Farge: .*table.csv, did you mean 'Frage'.*has Nr, Frage, id"),
        ("texts.txt", "out.npy", {"ranges": "r.npy"}, "--ranges"),
        ("texts.txt", "out.npy", {"pooling": "cls"}, "--pooling"),
        ("texts.txt", "out.parquet", {"layers": "all"}, r"--layers.* to a \.npy file"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_the_model_is_loaded(
    texts, folder, source, target, options, message
):
    (folder / "table.csv").write_text("Nr;Frage;id\n1;eins;a\n2;zwei;b\n")
    refuses(message, source, target, "no model", **options)


def test_paths_of_images_that_are_taken_for_texts_are_warned_of(folder, capsys):
    write_jsonl(folder / "data.jsonl", [{"file": "a.jpg"}, {"file": "b.PNG"}])
    vectors_of("data.jsonl", column="file")
    assert "look like paths of images ('a.jpg')" in capsys.readouterr().err


def test_a_record_of_several_documents_is_refused(texts, folder):
    """Its query is no document."""
    records = [{"query": "red", "positive": ["a red cat", "a blue dog"]}]
    write_jsonl(folder / "data.jsonl", records)
    refuses("data.jsonl:1: positive has 2 documents", "data.jsonl")


@pytest.fixture
def pictures(folder):
    """A folder of three images, one of them in a subfolder, and a file of another kind."""
    for number, name in enumerate(("b.png", "a.JPG", "more/c.png")):
        write(folder / "pictures" / name, seed=number)
    (folder / "pictures" / "notes.txt").write_text("no image")
    return folder / "pictures"


@pytest.fixture
def damaged(pictures, folder):
    """The images, with one that is cut off in its middle."""
    shutil.copytree(pictures, folder / "damaged")
    start = (pictures / "a.JPG").read_bytes()[:300]
    (folder / "damaged" / "bad.jpg").write_bytes(start)
    return folder / "damaged"


def test_a_folder_of_images(pictures, folder):
    names = ["a.JPG", "b.png", "more/c.png"]
    images = [{"image": str(pictures / name)} for name in names]
    vectors = Embedder(CLIP, device="cpu").encode(images)
    assert_close(vectors_of(pictures, "out.parquet", CLIP), vectors)
    assert ids_in("out.parquet") == names
    refuses("give NAME", pictures, "out.npy", CLIP)
    (folder / "empty").mkdir()
    refuses("empty is a folder without images", "empty")
    refuses("image", pictures, "text.parquet")


def test_images_that_cannot_be_read_are_named_together(damaged):
    (damaged / "worse.png").write_bytes(b"nothing")
    both = r"--on-bad-record skip:\n  .*bad\.jpg is broken.*\n  .*worse\.png is not an image"
    refuses(both, damaged, model="no model")
    for path in damaged.rglob("[a-c].*"):
        path.unlink()
    refuses(
        r"none of the 2 inputs .*bad\.jpg is broken",
        damaged,
        "out.parquet",
        CLIP,
        on_bad_record="skip",
    )


def test_bad_inputs_are_left_out_when_asked(damaged, pictures, folder):
    words = ("encode", CLIP, damaged, "out.parquet", "--on-bad-record", "skip")
    assert "1 left out" in invoke(*words).output
    (skipped,) = read_jsonl(folder / "out.skipped.jsonl")
    assert skipped["row"] == 3 and "bad.jpg is broken" in skipped["reason"]
    vectors = vectors_in("out.parquet")
    others = vectors_of(pictures, "out.parquet", CLIP, on_bad_record="skip")
    np.testing.assert_array_equal(vectors, others)
    assert not (folder / "out.skipped.jsonl").exists(), "nothing was left out"


def _encode_on_a_rank(source, target, model, chunk_rows):
    encode.CHUNK_ROWS = chunk_rows
    result = encode.encode(model, source, target, on_bad_record="skip")
    return result.num_rows, result.num_skipped


def test_two_processes_write_the_same_file(texts, damaged, pictures, folder):
    target = str(folder / "two.parquet")
    for source, model, chunk_rows, outcome, whole in (
        (folder / texts, BERT, 4, (6, 0), texts),
        (damaged, CLIP, 100, (3, 1), pictures),
    ):
        arguments = (str(source), target, model, chunk_rows)
        ends = run_ranks(_encode_on_a_rank, 2, *arguments)
        assert ends == [outcome, outcome]
        assert_close(vectors_in(target), vectors_of(whole, "one.parquet", model))


def test_kept_columns(folder):
    rows = [
        {"id": "d0", "title": "t", "year": 1990, "tags": [1]},
        {"id": "d1", "title": None, "year": 1991, "tags": []},
    ]
    write_jsonl(folder / "corpus.jsonl", [row | {"body": "red"} for row in rows])
    keep = ",".join(rows[0])
    vectors_of("corpus.jsonl", "out.parquet", column="body", keep=keep)
    table = pq.read_table("out.parquet")
    assert table.column_names == [*rows[0], "embedding"]
    assert table.schema.field("year").type == pa.int64()
    assert table.drop(["embedding"]).to_pylist() == rows
    refuses("give NAME", "corpus.jsonl", column="body", keep="id,year")


def test_columns_that_cannot_be_written_are_named(folder, monkeypatch):
    rows = [{"text": "red", "picture": {"bytes": b"GIF", "path": None}}]
    datasets.Dataset.from_list(rows).to_parquet("a.parquet")
    refuses("--keep picture: .*bytes", "a.parquet", "out.parquet", keep="picture")
    # A column id that the first chunk does not have cannot be added later.
    monkeypatch.setattr(encode, "CHUNK_ROWS", 2)
    rows = [{"text": "red"}] * 2 + [{"text": "red", "id": "c"}]
    write_jsonl(folder / "late.jsonl", rows)
    refuses(
        "row 3 of late.jsonl is the first one with an id", "late.jsonl", "o.parquet"
    )
    assert not (folder / "o.parquet").exists()


def test_vectors_in_fewer_bits(texts, monkeypatch):
    """int8 levels are those of the first inputs for all chunks; bits are signs."""
    full = vectors_of(texts)
    for precision, dtype in (("int8", "i1"), ("ubinary", "u1"), ("binary", "i1")):
        small = vectors_of(texts, precision=precision)
        assert small.dtype == dtype
        np.testing.assert_array_equal(small, quantized(full, precision))
    bits = vectors_of(texts, "small.parquet", precision="ubinary")
    np.testing.assert_array_equal(bits, quantized(full, "ubinary"))
    monkeypatch.setattr(encode, "CHUNK_ROWS", 2)
    levels = vectors_of(texts, precision="int8").astype(int)
    # Batches differ in the last bit, which may change a level by one.
    assert np.abs(levels - quantized(full, "int8", ranges_of(full[:2]))).max() <= 1


def test_ranges_are_saved_and_taken_again(texts, folder):
    """Levels of a second file mean what those of the first do."""
    vectors_of(texts, "first.npy", precision="int8")
    ranges = np.load("first.ranges.npy")
    assert ranges.shape == (2, 32)
    (folder / "one.txt").write_text("red\n")
    levels = vectors_of("one.txt", precision="int8", ranges="first.ranges.npy")
    embedder = Embedder(BERT)
    full = embedder.encode(["red"])
    np.testing.assert_array_equal(levels, quantized(full, "int8", ranges))
    again = embedder.encode(["red"], precision="int8", ranges=ranges)
    np.testing.assert_array_equal(again, levels)
    np.save("other.npy", ranges[:, :4])
    for name in ("other.npy", "first.npy", "none.npy"):
        refuses(name, "one.txt", precision="int8", ranges=name)
