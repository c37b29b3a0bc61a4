"""docs/extending.md: its files and entries in a copy of the package train, pass the contract tests, and are missed."""

import re
import shutil
from runpy import run_path

import pytest
import yaml

from tests import tiny
from tests.commands import CODE, command
from tests.data.files import pair
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


RUN_MODULE = """
import runpy, sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("vembed", "tests"):
        del sys.modules[name]
_, copy, module, *words = sys.argv
sys.path.insert(0, copy)
sys.argv[:] = [module, *words]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Forgets this repository's modules, which the process has imported, and runs a module with those of the copy."""
PYTEST_OPTIONS = (
    *("-p", "no:cacheprovider"),
    # The process has imported pytest's plugins already.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


def run(copy, module, *words, folder=None, code=0):
    """Output of `python -m MODULE WORDS` that imports the copy, and ends with this exit code."""
    done = command(
        RUN_MODULE,
        str(copy),
        module,
        *words,
        module=CODE,
        folder=folder or copy,
        env={"PYTHONPATH": str(copy)},
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output[-3000:]
    return output


@pytest.fixture(scope="module")
def workplace(copy, tmp_path_factory):
    """A folder with the config, the models and the data of the page's commands."""
    folder = tmp_path_factory.mktemp("work")
    records = [pair(text, f"found {text}", neg_1="none") for text in tiny.texts(16)]
    format_test = run_path(str(copy / "tests/data/test_ltsv.py"))
    format_test["write"](folder / "train.ltsv", records)
    family_test = run_path(str(copy / "tests/models/test_electra.py"))
    family_test["tiny_model"](folder / "electra")
    config = {
        "model_name": str(tiny.shared(tiny.tiny_bert)),
        "data_path": "train.ltsv",
        "batch_size": 8,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
    }
    (folder / "cfg.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_the_parts_train_together(copy, workplace):
    """In one run, with the pooling that is trained. The contract tests save and load the other one."""
    trainings = [line.split() for line in COMMANDS if line.startswith("vembed train")]
    assert len(trainings) == 6
    options = [word for words in trainings for word in words[3:]]
    options.remove("pooling=max_mean")
    output_dir = workplace / "run"
    words = ("train", "cfg.yaml", *options, f"output_dir={output_dir}")
    run(copy, "vembed", *words, folder=workplace)
    losses = metrics(output_dir)
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    description = tiny.read_json(output_dir / "final" / "vembed.json")
    assert description["pooling"] == "attention"
    assert description["family"] == "electra"
    assert (output_dir / "metrics.txt").exists()


def test_the_parts_pass_the_contract_tests(copy):
    # "table" and "record" would select all tests of test_table.py.
    expected = ["in_the_table", "one_record"]
    files = []
    for line in COMMANDS:
        match = re.fullmatch(r'pytest (\S+) -k "(.+?)( or table| or record)?"', line)
        if match:
            files.append(match[1])
            expected.append(match[2])
    assert files == list(CONTRACTS.values())
    selection = " or ".join(expected)
    words = ("-x", "-rp", *files, "-k", selection)
    output = run(copy, "pytest", *PYTEST_OPTIONS, *words)
    passed = [line for line in output.splitlines() if line.startswith("PASSED ")]
    for word in selection.split(" or "):
        assert any(word in line for line in passed), f"no test of {word} ran"


def test_the_page_of_options_has_the_parts(copy):
    output = run(copy, "vembed", "schema", "--format", "markdown")
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
    words = (*CONTRACTS.values(), "-k", "has_a or in_the_table or one_record")
    output = run(copy, "pytest", *PYTEST_OPTIONS, *words, code=1)
    for path, text in complete.items():
        (copy / path).write_text(text)
    for message in FORGOTTEN.values():
        assert message in output, output[-3000:]
