"""Data files for tests, in every format, and the store that opens them."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny_tokenizers import texts
from vembed.config.schema import TrainConfig
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


def pair(**fields):
    """A record of a query and a positive, with these fields."""
    return {"query": "q", "positive": "p", **fields}


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


def open_path(path, **options):
    return open_examples(config(**options), str(path))


def refused(path, **options):
    with pytest.raises(UserError) as caught:
        open_path(path, **options)
    return str(caught.value)


def pairs_of(store):
    """The texts of query and first positive of all examples."""
    examples = [store[number] for number in range(len(store))]
    return [(example.query.text, example.positives[0].text) for example in examples]


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
