"""Data files for tests, in every format, and the store that opens them."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny_tokenizers import texts
from vembed.config.schema import DataSource, TrainConfig
from vembed.data import example_store
from vembed.errors import UserError

RECORDS = [
    {
        "query": f"question {number}, with a comma",
        "positive": f'answer "{number}"\nin two lines',
        "negative_1": f"wrong\t{number} \u00e4\u6f22",
    }
    for number in range(40)
]


def pair(query="q", positive="p", **fields):
    """A record of a query and a positive, with these fields."""
    return {"query": query, "positive": positive, **fields}


def numbered(count, **fields):
    """Records of the queries q0, q1, ... and the positives p0, p1, ..., with these fields."""
    return [pair(f"q{number}", f"p{number}") | fields for number in range(count)]


def config(**options):
    return TrainConfig(model_name="m", data_path="unused", **options)


def open_examples(config, paths, **options):
    """Open data as the run of a config does."""
    return example_store.open_examples(
        config.data,
        paths,
        config.objective,
        model_name=config.model.model_name,
        **options,
    )


def open_path(path, role="train", **options):
    """Open a file, or a list of files and sources, as a run with these options does."""
    sources = str(path)
    if isinstance(path, list):
        sources = [
            entry if isinstance(entry, DataSource) else str(entry) for entry in path
        ]
    return open_examples(config(**options), sources, role=role)


def open_rows(folder, rows, **options):
    """Write a file of records and open it."""
    return open_path(write_jsonl(folder / "rows.jsonl", rows), **options)


def refused_rows(folder, rows, **options):
    return refused(write_jsonl(folder / "rows.jsonl", rows), **options)


def refused(path, **options):
    with pytest.raises(UserError) as caught:
        open_path(path, **options)
    return str(caught.value)


def pairs_of(store):
    """The texts of query and first positive of all examples."""
    return [(example.query.text, example.positives[0].text) for example in store]


def places_of(store):
    """Where each example comes from: file and line."""
    return [example.where for example in store]


def queries_of(store):
    return [query for query, _ in pairs_of(store)]


def write_lines(path, *lines):
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else line.encode()) + b"\n"
            for line in lines
        )
    )
    return path


def write_jsonl(path, records):
    """Write one record a line, every second one in ASCII alone."""
    lines = [
        json.dumps(record, ensure_ascii=row % 2 == 0)
        for row, record in enumerate(records)
    ]
    text = "".join(f"{line}\n" for line in lines)
    # A lone surrogate is written as JSON writes it in ASCII.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


def read_jsonl(path):
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write_beir(folder, corpus, queries, relevant):
    """Write a BEIR folder: texts by their names, and the names of each query's relevant documents."""
    (folder / "qrels").mkdir(parents=True)
    for part, entries in (("corpus", corpus), ("queries", queries)):
        rows = [{"_id": name, "text": text} for name, text in entries.items()]
        write_jsonl(folder / f"{part}.jsonl", rows)
    with (folder / "qrels" / "test.tsv").open("w") as file:
        for query, documents in relevant.items():
            for document in documents:
                file.write(f"{query}\t{document}\t1\n")


def text_records(count, num_negatives=0):
    """Records of different texts: a query, a positive, and so many hard negatives."""
    width = 2 + num_negatives
    words = iter(texts(width * count, seed=5))
    records = []
    for _ in range(count):
        record = {"query": next(words), "positive": next(words)}
        if num_negatives:
            record["negatives"] = [next(words) for _ in range(num_negatives)]
        records.append(record)
    return records


def write_json_array(path, records):
    path.write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")


def write_delimited(path, records):
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(records)


def write_parquet(path, records, rows_of_a_group=7):
    table = pa.Table.from_pylist(records)
    pq.write_table(table, path, row_group_size=rows_of_a_group)


def write_saved(path, records):
    import datasets

    datasets.Dataset.from_list(records).save_to_disk(str(path))


WRITERS = {
    "jsonl": write_jsonl,
    "json": write_json_array,
    "csv": write_delimited,
    "parquet": write_parquet,
    "folder": write_saved,
}


def write_format(folder, kind, records):
    path = folder / f"data.{kind}"
    WRITERS[kind](path, records)
    return path
