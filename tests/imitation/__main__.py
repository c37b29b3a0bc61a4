"""Write the kernels of all cases into the table of `docs/benchmarks.md`: `python -m tests.imitation`."""

from tests.imitation.cases import CASES
from tests.imitation.runs import on_imitation
from tests.imitation.table import row_of, write

if __name__ == "__main__":
    results = on_imitation([case.name for case in CASES])
    write({name: row_of(result) for name, result in results.items()})
