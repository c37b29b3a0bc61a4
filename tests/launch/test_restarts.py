"""torchrun starts the processes again after a failure, and the run goes on from its checkpoint."""

import json

from tests.commands import command
from tests.training.test_run import metrics, settings_without_validation

SCRIPT = """
import json, os, sys
import vembed

def fail(info):
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first and info.step == 3:
        os._exit(1)

vembed.train(json.loads(sys.argv[1]), on_step=fail)
"""


def test_torchrun_restarts_go_on_from_the_checkpoint(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = settings_without_validation(
        tmp_path, max_steps=4, save_steps=2, resume="auto"
    )
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", str(script)]
    words.append(json.dumps(options))
    done = command(*words, module="torch.distributed.run", code=0)
    assert "checkpoint-2 (step 2)" in done.stdout + done.stderr
    assert metrics(tmp_path / "run", "step")[-1] == 4
