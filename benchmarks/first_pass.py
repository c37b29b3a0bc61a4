"""python -m benchmarks.first_pass: the first pass over large data against reading and parsing the same JSON."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.train import machine
from vembed.config.schema import TrainConfig
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.example_store import open_examples
from vembed.parallel.environment import num_cores

GIB = 2**30
RECORDS_OF_A_GROUP = 50_000


def records(num_records: int, num_bytes: int) -> Iterator[dict[str, str]]:
    """Yield records of about so many bytes: a query and a document of words."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 10)))
        for _ in range(5000)
    ]
    bodies = [
        " ".join(draw.choices(words, k=max(1, num_bytes // 7))) for _ in range(64)
    ]
    for row in range(num_records):
        yield {
            "query": f"what is {words[row % 5000]} {row}",
            "positive": f"{row} {bodies[row % 64]}",
        }


def write_lines(num_records: int, num_bytes: int, path: Path) -> None:
    """Write the records as JSON Lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps(record) + "\n" for record in records(num_records, num_bytes)
        )


def write_table(num_records: int, num_bytes: int, path: Path) -> None:
    """Write the records as Parquet, some at a time: 20 GB do not fit in memory."""
    left = records(num_records, num_bytes)
    schema = pa.schema([("query", pa.string()), ("positive", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        while group := list(itertools.islice(left, RECORDS_OF_A_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema))


def parse(arguments: tuple[str, int, int]) -> int:
    """Read and parse the lines of a byte range with Python's own parser, and do nothing with them."""
    path, start, stop = arguments
    decode = json.JSONDecoder().raw_decode
    count = 0
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
            count += 1
    return count


def processor_time() -> float:
    """Return the processor seconds of this process and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass(frozen=True, slots=True)
class Parsing:
    """Reading and parsing alone, on all cores."""

    seconds: float
    processor: float
    """Processor seconds of all processes."""


def parsing_of(path: Path) -> Parsing:
    """Read and parse a file on all cores."""
    size = path.stat().st_size
    cores = num_cores()
    bounds = [size * number // (4 * cores) for number in range(4 * cores + 1)]
    parts = [(str(path), start, stop) for start, stop in itertools.pairwise(bounds)]
    processor = processor_time()
    with multiprocessing.Pool(cores) as pool:
        pool.map(len, ["a"] * cores)  # the start of the processes is not counted
        began = time.perf_counter()
        pool.map(parse, parts, chunksize=1)
        seconds = time.perf_counter() - began
        pool.close()
        pool.join()
    return Parsing(seconds, processor_time() - processor)


@dataclass(frozen=True, slots=True)
class Opened:
    """Opening of the data in a process of its own, as at the start of a run."""

    seconds: float
    processor: float
    """Processor seconds of all processes."""
    batch: float
    """Seconds of the first batch of a shuffled epoch."""
    peak: float
    """GiB of this process at most, mapped files included."""
    others: float
    """The same of the largest process that it has started."""


def peak_of(process: str) -> float:
    """Return the GiB that a process had in memory at most; 0 if it has ended. `ru_maxrss` would include that of the
    process which started it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**20
    return 0.0


@contextlib.contextmanager
def peaks_of_children() -> Iterator[dict[int, float]]:
    """Collect the peaks of the processes that this one starts, again and again until they end."""
    # The last one of each counts: before a process runs its own program it is a copy of this one.
    peaks = dict[int, float]()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            for task in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):
                    measured = {
                        int(process): peak_of(process)
                        for process in (task / "children").read_text().split()
                    }
                    peaks.update(
                        {process: peak for process, peak in measured.items() if peak}
                    )

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def opened(path: Path, cache: Path, processes: int) -> Opened:
    """Open the data, and draw the first batch of a shuffled epoch."""
    config = TrainConfig(model_name="none", data_path=str(path))
    began = time.perf_counter()
    processor = processor_time()
    with (
        mock.patch("vembed.data.example_store.num_cores", return_value=processes),
        peaks_of_children() as others,
    ):
        os.environ["XDG_CACHE_HOME"] = str(cache)
        store = open_examples(config.data, str(path))
    opened_at = time.perf_counter()
    processor = processor_time() - processor
    schedule = BatchSchedule([len(store)], 64, 0)
    for index in schedule.batch(0, 0):
        store[int(index)]
    drawn = time.perf_counter()
    return Opened(
        opened_at - began,
        processor,
        drawn - opened_at,
        peak_of("self"),
        max(others.values(), default=0.0),
    )


def opened_anew(path: Path, cache: Path, processes: int) -> Opened:
    """Return what `opened` finds in a new process, whose memory nothing else has grown."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(opened, path, cache, processes).result()


def line_of(first: Opened, second: Opened) -> str:
    """Return the figures of a first and a second start."""
    return (
        f"first pass {first.seconds:.1f} s (processor time {first.processor:.1f} s), second start {second.seconds:.2f} "
        f"s, first batch of a shuffled epoch "
        f"{second.batch:.2f} s; at most {first.peak:.2f} GiB in this process, {first.others:.2f} GiB in another, "
        f"{second.peak:.2f} GiB in the second start"
    )


def processor_seconds(
    path: Path, cache: Path, repeats: int
) -> tuple[float, float, float]:
    """Return the processor time of parsing, of the same with json.loads, and of the first pass, in this one process.

    Other work on the machine disturbs it less than seconds. The best of some rounds in turns.
    """
    config = TrainConfig(model_name="none", data_path=str(path))

    def loads() -> None:
        with path.open("rb") as file:
            for line in file:
                json.loads(line)

    def first_pass(number: int) -> None:
        with mock.patch("vembed.data.example_store.num_cores", return_value=1):
            os.environ["XDG_CACHE_HOME"] = str(cache / str(number))
            open_examples(config.data, str(path))

    gc.disable()  # as in the processes of the first pass
    best = [float("inf")] * 3
    for number in range(repeats):
        ways = (
            lambda: parse((str(path), 0, path.stat().st_size)),
            loads,
            lambda number=number: first_pass(number),
        )
        for place, way in enumerate(
            ways if path.suffix == ".jsonl" else (None, None, ways[2])
        ):
            if way is not None:
                began = time.process_time()
                way()
                best[place] = min(best[place], time.process_time() - began)
    return best[0], best[1], best[2]


def by_processor_time(number: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Print the microseconds of each record in one process."""
    path = folder / "data.jsonl"
    table = folder / "data.parquet"
    write_lines(number, arguments.bytes, path)
    parsing, loads, seconds_here = processor_seconds(
        path, folder / "cache", arguments.processor_time
    )
    line = (
        f"{number:,d} records of {path.stat().st_size / number:,.0f} bytes, processor time of each, us: "
        f"parsing {parsing / number * 1e6:.2f}, by json.loads {loads / number * 1e6:.2f}, first pass "
        f"{seconds_here / number * 1e6:.2f} ({parsing / seconds_here:.0%} of the speed of parsing)"
    )
    if arguments.parquet:
        write_table(number, arguments.bytes, table)
        seconds_here = processor_seconds(
            table, folder / "cache", arguments.processor_time
        )[2]
        line += f", of the same as Parquet {seconds_here / number * 1e6:.2f} ({parsing / seconds_here:.0%})"
    print(line, flush=True)


def by_the_clock(number: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Print the seconds on all cores, and the memory of each process."""
    lines = folder / "data.jsonl"
    processes = arguments.processes or num_cores()
    writers = {lines: write_lines} | (
        {folder / "data.parquet": write_table} if arguments.parquet else {}
    )
    for path, write in writers.items():
        if not path.exists():
            partial = path.with_suffix(".partial")
            write(number, arguments.bytes, partial)
            partial.rename(path)
    print(
        f"{number:,d} records, {num_cores()} cores, {processes} processes", flush=True
    )
    for _ in range(arguments.rounds):
        parsing = [parsing_of(lines)]
        for path in writers:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                first = opened_anew(path, Path(cache), processes)
                # Parsing before and after: the machine may have become slower.
                parsing.append(parsing_of(lines))
                second = opened_anew(path, Path(cache), processes)
            parsed_before, parsed_after = parsing[-2:]
            print(
                f"{path.suffix}, {path.stat().st_size / GIB:.2f} GiB: reading and parsing JSON {parsed_before.seconds:.1f} and "
                f"{parsed_after.seconds:.1f} s, {min(parsed_before.seconds, parsed_after.seconds) / first.seconds:.0%} of that speed; "
                f"processor time {parsed_before.processor:.1f} and {parsed_after.processor:.1f} s, "
                f"{min(parsed_before.processor, parsed_after.processor) / first.processor:.0%}; {line_of(first, second)}",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each number of records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument(
        "--bytes",
        type=int,
        default=400,
        help="of a record; 2,000 are 20 GB in 10 million records",
    )
    parser.add_argument("--parquet", action="store_true")
    parser.add_argument(
        "--processes", type=int, help="of the first pass; default: one for each core"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the data are kept; default: none, and they are removed",
    )
    parser.add_argument(
        "--processor-time",
        type=int,
        metavar="ROUNDS",
        help="of one process, in place of seconds",
    )
    arguments = parser.parse_args(argv)
    print(machine(), flush=True)
    for number in arguments.records:
        with contextlib.ExitStack() as stack:
            if arguments.folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            else:
                folder = arguments.folder / f"{number}-{arguments.bytes}"
                folder.mkdir(parents=True, exist_ok=True)
            (by_processor_time if arguments.processor_time else by_the_clock)(
                number, arguments, folder
            )


if __name__ == "__main__":
    main()
