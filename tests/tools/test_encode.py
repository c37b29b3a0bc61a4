"""`vembed encode`: rows in the order of the lines, in both formats, from all kinds of input, by one process and two."""

import csv
import gzip
import io
import json
import shutil
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert_st, tiny_clip, tiny_qwen3_st
from vembed import Embedder, UserError
from vembed.cli.commands import encode
from vembed.cli.main import app
from vembed.inference.quantization import quantized, ranges_of

TEXTS = [
    "red cat",
    "the old house by the river and a bridge",
    "bird",
    "red cat",
    "naïve — 猫",
    "fast train",
]


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    return path


def expected(kind="document", make=tiny_bert_st, **options):
    return Embedder(shared(make), device="cpu").encode(TEXTS, kind=kind, **options)


def test_text_to_npy(texts, tmp_path, capsys):
    result = encode.encode(
        str(shared(tiny_bert_st)), str(texts), str(tmp_path / "out.npy")
    )
    found = np.load(tmp_path / "out.npy")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(), atol=1e-6)
    assert (result.num_rows, result.num_dims) == found.shape
    captured = capsys.readouterr()
    assert "6 x 32 float32" in captured.err.replace("\n", "")
    assert captured.out == ""
    assert not (tmp_path / "out.npy.part").exists()
    assert np.load(tmp_path / "out.npy", mmap_mode="r").shape == found.shape


def test_kind_and_cut(texts, tmp_path):
    folder = str(shared(tiny_qwen3_st))
    encode.encode(
        folder, str(texts), str(tmp_path / "q.npy"), kind="query", truncate_dim=8
    )
    found = np.load(tmp_path / "q.npy")
    np.testing.assert_allclose(
        found,
        expected("query", tiny_qwen3_st, truncate_dim=8, normalize=True),
        atol=1e-6,
    )
    encode.encode(
        folder,
        str(texts),
        str(tmp_path / "raw.npy"),
        kind="query",
        normalize=False,
        batch_tokens=20,
    )
    np.testing.assert_allclose(
        np.load(tmp_path / "raw.npy"),
        expected("query", tiny_qwen3_st, normalize=False),
        atol=1e-5,
    )


def test_jsonl_to_parquet_with_ids(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(
            json.dumps({"_id": f"d{i}", "text": text}) + "\n"
            for i, text in enumerate(TEXTS)
        )
    )
    encode.encode(str(shared(tiny_bert_st)), str(path), str(tmp_path / "out.parquet"))
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("id").to_pylist() == [f"d{i}" for i in range(len(TEXTS))]
    found = np.array(table.column("embedding").to_pylist(), np.float32)
    np.testing.assert_allclose(found, expected(), atol=1e-6)
    assert (
        str(table.schema.field("embedding").type)
        == "fixed_size_list<element: float>[32]"
    )


@pytest.mark.parametrize(
    "records",
    [
        TEXTS,
        [{"query": text, "positive": "not this"} for text in TEXTS],
        [{"title": "no", "body": text} for text in TEXTS],
        [{"body": {"text": text}} for text in TEXTS],
        [
            {"title": text.split()[0], "text": " ".join(text.split()[1:])}
            for text in TEXTS
        ],
    ],
)
def test_forms_of_records(tmp_path, records):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    column = "body" if "body" in records[0] else None
    encode.encode(
        str(shared(tiny_bert_st)),
        str(path),
        str(tmp_path / "out.parquet"),
        column=column,
    )
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["embedding"]
    np.testing.assert_allclose(
        np.array(table.column("embedding").to_pylist()), expected(), atol=1e-6
    )


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_standard_input(tmp_path, monkeypatch, form):
    lines = TEXTS if form == "text" else [json.dumps({"text": text}) for text in TEXTS]
    given = io.TextIOWrapper(io.BytesIO("\r\n".join(lines).encode()))
    monkeypatch.setattr(sys, "stdin", given)
    encode.encode(str(shared(tiny_bert_st)), "-", str(tmp_path / "out.npy"))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected(), atol=1e-6)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet"])
def test_rows_of_a_table(tmp_path, name):
    path, rows = (
        tmp_path / name,
        [
            {"id": f"t{n}", "Subject": text, "Answer": "-"}
            for n, text in enumerate(TEXTS)
        ],
    )
    if name == "a.parquet":
        pq.write_table(
            pa.Table.from_pylist([{**row, "vector": [0.5]} for row in rows]), path
        )
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(
                file, list(rows[0]), delimiter=";" if name == "a.csv" else "\t"
            )
            table.writeheader()
            table.writerows(rows)
    model = str(shared(tiny_bert_st))
    encode.encode(model, str(path), str(tmp_path / "out.parquet"), column="Subject")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.column("id").to_pylist() == [row["id"] for row in rows]
    np.testing.assert_allclose(
        np.array(found.column("embedding").to_pylist()), expected(), atol=1e-6
    )
    with pytest.raises(
        UserError,
        match=rf"{name}:{1 if name == 'a.parquet' else 2}: no text .*it has id",
    ):
        encode.encode(model, str(path), str(tmp_path / "two.npy"))


def test_tables_that_cannot_be_read(tmp_path):
    model = str(shared(tiny_bert_st))
    for name, content, message in (
        ("a.parquet", b"nothing", "cannot be read as Parquet"),
        (
            "a.csv",
            b"id,text\n1,a,b\n",
            r"a\.csv:2: the number of cells is 3, and the header has 2",
        ),
        ("b.csv", b"id,text\n1,\xff\n", r"b\.csv:2: not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            encode.encode(model, str(tmp_path / name), str(tmp_path / "out.npy"))


@pytest.mark.parametrize(
    ("name", "content", "bad"),
    [
        (
            "a.csv",
            'id,text\n1,one\n2,two,three\n\n4,"four\n5,five\n',
            {2: "the number of cells is 3", 3: "not CSV"},
        ),
        ("a.tsv", 'id\ttext\n1\t"one\n2\n5\tfive\n', {2: "the number of cells is 1"}),
    ],
)
def test_rows_that_are_no_rows_are_left_out(tmp_path, name, content, bad):
    model, path, target = (
        str(shared(tiny_bert_st)),
        tmp_path / name,
        tmp_path / "out.parquet",
    )
    path.write_text(content)
    with pytest.raises(
        UserError,
        match=f"cannot be encoded, fix them, .*\n  .*{name}:3: the number of cells is",
    ):
        encode.encode(model, str(path), str(target))
    encode.encode(model, str(path), str(target), on_bad_record="skip")
    assert pq.read_table(target).column("id").to_pylist() == [
        "1",
        "5",
    ]  # a quote that stays open takes no row along
    skipped = [
        json.loads(line)
        for line in target.with_suffix(".skipped.jsonl").read_text().splitlines()
    ]
    assert {
        one["row"]: bad[one["row"]] in one["reason"] for one in skipped
    } == dict.fromkeys(bad, True)


def test_a_line_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "b.jsonl").write_text('"one"\n' + "[" * 100_000 + "]" * 100_000)
    with pytest.raises(UserError, match=r"b\.jsonl:2: JSON that is nested too deeply"):
        encode.encode(
            str(shared(tiny_bert_st)),
            str(tmp_path / "b.jsonl"),
            str(tmp_path / "out.npy"),
        )


def test_a_column_of_plain_text_is_refused(texts, tmp_path):
    with pytest.raises(
        UserError, match=r"texts\.txt is read as plain text, which has no column body"
    ):
        encode.encode(
            str(shared(tiny_bert_st)),
            str(texts),
            str(tmp_path / "out.npy"),
            column="body",
        )


def test_files_larger_than_a_chunk(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_ROWS", 4)
    for name in ("out.npy", "out.parquet"):
        encode.encode(str(shared(tiny_bert_st)), str(texts), str(tmp_path / name))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected(), atol=1e-6)
    table = pq.ParquetFile(tmp_path / "out.parquet")
    assert table.num_row_groups == 2
    np.testing.assert_allclose(
        np.array(table.read().column("embedding").to_pylist()), expected(), atol=1e-6
    )


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_an_empty_file_gives_no_rows(tmp_path, suffix):
    (tmp_path / "empty.txt").touch()
    target = tmp_path / f"out.{suffix}"
    assert (
        encode.encode(
            str(shared(tiny_bert_st)), str(tmp_path / "empty.txt"), str(target)
        ).num_rows
        == 0
    )
    if suffix == "npy":
        assert np.load(target).shape == (0, 32)
    else:
        assert pq.read_table(target).num_rows == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\n\nthree\n", r"a\.txt:2: empty"),
        ("a.txt", b"one\n\xff\xfe\n", r"a\.txt:2: not UTF-8"),
        ("a.jsonl", b'{"text": "one"}\n{broken\n', r"a\.jsonl:2: not JSON"),
        (
            "a.jsonl",
            b'{"txt": "one"}\n',
            r"a\.jsonl:1: no text .*it has txt",
        ),
        (
            "a.jsonl",
            b'{"text": 3}\n',
            r"a\.jsonl:1: no text",
        ),
        ("a.jsonl", b'{"text": " "}\n', r"a\.jsonl:1: no text"),
        (
            "a.jsonl",
            b'{"image": 3}\n',
            r"a\.jsonl:1: an image that is no path",
        ),
        ("a.jsonl", b'{"image": "../x.png"}\n', r"a\.jsonl:1: .*leads out of"),
        ("a.jsonl", b"3\n", r"a\.jsonl:1: neither an object nor a text"),
        ("a.json", b'[{"text": 3}]\n', r"a\.json:1: no text"),
        ("a.jsonl.gz", b"\x1f\x8b", r"a\.jsonl\.gz cannot be unpacked as gzip"),
        (
            "a.csv.gz",
            gzip.compress(b'text\none\n""\n', mtime=0),
            r"a\.csv\.gz:3: no text",
        ),
        (
            "a.jsonl.xz",
            b"",
            r"a\.jsonl\.xz .*unxz -k",
        ),
        (
            "a.feather",
            b"ARROW1",
            r"a\.feather has the ending \.feather",
        ),
        (
            "a.csv",
            "text\none\n".encode("utf-16"),
            r"a\.csv is UTF-16 text: save it as UTF-8",
        ),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left_behind(
    tmp_path, name, content, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        encode.encode(
            str(shared(tiny_bert_st)), str(tmp_path / name), str(tmp_path / "out.npy")
        )
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_missing_column_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:1: no field body \(it has text\)"):
        encode.encode(
            str(shared(tiny_bert_st)),
            str(tmp_path / "a.jsonl"),
            str(tmp_path / "out.npy"),
            column="body",
        )


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.usefixtures("own_cache")
def test_packed_files_and_saved_data_sets(texts, tmp_path):
    model, target = str(shared(tiny_bert_st)), tmp_path / "out.npy"
    records = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS)]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(texts.read_bytes()))
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(one) + "\n" for one in records).encode())
    )
    frame = datasets.Dataset.from_list(records)
    frame.save_to_disk(tmp_path / "saved")
    (tmp_path / "a.csv.gz").write_bytes(
        gzip.compress(frame.to_pandas().to_csv().encode())
    )
    for name in ("a.txt.gz", "a.jsonl.gz", "a.csv.gz", "saved"):
        assert encode.encode(model, str(tmp_path / name), str(target)).num_rows == len(
            TEXTS
        ), name
        np.testing.assert_allclose(np.load(target), expected(), atol=1e-6)
    encode.encode(model, str(tmp_path / "saved"), str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet").column("id").to_pylist() == [
        one["id"] for one in records
    ]
    datasets.DatasetDict(train=frame, test=frame).save_to_disk(tmp_path / "both")
    with pytest.raises(
        UserError,
        match=r"both holds the data sets test, train: give one of them, as .*both/test",
    ):
        encode.encode(model, str(tmp_path / "both"), str(target))


def test_an_empty_cell_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("Nr,Frage\n1,one\n2,\n")
    with pytest.raises(
        UserError,
        match=r"a\.csv:3: Frage is empty",
    ):
        encode.encode(
            str(shared(tiny_bert_st)),
            str(tmp_path / "a.csv"),
            str(tmp_path / "out.npy"),
            column="Frage",
        )


def test_what_cannot_be_read_or_written_is_said_before_the_model_is_loaded(
    texts, tmp_path
):
    with pytest.raises(
        UserError, match=r"ends in \.csv, and vembed encode writes \.npy and \.parquet"
    ):
        encode.encode("no model", str(texts), str(tmp_path / "out.csv"))
    with pytest.raises(UserError, match="is not a folder"):
        encode.encode("no model", str(texts), str(tmp_path / "nowhere" / "out.npy"))
    with pytest.raises(UserError, match=r"missing\.txt cannot be read: No such file"):
        encode.encode(
            "no model", str(tmp_path / "missing.txt"), str(tmp_path / "out.npy")
        )


def test_an_old_file_stays_when_encoding_fails(texts, tmp_path):
    np.save(tmp_path / "out.npy", np.zeros(3))
    (tmp_path / "bad.txt").write_text("a\n\nb\n")
    with pytest.raises(UserError):
        encode.encode(
            str(shared(tiny_bert_st)),
            str(tmp_path / "bad.txt"),
            str(tmp_path / "out.npy"),
        )
    assert np.load(tmp_path / "out.npy").shape == (3,)


def _encode_on_a_rank(folder, source, target):
    encode.CHUNK_ROWS = 4
    return encode.encode(folder, source, target).num_rows


def test_two_processes_write_the_same_file(texts, tmp_path):
    target = tmp_path / "out.npy"
    rows = run_ranks(
        _encode_on_a_rank,
        2,
        str(shared(tiny_bert_st)),
        str(texts),
        str(target),
        process_group=False,
    )
    assert rows == [6, 6]
    np.testing.assert_allclose(np.load(target), expected(), atol=1e-6)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of three images, one of them in a subfolder, and a file of another kind."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "more").mkdir()
    for number, name in enumerate(("b.png", "a.JPG", "more/c.png")):
        Image.new("RGB", (40, 30), (80 * number, 120, 200)).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def test_a_folder_of_images(pictures, tmp_path):
    model = str(shared(tiny_clip))
    encode.encode(model, str(pictures), str(tmp_path / "out.parquet"))
    table = pq.read_table(tmp_path / "out.parquet")
    names = ["a.JPG", "b.png", "more/c.png"]
    assert table.column("id").to_pylist() == names
    expected = Embedder(model, device="cpu").encode(
        [{"image": str(pictures / name)} for name in names]
    )
    np.testing.assert_allclose(
        np.array(table.column("embedding").to_pylist()), expected, atol=1e-6
    )
    encode.encode(model, str(pictures), str(tmp_path / "out.npy"))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)
    kept = [
        json.loads(line)
        for line in (tmp_path / "out.kept.jsonl").read_text().splitlines()
    ]
    assert kept == [{"image": name} for name in names]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty is a folder without images"):
        encode.encode(model, str(tmp_path / "empty"), str(tmp_path / "out.npy"))
    with pytest.raises(UserError, match="image"):
        encode.encode(
            str(shared(tiny_bert_st)), str(pictures), str(tmp_path / "out.npy")
        )


@pytest.fixture
def damaged(pictures, tmp_path):
    """The images, with one that is cut off in its middle."""
    folder = tmp_path / "damaged"
    shutil.copytree(pictures, folder)
    (folder / "bad.jpg").write_bytes((folder / "a.JPG").read_bytes()[:300])
    return folder


def test_images_that_cannot_be_read_are_named_together(damaged, tmp_path, monkeypatch):
    """In the first chunk before the model is loaded, later when the first of them is met."""
    (damaged / "worse.png").write_bytes(b"nothing")
    said = r"2 input.*--on-bad-record skip:\n  .*image .*bad\.jpg is "
    with pytest.raises(
        UserError, match=said + r"broken.*\n  .*image .*worse\.png is none"
    ):
        encode.encode("no model", str(damaged), str(tmp_path / "out.npy"))
    monkeypatch.setattr("vembed.cli.encode_input.FIRST_ROWS", 1)
    with pytest.raises(
        UserError, match=said + r"broken.*\n  .*image .*worse\.png is none"
    ):
        encode.encode(str(shared(tiny_clip)), str(damaged), str(tmp_path / "out.npy"))
    assert not (tmp_path / "out.npy").exists()
    shutil.rmtree(damaged / "more")
    for name in ("a.JPG", "b.png"):
        (damaged / name).unlink()
    with pytest.raises(
        UserError,
        match=r"none of the 2 inputs can be encoded; the first one: .*bad\.jpg is broken",
    ):
        encode.encode(
            str(shared(tiny_clip)),
            str(damaged),
            str(tmp_path / "out.npy"),
            on_bad_record="skip",
        )


def test_bad_inputs_are_left_out_when_asked(damaged, pictures, tmp_path):
    model = str(shared(tiny_clip))
    words = [
        "encode",
        model,
        str(damaged),
        str(tmp_path / "out.npy"),
        "--on-bad-record",
        "skip",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "1 left out" in done.output
    encode.encode(model, str(pictures), str(tmp_path / "whole.npy"))
    np.testing.assert_array_equal(
        np.load(tmp_path / "out.npy"), np.load(tmp_path / "whole.npy")
    )
    assert "bad" not in (tmp_path / "out.kept.jsonl").read_text()
    (skipped,) = map(
        json.loads, (tmp_path / "out.skipped.jsonl").read_text().splitlines()
    )
    assert skipped["row"] == 3 and "bad.jpg is broken" in skipped["reason"]
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one"}\n\n{"text": 3}\n{"text": "two"}\n'
    )
    result = encode.encode(
        model,
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "out.npy"),
        on_bad_record="skip",
    )
    assert (result.num_rows, result.num_skipped) == (2, 1)
    assert [
        json.loads(one)["row"]
        for one in (tmp_path / "out.skipped.jsonl").read_text().splitlines()
    ] == [2]
    encode.encode(model, str(pictures), str(tmp_path / "out.npy"), on_bad_record="skip")
    assert not (tmp_path / "out.skipped.jsonl").exists(), "nothing was left out"


def _encode_skipping(folder, source, target):
    return encode.encode(folder, source, target, on_bad_record="skip").num_skipped


def test_two_processes_leave_out_the_same_images(damaged, pictures, tmp_path):
    model, target = str(shared(tiny_clip)), tmp_path / "out.npy"
    assert run_ranks(
        _encode_skipping, 2, model, str(damaged), str(target), process_group=False
    ) == [1, 1]
    encode.encode(model, str(pictures), str(tmp_path / "whole.npy"))
    np.testing.assert_allclose(
        np.load(target), np.load(tmp_path / "whole.npy"), atol=1e-6
    )


def test_kept_columns(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [
        {
            "id": f"d{n}",
            "title": None if n == 1 else f"t{n}",
            "year": n,
            "tags": [n],
            "body": text,
        }
        for n, text in enumerate(TEXTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, keep = str(shared(tiny_bert_st)), ["id", "title", "year", "tags"]
    encode.encode(
        model,
        str(path),
        str(tmp_path / "out.parquet"),
        column="body",
        keep=",".join(keep),
    )
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == [*keep, "embedding"]
    assert table.schema.field("year").type == pa.int64()
    assert table.drop(["embedding"]).to_pylist() == [
        {name: json.dumps(row[name]) if name == "tags" else row[name] for name in keep}
        for row in rows
    ]
    encode.encode(
        model, str(path), str(tmp_path / "out.npy"), column="body", keep="id,year"
    )
    kept = [
        json.loads(line)
        for line in (tmp_path / "out.kept.jsonl").read_text().splitlines()
    ]
    assert kept == [{"id": row["id"], "year": row["year"]} for row in rows]
    assert np.load(tmp_path / "out.npy").shape == (6, 32)


def test_columns_that_are_not_there_are_found_before_the_model_is_loaded(
    texts, tmp_path
):
    (tmp_path / "table.csv").write_text("Nr;Frage\n1;eins\n")
    source, target = str(tmp_path / "table.csv"), str(tmp_path / "out.npy")
    with pytest.raises(
        UserError, match=r"table\.csv:2: no field Fragen \(it has Nr, Frage\)"
    ):
        encode.encode("no model", source, target, column="Fragen")
    with pytest.raises(
        UserError,
        match=r"--keep Nrr: .*table.csv has no such column, did you mean 'Nr'\?",
    ):
        encode.encode("no model", source, target, column="Frage", keep="Nrr")
    with pytest.raises(UserError, match="text has no columns"):
        encode.encode("no model", str(texts), target, keep="id")
    with pytest.raises(UserError, match="name each column once"):
        encode.encode("no model", source, target, keep="Nr,Nr")


def test_vectors_in_fewer_bits(texts, tmp_path, monkeypatch):
    """int8 levels are those of the first inputs for all chunks; bits are signs."""
    folder = str(shared(tiny_bert_st))
    encode.encode(folder, str(texts), str(tmp_path / "float.npy"))
    full = np.load(tmp_path / "float.npy")
    for precision, dtype in (
        ("int8", np.int8),
        ("ubinary", np.uint8),
        ("binary", np.int8),
    ):
        encode.encode(
            folder, str(texts), str(tmp_path / "small.npy"), precision=precision
        )
        small = np.load(tmp_path / "small.npy")
        assert small.dtype == dtype
        np.testing.assert_array_equal(small, quantized(full, precision))
    monkeypatch.setattr("vembed.cli.commands.encode.CHUNK_ROWS", 2)
    encode.encode(folder, str(texts), str(tmp_path / "chunks.npy"), precision="int8")
    expected_levels = quantized(full, "int8", ranges_of(full[:2]))
    off = np.abs(np.load(tmp_path / "chunks.npy").astype(int) - expected_levels)
    assert off.max() <= 1, (
        "batches differ in the last bit, which may change a level by one"
    )
    encode.encode(
        folder, str(texts), str(tmp_path / "small.parquet"), precision="ubinary"
    )
    found = np.stack(pq.read_table(tmp_path / "small.parquet")["embedding"].to_numpy())
    np.testing.assert_array_equal(found, quantized(full, "ubinary"))


def test_ranges_are_saved_and_taken_again(texts, tmp_path):
    """Levels of a second file mean what those of the first do."""
    folder = str(shared(tiny_bert_st))
    done = encode.encode(
        folder, str(texts), str(tmp_path / "first.npy"), precision="int8"
    )
    ranges = np.load(tmp_path / "first.ranges.npy")
    assert done.ranges == tmp_path / "first.ranges.npy" and ranges.shape == (
        2,
        done.num_dims,
    )
    one = tmp_path / "one.txt"
    one.write_text("red\n")
    encode.encode(
        folder,
        str(one),
        str(tmp_path / "one.npy"),
        precision="int8",
        ranges=str(tmp_path / "first.ranges.npy"),
    )
    full = Embedder(folder).encode(["red"])
    np.testing.assert_array_equal(
        np.load(tmp_path / "one.npy"), quantized(full, "int8", ranges)
    )
    again = Embedder(folder).encode(["red"], precision="int8", ranges=ranges)
    np.testing.assert_array_equal(again, np.load(tmp_path / "one.npy"))
    np.save(tmp_path / "other.npy", ranges[:, :4])
    for given, said in (
        ("other.npy", "is needed"),
        ("first.npy", "has the shape"),
        ("none.npy", "cannot be read"),
    ):
        with pytest.raises(UserError, match=said):
            encode.encode(
                folder,
                str(one),
                str(tmp_path / "x.npy"),
                precision="int8",
                ranges=str(tmp_path / given),
            )
    with pytest.raises(UserError, match="goes with --precision int8"):
        encode.encode(
            folder,
            str(one),
            str(tmp_path / "x.npy"),
            ranges=str(tmp_path / "first.ranges.npy"),
        )
