"""The files that start vembed elsewhere: they parse, and the words they give to `vembed train` are understood."""

import ast
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import yaml

from tests.commands import train_arguments as parsed
from tests.docs.pages import ROOT

LAUNCH = ROOT / "examples" / "launch"


def train_arguments(text):
    """Return the arguments of the line that starts `vembed train`, with a number for each variable."""
    line = next(line for line in text.splitlines() if "vembed train" in line)
    words = [
        re.sub(r"\$\{?\w+\}?", "2", word)
        for word in shlex.split(line.partition("vembed train")[2])
    ]
    return parsed([word for word in words if word != "$@"])


def test_skypilot():
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) <= {
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "envs",
        "file_mounts",
        "setup",
        "run",
    }
    assert (ROOT / task["envs"]["CONFIG"]).is_file()
    arguments = train_arguments(task["run"])
    assert (
        "resume=auto" in arguments.overrides and "num_machines=2" in arguments.overrides
    )
    subprocess.run(
        ["bash", "-n"], input=task["run"] + task["setup"], text=True, check=True
    )


def test_hugging_face_jobs():
    script = LAUNCH / "hf_jobs.sh"
    words = ["me/data", "cfg.yaml", "me/model", "epochs=2"]
    environment = os.environ | {"DRY_RUN": "1", "IMAGE": "me/vembed"}
    done = subprocess.run(
        ["bash", str(script), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        "hf jobs run --flavor a100-large --timeout 6h --secrets HF_TOKEN me/vembed bash -c"
        in done.stdout
    )
    assert done.stdout.split()[-4:] == words
    arguments = train_arguments(script.read_text())
    assert "output_dir=run" in arguments.overrides
    assert "--private" in script.read_text() and not re.search(
        r"hf_\w{10}", script.read_text()
    )


def test_modal():
    tree = ast.parse((LAUNCH / "modal_app.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert functions == {"train", "main"}
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.List)]
    words = [
        [each.value for each in node.elts if isinstance(each, ast.Constant)]
        for node in lists
    ]
    (command,) = [argv for argv in words if argv[:2] == ["vembed", "train"]]
    assert parsed(["cfg.yaml", *command[2:]]).overrides


def test_dockerfile_and_dev_container():
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    kinds = [
        line.split()[0] for line in text.splitlines() if line and line[0] not in "# "
    ]
    assert set(kinds) <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()[:-1]), line
    for run in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        subprocess.run(["bash", "-n"], input=run, text=True, check=True)
    assert "cuda)" in text and "cpu)" in text
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (
        ROOT / ".devcontainer" / container["build"]["dockerfile"]
    ).resolve() == ROOT / "Dockerfile"
    assert container["build"]["args"] == {"DEVICE": "cpu"}
    assert Path(ROOT / "constraints.txt").is_file()
