"""Checkpoints whose checksums are right and whose contents are not: one sentence, then the checkpoint before it."""

import json
import os
import shutil

import pytest

from tests.training.test_checkpoint import FILE, found_in, starting
from vembed.errors import UserError
from vembed.training.checkpoint import folder as integrity


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with starting(folder) as run:
        run.resume().train().save().train().save()
    return folder


@pytest.fixture
def run_folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def sealed(folder):
    """Write the manifest anew, as a program does that knows the format."""
    (folder / integrity.MANIFEST).unlink()
    integrity.write_manifest(folder, {})


def state(*path, **changes):
    """An alteration of state.json: values below a path set, or taken out where None is given as a type."""

    def alter(folder):
        values = inner = json.loads((folder / "state.json").read_text())
        for key in path:
            inner = inner[key]
        for key, value in changes.items():
            if value is GONE:
                del inner[key]
            else:
                inner[key] = value
        (folder / "state.json").write_text(json.dumps(values))

    return alter


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


GONE = object()
ALTERED = {
    "a negative step": (state("loop", step=-1), "loop.step"),
    "another step": (
        state("loop", step=7),
        "loop.step is 7, and the folder is that of step 2",
    ),
    "an unknown key": (state("loop", more=1), "loop.more"),
    "a best step to come": (state("loop", best_step=3), "loop.best_step is 3, later"),
    "scores that are texts": (state("loop", scores={"ndcg@10": "high"}), "loop.scores"),
    "a scale of zero": (state("loop", "scale", value=0.0), "loop.scale.value"),
    "an unknown option": (state("config", learning_speed=1), "learning_speed"),
    "no identity": (state(identity=GONE), "identity"),
    "a batch of zero": (
        state("identity", global_batch_size=0),
        "identity.global_batch_size",
    ),
    "a state that is no JSON": (text("state.json", "{"), "state.json"),
    "no state": (
        lambda folder: (folder / "state.json").unlink(),
        "state.json is missing",
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_altered_contents_are_one_sentence_and_then_the_checkpoint_before(
    run_folder, caplog, name
):
    alter, says = ALTERED[name]
    alter(run_folder / "checkpoint-2")
    sealed(run_folder / "checkpoint-2")
    assert found_in(run_folder) == run_folder / "checkpoint-1"
    (line,) = [one for one in caplog.messages if one.startswith("skipped")]
    assert "checkpoint-2" in line and says in line and "\n" not in line


@pytest.mark.parametrize("name", ["state.json", FILE, integrity.MANIFEST])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_pipes_and_links_are_not_opened(run_folder, name, kind):
    path = run_folder / "checkpoint-2" / name
    path.rename(run_folder / "outside")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(run_folder / "outside")
    assert found_in(run_folder) == run_folder / "checkpoint-1"


def test_names_in_the_manifest_stay_inside(run_folder):
    folder = run_folder / "checkpoint-2"
    for name in ("../checkpoint-1/state.json", "/etc/hostname"):
        content = json.loads((folder / integrity.MANIFEST).read_text())
        del content["sha256"]
        content["files"][name] = {"bytes": 1, "sha256": "0"}
        sealed_content = {**content, "sha256": integrity._seal(content)}
        (folder / integrity.MANIFEST).write_text(json.dumps(sealed_content))
        assert f"{name} leads out of the folder" in integrity.verify_files(folder)


def test_a_run_resumes_from_the_one_before_and_refuses_a_path_to_the_altered_one(
    run_folder,
):
    state("loop", step=10**18)(run_folder / "checkpoint-2")
    sealed(run_folder / "checkpoint-2")
    with (
        starting(run_folder, resume=str(run_folder / "checkpoint-2")) as run,
        pytest.raises(
            UserError, match=r"none of the 1 checkpoint\(s\) is intact .*loop\.step"
        ),
    ):
        run.resume()
    with starting(run_folder, resume=True) as run:
        assert run.resume().state["step"] == 1
