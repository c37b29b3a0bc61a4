"""Placement of a teacher's weights: a copy on each process, or shards, where a copy does not fit."""

from __future__ import annotations

import logging
from pathlib import Path

from vembed.config.entries import Teacher
from vembed.parallel import collectives
from vembed.parallel.session import Session

log = logging.getLogger("vembed")

LARGEST_SHARE = 0.8
"""Share of a process's memory that a copy may take."""
GB = 10**9


def is_sharded(teacher: Teacher, folder: Path, session: Session) -> bool:
    """Return whether each process holds a shard of the teacher, and log why. Collective."""
    if session.world_size == 1:
        return False
    if teacher.sharded != "auto":
        return teacher.sharded
    # Rank 0 decides for all: the caches of several machines may hold different files.
    size = collectives.broadcast_json(
        sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    )
    memory = session.memory
    if size > LARGEST_SHARE * memory:
        log.info(
            "teacher %s: sharded over %d processes (its weights take %.1f GB, and a process has %.1f GB)",
            teacher.label,
            session.world_size,
            size / GB,
            memory / GB,
        )
        return True
    return False
