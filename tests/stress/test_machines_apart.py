"""Two "machines" with addresses of their own and a slow link: one is killed, and all are started again.

VEMBED_MACHINES=ddp-2 (or several names, or `all`) in the environment runs it: real commands take minutes.
"""

import os

import pytest

from tests.stress.machines import ROWS, all_rows, why_not

ASKED = os.environ.get("VEMBED_MACHINES", "").split()


@pytest.mark.skipif(
    not ASKED,
    reason="minutes of real commands: VEMBED_MACHINES=all, or python -m tests.stress.machines",
)
@pytest.mark.timeout(1200)
def test_losses_over_machines_are_those_of_one(tmp_path):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    all_rows(tmp_path, [row for row in ROWS if "all" in ASKED or row.name in ASKED])
