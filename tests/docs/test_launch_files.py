"""The files that start vembed elsewhere: they parse, and the words they give to `vembed train` are understood."""

import ast
import os
import re
import shlex
import subprocess

import yaml

from tests.commands import train_arguments as parsed
from tests.docs.pages import ROOT
from tests.tiny import read_json

LAUNCH = ROOT / "examples" / "launch"


def train_arguments(text):
    """Return the arguments of the line that starts `vembed train`, with a number for each variable."""
    line = next(line for line in text.splitlines() if "vembed train" in line)
    words = [
        re.sub(r"\$\{?\w+\}?", "2", word)
        for word in shlex.split(line.partition("vembed train")[2])
    ]
    return parsed([word for word in words if word != "$@"])


def check_shell(text):
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_skypilot():
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert (ROOT / task["envs"]["CONFIG"]).is_file()
    arguments = train_arguments(task["run"])
    assert {"resume=auto", "num_machines=2"} <= {*arguments.overrides}
    check_shell(task["run"] + task["setup"])


def test_hugging_face_jobs():
    script = LAUNCH / "hf_jobs.sh"
    words = ["me/data", "cfg.yaml", "me/model", "epochs=2"]
    environment = os.environ | {"DRY_RUN": "1", "IMAGE": "me/vembed"}
    output = subprocess.check_output(
        ["bash", script, *words], env=environment, text=True
    )
    assert output.startswith("hf jobs run ") and "me/vembed bash -c" in output
    assert output.split()[-4:] == words
    text = script.read_text()
    assert "output_dir=run" in train_arguments(text).overrides
    assert "--private" in text and not re.search(r"hf_\w{10}", text)


def test_modal():
    tree = ast.parse((LAUNCH / "modal_app.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.List):
            words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            if words[:2] == ["vembed", "train"]:
                break
    assert parsed(["cfg.yaml", *words[2:]]).overrides


def test_dockerfile_and_dev_container():
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()[:-1]), line
    for run in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        check_shell(run)
    assert "cuda)" in text and "cpu)" in text
    container = ROOT / ".devcontainer" / "devcontainer.json"
    build = read_json(container)["build"]
    assert (container.parent / build["dockerfile"]).samefile(ROOT / "Dockerfile")
    assert build["args"] == {"DEVICE": "cpu"}
