"""Checkpoint folders: damage of any kind is seen, and what is removed is never the best or the newest."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vembed.training.checkpoint import folders as integrity


def fake_checkpoint(output_dir, step, content=b"0123456789" * 20):
    partial = output_dir / f"checkpoint-{step}.partial"
    (partial / "model").mkdir(parents=True)
    for name in ("a.safetensors", "state.json", "model/config.json"):
        (partial / name).write_bytes(content)
    integrity.commit(partial, output_dir / f"checkpoint-{step}", {})
    return output_dir / f"checkpoint-{step}"


def damage(folder, name, kind, position):
    path = folder / name
    data = path.read_bytes()
    position = min(int(position * len(data)), len(data) - 1)
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(data[:position])
    elif kind == "flip":
        path.write_bytes(
            data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        )
    else:
        path.write_bytes(data + b"x")


FILES = ["a.safetensors", "state.json", "model/config.json", integrity.MANIFEST]


@settings(max_examples=80)
@given(
    name=st.sampled_from(FILES),
    kind=st.sampled_from(["delete", "truncate", "flip", "append"]),
    position=st.floats(0, 1, exclude_max=True),
)
def test_any_damage_to_any_file_is_seen(tmp_path_factory, name, kind, position):
    folder = fake_checkpoint(tmp_path_factory.mktemp("run"), 1)
    assert integrity.verify(folder) == []
    damage(folder, name, kind, position)
    problems = integrity.verify(folder)
    # A byte of white space at the manifest's end changes nothing that it says.
    assert problems or (
        name == integrity.MANIFEST and json.loads((folder / name).read_bytes())
    )
    # Damage of the manifest may look like that of a file that it names.
    assert not problems or name in (*problems[0].split(), integrity.MANIFEST)
    shutil.rmtree(folder.parent)


def test_another_format_is_not_mistaken_for_damage(tmp_path):
    folder = fake_checkpoint(tmp_path, 1)
    content = {"format": 99, "files": {}}
    (folder / integrity.MANIFEST).write_text(json.dumps(content))
    assert "is of another version of vembed" in integrity.verify(folder)[0]


def test_each_part_of_the_files_is_looked_at_by_one(tmp_path):
    folder = fake_checkpoint(tmp_path, 1)
    damage(folder, "model/config.json", "flip", 0.3)
    actual = [integrity.verify(folder, part=part, num_parts=3) for part in range(3)]
    assert sorted(map(len, actual)) == [0, 0, 1]


def test_files_of_another_machine_that_are_not_there_are_noticed(tmp_path):
    partial = tmp_path / "checkpoint-1.partial"
    partial.mkdir()
    with pytest.raises(OSError, match="file system that all machines share"):
        integrity.commit(
            partial, tmp_path / "checkpoint-1", {"shard-00002.safetensors": "0"}
        )
    assert integrity.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, set(), [1, 2, 3, 10]),
        (2, set(), [3, 10]),
        (2, {1}, [1, 10]),
        (1, {2}, [2, 10]),
        (2, {7}, [3, 10]),
    ],
)
def test_the_limit_spares_the_best_and_the_newest(tmp_path, limit, keep, left):
    for step in (10, 1, 3, 2):
        fake_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-5.abandoned").mkdir()
    integrity.prune(tmp_path, limit, keep)
    names = {f"checkpoint-{step}" for step in left}
    names.add("checkpoint-5.abandoned")
    assert {path.name for path in tmp_path.iterdir()} == names
