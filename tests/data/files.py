"""Data files for tests, in every format, and the store that opens them."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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


def write_jsonl(path, records):
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    return path


def write_lines(path, *lines):
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else line.encode()) + b"\n"
            for line in lines
        )
    )
    return path


def write_format(folder, kind, records):
    path = folder / f"data.{kind}"
    if kind in ("jsonl", "ndjson"):
        path.write_text(
            "\n".join(json.dumps(record, ensure_ascii=False) for record in records),
            encoding="utf-8",
        )
    elif kind == "json":
        path.write_text(
            json.dumps(records, ensure_ascii=False, indent=2), encoding="utf-8"
        )
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(
                file, list(records[0]), delimiter="\t" if kind == "tsv" else ","
            )
            writer.writeheader()
            writer.writerows(records)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
    else:
        import datasets

        datasets.Dataset.from_list(records).save_to_disk(str(path))
    return path
