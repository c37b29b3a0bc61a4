"""The table of kernels in `docs/benchmarks.md`, which is also what the tests compare with."""

from tests.imitation.recording import BETWEEN, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
HEADER = (
    "| training | forward | loss | backward | rest | all kernels | waits of the host |"
)


def row_of(result):
    """Return the columns of the table for a case."""
    forward = result.kernels_of("split", "encode")
    loss = result.kernels_of("gather", "differentiate")
    backward = result.kernels_of("backward")
    others = result.kernels_of(BETWEEN)
    waits = sum(result.waits.values())
    return [forward, loss, backward, others, result.kernels_of(), waits]


def read():
    """Return the rows of the table by case."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = {}
    for line in lines[lines.index(HEADER) + 2 :]:
        if not line.startswith("|"):
            break
        name, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = [int(number.replace(",", "")) for number in numbers]
    return rows


def write(rows):
    """Put these rows into the table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(HEADER) + 2
    end = start
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    built = [
        f"| {name} | {' | '.join(f'{number:,d}' for number in numbers)} |"
        for name, numbers in rows.items()
    ]
    PAGE.write_text("\n".join([*lines[:start], *built, *lines[end:]]) + "\n", "utf-8")
