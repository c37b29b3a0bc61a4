"""The tables of docs/scale.md are those of the arithmetic, and a rank's tables grow no faster than the rows."""

from pathlib import Path

from benchmarks.ranks import measure
from benchmarks.scale import write_data
from benchmarks.traffic import BEGIN, END, MODELS, all_gather, of_parameters, tables

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_tables_of_the_page():
    page = PAGE.read_text(encoding="utf-8")
    actual = page.partition(BEGIN)[2].partition(END)[0]
    assert actual.strip() == tables().strip(), (
        "write it anew: python -m benchmarks.traffic"
    )


def test_arithmetic_of_a_gather():
    assert all_gather(800.0, 8).inside == 700.0, (
        "each GPU sends its eighth to seven others"
    )
    assert all_gather(6400.0, 64).between == 6300.0
    small = MODELS[0]
    assert of_parameters("ddp", small, 8).inside == 2 * 4 * small.parameters * 7 / 8


def test_tables_of_a_rank_grow_with_the_rows(tmp_path):
    write_data(16 * 64, tmp_path / "data.jsonl")
    few, many = (
        measure(world_size, tmp_path, rows=64, repeats=1)["bytes"]
        for world_size in (2, 16)
    )
    assert many <= 8.5 * max(few, 4 * 64 * 8 * 5), (
        "as many numbers for each row with eight times the ranks"
    )
