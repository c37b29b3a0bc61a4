"""Every preset loads in Accelerate's own reader and in ours, starts under `accelerate launch`, and is in the wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from tests.commands import command
from vembed.config.accelerate_file import (
    PRESETS_FOLDER,
    TOP_KEYS,
    preset_names,
    read_accelerate_file,
)

ROOT = Path(__file__).parents[2]
PRESETS = (
    "accelerate_ddp",
    "accelerate_fsdp",
    "accelerate_fsdp1",
    "accelerate_fsdp_offload",
    "accelerate_hsdp",
    "large_scale_fsdp",
    "multi_node_fsdp",
    "single_node_fsdp",
)


@pytest.mark.promise("C14", "C15", "C16")
def test_the_presets_there_are():
    assert tuple(preset_names()) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.promise("D06", "D17")
def test_preset_loads_in_accelerate_and_here(name, resolved):
    theirs = load_config_from_file(str(PRESETS_FOLDER / f"{name}.yaml"))
    ours = read_accelerate_file(name)
    assert ours.notes == ()
    machines = ours.options["num_machines"]
    processes = ours.options.get("num_processes")
    assert machines == theirs.num_machines
    assert theirs.num_processes == (processes * machines if processes else "auto")
    run = resolved(f"accelerate_config: {name}\n")
    # A preset says nothing that has no effect.
    assert run.fsdp_notes == run.notes == ()
    if name == "accelerate_ddp":
        assert run.fsdp is None
    else:
        assert run.fsdp.version == (1 if name == "accelerate_fsdp1" else 2)
        assert run.fsdp.origin == f"configs/{name}.yaml"


@pytest.mark.parametrize(
    ("name", "machines", "offloads"),
    [("single_node", 1, False), ("multi_node", 4, True), ("large_scale", 8, True)],
)
@pytest.mark.promise("A13", "C14", "C15", "C16")
def test_what_the_presets_promise(name, machines, offloads):
    options = read_accelerate_file(f"{name}_fsdp").options
    assert options["num_machines"] == machines
    assert options["num_processes"] == 8
    assert options["fsdp_offload_params"] is offloads
    assert options["gradient_checkpointing"]
    assert options.get("fsdp_forward_prefetch", False) is (name == "large_scale")


@pytest.mark.promise("D30")
def test_our_list_of_top_level_keys_is_accelerates():
    assert set(ClusterConfig.__dataclass_fields__) == TOP_KEYS


@pytest.mark.promise("D06", "D16")
def test_accelerate_launch_counts_processes_by_itself(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        'import os; os.write(1, f\'rank {os.environ["RANK"]} of {os.environ["WORLD_SIZE"]}\\n\'.encode())\n'
    )
    preset = PRESETS_FOLDER / "accelerate_fsdp.yaml"
    words = f"--config_file {preset} --main_process_port 0 {script}"
    done = command(
        *words.split(),
        module="accelerate.commands.launch",
        folder=tmp_path,
        env={"ACCELERATE_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""},
        code=0,
    )
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"rank {rank} of {len(lines)}" for rank in range(len(lines))]
    # Without a GPU: one process per core.
    assert len(lines) in (os.cpu_count(), len(os.sched_getaffinity(0)))


def test_presets_travel_in_the_wheel(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "vembed"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True)
    code = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    build = [sys.executable, "-c", code]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert {f"vembed/configs/{name}.yaml" for name in PRESETS} <= inside
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vembed").rglob("*.py")}
    assert modules <= inside, "every package is listed"
    code = "from vembed.config.accelerate_file import *; print(read_accelerate_file('accelerate_fsdp').distribution)"
    read = [sys.executable, "-c", code]
    printed = subprocess.check_output(read, cwd=tmp_path / "installed")
    assert printed == b"fsdp\n"
