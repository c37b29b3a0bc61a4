"""`push_to_hub` and `vembed push`: model, card, data and report in a private repository; nothing is sent twice."""

import json
import shutil

import numpy as np
import pytest

import vembed
from tests.commands import invoke
from tests.publish.hub_server import TOKEN, running_hub
from tests.training.test_run import settings

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # inside huggingface_hub


def push(*words, code=0):
    return invoke("push", *words, code=code)


def refused(folder, name, part, code=2):
    assert part in push(folder, name, code=code).stderr


def use(hub, patch):
    patch.setenv("HF_TOKEN", TOKEN)
    patch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as opened:
        use(opened, monkeypatch)
        yield opened


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with push_to_hub, and the Hub after it."""
    options = settings(
        tmp_path_factory.mktemp("push"),
        max_steps=2,
        save_steps=1,
        push_to_hub="me/found",
    )
    with pytest.MonkeyPatch.context() as patch, running_hub() as opened:
        use(opened, patch)
        yield vembed.train(options).output_dir, opened


def test_a_run_pushes_its_end(trained, tmp_path):
    folder, hub = trained
    repository = hub.repositories["me/found"]
    assert repository.is_private
    assert repository.commits == ["Trained by vembed"]
    names = {"README.md", "report.html", "report.md"}
    assert names | {"modules.json"} <= set(repository.files)
    for name, data in repository.files.items():
        target = tmp_path / "loaded" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    words = ["red", "a green bird"]
    vectors = vembed.Embedder(tmp_path / "loaded").encode(words)
    expected = vembed.Embedder(folder / "final").encode(words)
    np.testing.assert_array_equal(vectors, expected)


def test_neither_the_token_nor_folders_of_the_machine_are_published(trained):
    folder, hub = trained
    assert hub.tokens == {TOKEN}
    for path in [*folder.rglob("*"), *folder.parent.glob("*")]:
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    files = hub.repositories["me/found"].files
    for name, data in files.items():
        assert TOKEN.encode() not in data, name
        assert str(folder.parent).encode() not in data, name
    assert b"train.jsonl" in files["README.md"]


def test_a_push_that_was_cut_goes_on(trained, hub):
    hub.broken_commit = 1
    refused(trained[0], "me/again", "the same command goes on", code=1)
    repository = hub.repositories["me/again"]
    assert repository.files == {}
    before = hub.num_uploads
    for _ in range(2):
        done = push(trained[0], "me/again", "--json")
        assert hub.num_uploads == before, "the weights were there"
    result = json.loads(done.stdout)
    assert result["is_private"] and result["url"].endswith("/me/again")
    assert repository.files.keys() == result["files"].keys()
    assert len(repository.commits) == 1, "nothing was sent again"


def test_a_dry_run_needs_no_token_and_sends_nothing(trained, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    done = push(trained[0], "me/dry", "--dry-run", "--no-report")
    for part in ("would push", "(private)", "README.md"):
        assert part in done.output
    assert "report.html" not in done.output
    assert hub.repositories == {}
    refused(trained[0], "me/dry", "hf auth login")


def test_what_is_refused(trained, hub, tmp_path, monkeypatch):
    folder, _ = trained
    push(folder, "me/open", "--public")
    refused(folder, "me/open", "is public")
    refused(tmp_path, "me/none", "no model: give")
    refused(folder, "no name", "give user/name")
    leaking = shutil.copytree(folder, tmp_path / "leaking")
    (leaking / "final" / "README.md").write_text(TOKEN)
    refused(leaking, "me/leak", "README.md")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(folder, "me/other", "401")
