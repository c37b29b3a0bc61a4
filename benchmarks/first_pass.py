"""python -m benchmarks.first_pass: the first pass over large data against reading and parsing the same JSON."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pyarrow.json as pj
import pyarrow.parquet as pq

from benchmarks.train import machine
from vembed.config.schema import TrainConfig
from vembed.cores import num_cores
from vembed.data.batches import BatchSchedule
from vembed.data.index_worker import OBJECTS_BETWEEN_COLLECTIONS
from vembed.data.sources import open_examples

GIB = 2**30


def write_data(num_records: int, num_bytes: int, path: Path) -> None:
    """Write records of about so many bytes: a query and a document of words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 10))) for _ in range(5000)]
    bodies = [" ".join(draw.choices(words, k=max(1, num_bytes // 7))) for _ in range(64)]
    with path.open("w", encoding="utf-8") as file:
        for row in range(num_records):
            record = {"query": f"what is {words[row % 5000]} {row}", "positive": f"{row} {bodies[row % 64]}"}
            file.write(json.dumps(record) + "\n")


def parse(arguments: tuple[str, int, int]) -> int:
    """Read and parse the lines of a byte range with Python's own parser, and do nothing with them."""
    path, start, stop = arguments
    decode, found = json.JSONDecoder().raw_decode, 0
    with Path(path).open("rb") as file:
        file.seek(start)
        left = stop - start
        if start:
            left -= len(file.readline())
        for line in file:
            if left <= 0:
                break
            left -= len(line)
            decode(line.decode())
            found += 1
    return found


def seconds_of_parsing(path: Path) -> float:
    """Return the seconds of reading and parsing alone, on all cores."""
    size, cores = path.stat().st_size, num_cores()
    bounds = [size * number // (4 * cores) for number in range(4 * cores + 1)]
    parts = [(str(path), start, stop) for start, stop in itertools.pairwise(bounds)]
    with multiprocessing.Pool(cores) as pool:
        pool.map(len, ["a"] * cores)  # the start of the processes is not counted
        began = time.perf_counter()
        pool.map(parse, parts, chunksize=1)
        return time.perf_counter() - began


def opened(path: Path, cache: Path) -> tuple[float, float]:
    """Return the seconds until the data are open, and until the first batch of a shuffled epoch is drawn."""
    config = TrainConfig(model_name="none", data_path=str(path))
    began = time.perf_counter()
    store = open_examples(config, str(path), cache_dir=cache)
    there = time.perf_counter()
    schedule = BatchSchedule([len(store)], 64, 0)
    for index in schedule.batch(0, 0):
        store[int(index)]
    return there - began, time.perf_counter() - there


def processor_seconds(path: Path, cache: Path, repeats: int) -> tuple[float, float, float]:
    """Return the processor time of parsing, of the same with json.loads, and of the first pass, in this one process.

    Other work on the machine disturbs it less than seconds. The best of some rounds in turns.
    """
    config = TrainConfig(model_name="none", data_path=str(path))

    def loads() -> None:
        with path.open("rb") as file:
            for line in file:
                json.loads(line)

    def first_pass(number: int) -> None:
        with mock.patch("vembed.data.index_worker.num_cores", return_value=1):
            open_examples(config, str(path), cache_dir=cache / str(number))

    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)  # as in the processes of the first pass
    best = [float("inf")] * 3
    for number in range(repeats):
        ways = (lambda: parse((str(path), 0, path.stat().st_size)), loads, lambda one=number: first_pass(one))
        for place, way in enumerate(ways if path.suffix == ".jsonl" else (None, None, ways[2])):
            if way is not None:
                began = time.process_time()
                way()
                best[place] = min(best[place], time.process_time() - began)
    return best[0], best[1], best[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each number of records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--bytes", type=int, default=400, help="of a record; 2,000 are 20 GB in 10 million records")
    parser.add_argument("--parquet", action="store_true")
    parser.add_argument("--processor-time", type=int, metavar="ROUNDS", help="of one process, in place of seconds")
    arguments = parser.parse_args(argv)
    print(machine(), flush=True)
    for records in arguments.records:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "data.jsonl"
            write_data(records, arguments.bytes, path)
            table = path.with_suffix(".parquet")
            if arguments.parquet:
                pq.write_table(pj.read_json(path, pj.ReadOptions(block_size=2**24)), table)
            if arguments.processor_time:
                parsing, loads, here = processor_seconds(path, Path(name) / "cache", arguments.processor_time)
                line = (
                    f"{records:,d} records of {path.stat().st_size / records:,.0f} bytes, processor time of each, us: "
                    f"parsing {parsing / records * 1e6:.2f}, by json.loads {loads / records * 1e6:.2f}, first pass "
                    f"{here / records * 1e6:.2f} ({parsing / here:.0%} of the speed of parsing)"
                )
                if arguments.parquet:
                    here = processor_seconds(table, Path(name) / "cache", arguments.processor_time)[2]
                    line += f", of the same as Parquet {here / records * 1e6:.2f} ({parsing / here:.0%})"
                print(line, flush=True)
                continue
            size = path.stat().st_size
            parsing = [seconds_of_parsing(path)]
            first, _ = opened(path, Path(name) / "cache")
            parsing.append(seconds_of_parsing(path))
            again, batch = opened(path, Path(name) / "cache")
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
            print(
                f"{records:,d} records, {size / GIB:.2f} GiB of JSON Lines, {num_cores()} cores: reading and parsing "
                f"{min(parsing):.1f} s, first pass {first:.1f} s ({min(parsing) / first:.0%} of that speed), second "
                f"start {again:.2f} s, first batch of a shuffled epoch {batch:.2f} s; at most {peak:.2f} GiB in this "
                f"process, {workers:.2f} GiB in another",
                flush=True,
            )
            if arguments.parquet:
                found = [opened(table, Path(name) / "cache")[0] for _ in range(2)]
                print(f"the same as Parquet: first pass {found[0]:.1f} s, second start {found[1]:.2f} s", flush=True)


if __name__ == "__main__":
    main()
