"""Run cases of the imitation device by hand: `python -m tests.imitation [CASE ...]`; without names the whole matrix.

`--default` runs those of the tests alone. `--write` puts their kernels into the table of `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import sys

from tests.imitation.cases import all_cases, default_cases
from tests.imitation.known_waits import read_known, unknown
from tests.imitation.runs import Result, on_cpu, on_imitation
from tests.imitation.table import differences, row_of, write


def main() -> int:
    """Run the cases and print what they showed; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.imitation")
    parser.add_argument("names", nargs="*", metavar="CASE")
    parser.add_argument("--default", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    cases = default_cases() if options.default or options.write else all_cases()
    names = options.names or [case.name for case in cases]
    on_device = on_imitation(names)
    if options.write:
        write({name: row_of(result) for name, result in on_device.items()})
        return 0
    on_host = on_cpu(names)
    failed = [show(name, on_host[name], on_device[name]) for name in names]
    if not options.names and not options.default:
        waits = [wait for result in on_device.values() for wait in result.all_waits()]
        for known in read_known():
            if not any(known.covers(wait) for wait in waits):
                print(f"no case waits there any more: {known.place} ({known.kind})")
    return int(any(failed))


def show(name: str, on_host: Result, on_device: Result) -> bool:
    """Print one case; return whether it failed."""
    for device, result in (("the CPU", on_host), ("the imitation", on_device)):
        if result.error is not None:
            print(f"{name}: failed on {device}\n{result.error}")
            return True
    losses, norms = differences(on_host, on_device)
    print(f"{name}: {row_of(on_device)}")
    print(f"  differences from the CPU: losses {losses}, gradient norms {norms}")
    new_waits = unknown(on_device)
    for wait in new_waits:
        print(f"  waits: {wait}")
    return bool(new_waits)


if __name__ == "__main__":
    sys.exit(main())
