"""A training with the oldest dependencies that pyproject.toml allows: `make test-floors` runs it in their environment.

    python -m tests.floors

Needs nothing but vembed and its dependencies, so no pytest.
"""

import json
import os
import re
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"^([\w.-]+)(?:>=|==)([\w.]+)$")
NEWER_THAN_ITS_FLOOR = "torch"
"""The CPU build that CI may install is of one version."""


def constraints():
    """Return name -> version of constraints-min.txt."""
    lines = (ROOT / "constraints-min.txt").read_text().splitlines()
    return dict(actual.groups() for line in lines if (actual := NAME.match(line)))


def lower_bounds():
    """Return name -> lowest version of pyproject.toml's dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(
        actual.groups()
        for line in project["dependencies"]
        if (actual := NAME.match(line))
    )


def main():
    """Train an adapter for two steps, load what was saved, and check that these are the oldest versions."""
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    import vembed
    from tests.tiny import shared, tiny_bert_st

    newer = {
        name: version(name)
        for name, oldest in constraints().items()
        if version(name).partition("+")[0] != oldest
    }
    assert not newer, f"installed are {newer}, not the versions of constraints-min.txt"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "train.jsonl")
        data.write_text(
            "".join(
                json.dumps({"query": f"red {number}", "positive": f"cat {number}"})
                + "\n"
                for number in range(16)
            )
        )
        result = vembed.train(
            {
                "model_name": str(shared(tiny_bert_st)),
                "data_path": str(data),
                "val_data_path": str(data),
                "output_dir": f"{folder}/run",
                "batch_size": 8,
                "max_steps": 2,
                "use_lora": True,
            }
        )
        assert result.steps == 2
        assert vembed.Embedder(str(result.model_dir)).encode(["a cat"]).shape == (1, 32)
    print(
        "trained with the oldest versions:",
        ", ".join(f"{name} {version(name)}" for name in constraints()),
    )


if __name__ == "__main__":
    main()
