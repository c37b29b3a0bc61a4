"""docs/extending.md: its files and entries in a copy of the package train, pass the contract tests, and are missed."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests import tiny
from tests.data.files import pair, write_jsonl
from tests.docs.pages import ROOT, blocks
from tests.training.test_run import metrics

PAGE = ROOT / "docs" / "extending.md"
BLOCKS = [block for block in blocks("python", "diff", "console") if block.page == PAGE]
FILES = {}
ENTRIES = {}
COMMANDS = []
for block in BLOCKS:
    head, _, text = block.text.partition("\n")
    if block.language == "python":
        FILES[head.removeprefix("# ")] = text
    elif block.language == "diff":
        ENTRIES[head.removeprefix("--- ")] = text
    else:
        COMMANDS += block.text.splitlines()

CONTRACTS = {
    "losses": "tests/losses/test_contract.py",
    "poolings": "tests/models/test_pooling.py",
    "families": "tests/models/test_table.py",
    "formats": "tests/data/test_formats.py",
    "trackers": "tests/training/test_declared.py",
}


def with_entries(text, patch):
    """A file with the lines of a patch. Each `+` line stands after or before a line of the file."""
    lines = text.splitlines()
    place = 0
    waiting = []
    for line in patch.splitlines():
        if line.startswith("+"):
            waiting.append(line[1:])
            continue
        actual = lines.index(line[1:], place)
        # Lines in front of the first known line stand before it, others after the last.
        start = actual if place == 0 else place
        lines[start:start] = waiting
        place = actual + len(waiting) + 1
        waiting = []
    lines[place:place] = waiting
    return "\n".join(lines) + "\n"


def write_parts(folder, *, left_out=""):
    for path, text in FILES.items():
        if path != left_out:
            (folder / path).write_text(text)
    for path, patch in ENTRIES.items():
        if path != left_out:
            text = (ROOT / path).read_text()
            (folder / path).write_text(with_entries(text, patch))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extended")
    unwanted = shutil.ignore_patterns("__pycache__", "images")
    for name in ("vembed", "tests", "docs"):
        ignore = None if name == "vembed" else unwanted
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    write_parts(folder)
    return folder


def run(copy, *arguments, cwd=None, code=0):
    """Output of a Python command that imports the copy, and ends with this exit code."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output[-3000:]
    return output


@pytest.fixture(scope="module")
def workplace(copy, tmp_path_factory):
    """A folder with the config, the models and the data of the page's commands."""
    folder = tmp_path_factory.mktemp("work")
    records = [pair(text, f"found {text}", neg_1="none") for text in tiny.texts(16)]
    write_jsonl(folder / "train.jsonl", records)
    make = (
        "import sys; from pathlib import Path\n"
        "from tests.data.test_ltsv import write\n"
        "from tests.models.test_electra import tiny_model\n"
        "tiny_model(Path('electra'))\n"
        f"write(Path('train.ltsv'), {records!r})\n"
    )
    run(copy, "-c", make, cwd=folder)
    config = {
        "model_name": str(tiny.shared(tiny.tiny_bert)),
        "data_path": "train.jsonl",
        "batch_size": 8,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
    }
    (folder / "cfg.yaml").write_text(yaml.safe_dump(config))
    return folder


def options_of_page():
    trainings = [line.split() for line in COMMANDS if line.startswith("vembed train")]
    return [words[3:] for words in trainings]


@pytest.mark.parametrize("numbers", [(0, 1, 4, 5), (2, 3)], ids=str)
def test_the_parts_train_together(copy, workplace, numbers):
    """Loss, pooling and format in one run, a trained pooling and the family in another."""
    options = options_of_page()
    assert len(options) == 6
    arguments = [word for number in numbers for word in options[number]]
    output_dir = workplace / f"run{numbers[0]}"
    words = ("-m", "vembed", "train", "cfg.yaml", *arguments)
    run(copy, *words, f"output_dir={output_dir}", cwd=workplace)
    losses = metrics(output_dir)
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    description = tiny.read_json(output_dir / "final" / "vembed.json")
    assert description["pooling"] == ("max_mean" if 1 in numbers else "attention")
    assert (output_dir / "metrics.txt").exists() == (5 in numbers)
    assert description["family"] == ("electra" if 3 in numbers else "text_encoder")


def test_the_parts_pass_the_contract_tests(copy):
    expected = []
    files = []
    for line in COMMANDS:
        match = re.fullmatch(r'pytest (\S+) -k "(.+)"', line)
        if match:
            files.append(match[1])
            expected.append(match[2])
    assert files == list(CONTRACTS.values())
    words = ("-m", "pytest", "-x", "-p", "no:cacheprovider", *files)
    output = run(copy, *words, "-k", " or ".join(expected))
    assert int(re.findall(r"(\d+) passed", output)[-1]) > 60


def test_the_page_of_options_has_the_parts(copy):
    output = run(copy, "-m", "vembed", "schema", "--format", "markdown")
    for name in (
        "`logistic_temperature`",
        "- `logistic`: each hard negative below the positive",
        "- `max_mean`: ",
        "- `electra`: ",
        "- `text_lines`: ",
    ):
        assert name in output


FORGOTTEN = {
    "tests/losses/test_logistic.py": "logistic has no `reference`",
    "vembed/models/poolings/table.py": "vembed.models.poolings.max_mean.MaxMean",
    "vembed/models/families/table.py": "electra of vembed.models.families.electra",
    "tests/data/test_ltsv.py": "ltsv has no `write`",
    "vembed/training/trackers/table.py": "vembed.training.trackers.text_lines.TextLines",
}
"""A reference or an entry that is left out, for each part -> what the contract test names."""


def test_what_is_forgotten_is_named(copy):
    complete = {path: (copy / path).read_text() for path in FORGOTTEN}
    for path in FORGOTTEN:
        if path.startswith("tests/"):
            (copy / path).unlink()
        else:
            shutil.copy(ROOT / path, copy / path)
    words = ("-m", "pytest", "-p", "no:cacheprovider", *CONTRACTS.values())
    output = run(copy, *words, "-k", "has_a or in_the_table or one_record", code=1)
    for path, text in complete.items():
        (copy / path).write_text(text)
    for message in FORGOTTEN.values():
        assert message in output, output[-3000:]
