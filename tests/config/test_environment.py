"""Variables of the environment are read where a run is decided or started, and nowhere else without a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import vembed

PACKAGE = Path(vembed.__file__).parent
STARTING = ("cli", "cli_support", "entrypoints", "tools", "stages", "tuning")
"""Rooms of the commands, which start processes and hand the environment down."""
REASONS = {
    "config.loading": "the launcher's variables are one of the sources of options",
    "config.output_folder": "ranks take the time in a folder's name from the process that started them",
    "config.user_folders": "the user's cache folder, by the desktop standard",
    "data.pipe_messages": "the environment of the processes that read large data and decode images",
    "distributed.environment": "torch's variables of the process group",
    "distributed.heartbeat": "torch's address of the process group, and the launcher's folder for messages",
    "distributed.launch": "the environment of the processes that are started",
    "distributed.meeting": "ids of run, job and launcher, to find processes that do not belong together",
    "distributed.rendezvous": "torch's address of the process group",
    "distributed.session": "variables that torch, NCCL, gloo, cuBLAS and Accelerate read are set, restored and logged",
    "distributed.devices": "the variable of CUDA's allocator is set",
    "training.logs": "values of secret variables are hidden in logs",
    "mining.endpoint": "the key of an endpoint, which no config holds",
}


def readers() -> set[str]:
    """The modules that name os.environ or os.getenv."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "environ" not in text and "getenv" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            names = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names = {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv"}:
                found.add(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    return found


def test_modules_that_read_the_environment_are_listed_with_a_reason() -> None:
    assert {module for module in readers() if module.partition(".")[0] not in STARTING} == REASONS.keys()
