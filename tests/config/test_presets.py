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
from vembed.config.loading import resolve_run

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
def test_preset_loads_in_accelerate_and_here(name, write_config):
    theirs = load_config_from_file(str(PRESETS_FOLDER / f"{name}.yaml"))
    ours = read_accelerate_file(name)
    assert ours.notes == ()
    machines = ours.options["num_machines"]
    processes = ours.options.get("num_processes")
    assert machines == theirs.num_machines
    assert theirs.num_processes == (processes * machines if processes else "auto")
    run = resolve_run(write_config(f"accelerate_config: {name}\n"), env={})
    settings = run.fsdp
    assert (settings is None) == (name == "accelerate_ddp")
    assert run.fsdp_notes == () and run.notes == (), (
        "a preset says nothing that has no effect"
    )
    if settings is not None:
        assert settings.version == (1 if name == "accelerate_fsdp1" else 2)
        assert settings.source == f"configs/{name}.yaml"


@pytest.mark.promise("A13", "C14", "C15", "C16")
def test_what_the_presets_promise():
    single, multi, large = (
        read_accelerate_file(f"{name}_fsdp")
        for name in ("single_node", "multi_node", "large_scale")
    )
    options = ("num_machines", "num_processes", "fsdp_offload_params")
    promised = [(1, 8, False), (4, 8, True), (8, 8, True)]
    for file, values in zip((single, multi, large), promised, strict=True):
        assert tuple(file.options[name] for name in options) == values
        assert file.options["gradient_checkpointing"]
    assert large.options["fsdp_forward_prefetch"] is True
    hybrid = read_accelerate_file("accelerate_hsdp")
    assert hybrid.options["fsdp_sharding_strategy"] == "HYBRID_SHARD"


@pytest.mark.promise("D30")
def test_our_list_of_top_level_keys_is_accelerates():
    assert set(ClusterConfig.__dataclass_fields__) == TOP_KEYS


@pytest.mark.parametrize("name", ["accelerate_fsdp", "accelerate_ddp"])
@pytest.mark.promise("D06", "D16")
def test_accelerate_launch_counts_processes_by_itself(name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        'import os; os.write(1, f\'rank {os.environ["RANK"]} of {os.environ["WORLD_SIZE"]}\\n\'.encode())\n'
    )
    words = [
        "--config_file",
        str(PRESETS_FOLDER / f"{name}.yaml"),
        "--main_process_port",
        "0",
        str(script),
    ]
    env = {"ACCELERATE_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    done = command(
        *words, module="accelerate.commands.launch", folder=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"rank {rank} of {len(lines)}" for rank in range(len(lines))]
    assert len(lines) in (os.cpu_count(), len(os.sched_getaffinity(0))), (
        "without a GPU: one process per core"
    )


def test_presets_travel_in_the_wheel(tmp_path):
    build = [
        sys.executable,
        "-c",
        "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])",
    ]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "vembed"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True)
    subprocess.run([*build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert {f"vembed/configs/{name}.yaml" for name in PRESETS} <= inside
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vembed").rglob("*.py")}
    assert modules <= inside, "every package is listed"
    code = "from vembed.config.accelerate_file import *; print(read_accelerate_file('accelerate_fsdp').distribution)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "installed",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "fsdp\n"
