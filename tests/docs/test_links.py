"""Links, paths and names in the documentation lead somewhere."""

import re
import tomllib

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, anchors, links, spans, text_of
from vembed.cli.commands.config import options_page
from vembed.config.options import BLOCKS, target_of
from vembed.config.schema import EpochMining
from vembed.data.records import COLUMNS
from vembed.losses.table import LOSS_ENTRY_ONLY
from vembed.mining.options import AuditConfig, GenerateConfig, MineConfig
from vembed.training.trackers.table import TRACKERS

OTHER_KEYS = {
    "compute_device",
    "num_processes",
    "kind",
    "restartPolicy",
    *BLOCKS,
    *LOSS_ENTRY_ONLY,
}
"""Keys in spans such as `compute_device: gpu` that are no options of a training."""
for kind in (MineConfig, AuditConfig, GenerateConfig, EpochMining):
    OTHER_KEYS.update(kind.model_fields)
FSDP_NAMES = ("fsdp_config", "fsdp_empty_cache", "fsdp_print_memory_usage")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.promise("A25", "D46", "E39")
def test_links_resolve(page):
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        target, _, part = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {link}"
        # The site is built from docs/ alone.
        if page.is_relative_to(ROOT / "docs"):
            assert path.is_relative_to(ROOT / "docs"), f"{page.name}: {link}"
        if part:
            assert part in anchors(path), (
                f"{page.name}: {link} (there is {sorted(anchors(path))})"
            )


PATHS = re.compile(
    r"(?<![\w/.])(?:examples|configs|docs|tests|benchmarks|vembed)/[\w./-]*\w"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_of_the_checkout_exist(page):
    for span in spans(page):
        for path in PATHS.findall(span):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_options_exist(page):
    for span in spans(page):
        match = re.fullmatch(r"([a-z][a-z_0-9]+): [^:{]*", span)
        if match:
            key = match[1]
            assert target_of(key) or key in OTHER_KEYS, f"{page.name}: {span}"
        for name in re.findall(r"\bfsdp_\w+", span):
            known = target_of(name) or name in FSDP_NAMES
            assert known, f"{page.name}: {span}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_plain_text_without_places_of_a_machine(page):
    text = text_of(page)
    assert text.isascii(), [letter for letter in text if not letter.isascii()][:5]
    assert not re.search(r"/(home|root|work|tmp|Users)/", text)


def test_every_page_is_in_the_navigation():
    navigation = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in navigation, page.name


def test_options_page_is_that_of_the_schema():
    assert text_of(ROOT / "docs" / "options.md") == options_page()


def test_the_table_of_columns_has_every_name():
    spans_of_page = set(spans(ROOT / "docs" / "data.md"))
    for names in COLUMNS.values():
        assert set(names) <= spans_of_page, sorted(set(names) - spans_of_page)


def test_the_page_of_the_installation_has_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = set(re.findall(r'"\.\[(\w+)\]"', (ROOT / "docs" / "index.md").read_text()))
    assert named == set(extras) - {"docs"}


NAMED_EXTRAS = re.compile(r'(?:vembed|"\.|\.whl)\[([\w,]+)\]')


def test_extras_that_pages_and_messages_name_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set()
    for path in (*PAGES, *(ROOT / "vembed").rglob("*.py")):
        for names in NAMED_EXTRAS.findall(path.read_text(encoding="utf-8")):
            extras.update(names.split(","))
    assert {"demo", "mine", "fsdp"} <= extras <= set(project["optional-dependencies"])


INSTALLS = re.compile(r"pip install [^`\n]*?((?:-e )?\"[^\"]*\[([\w,]+)\]\")")
NAMED_EXTRAS = re.compile(r"vembed\[([\w,]+)\]")


def test_installing_is_said_in_one_way():
    """From a checkout on every page, from a wheel in one place; and extras that pages and messages name exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    forms = set()
    extras = set()
    for page in PAGES:
        for form, names in INSTALLS.findall(page.read_text(encoding="utf-8")):
            forms.add(form.replace(names, "EXTRA"))
            extras |= {*names.split(",")}
    assert forms == {'-e ".[EXTRA]"', '"vembed-0.1.0-py3-none-any.whl[EXTRA]"'}
    optional = project["optional-dependencies"]
    packages = set()
    for extra in sorted(set(optional) - {"dev", "docs"}):
        packages.update(name.partition(">")[0] for name in optional[extra])
    for path in (ROOT / "vembed").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for names in NAMED_EXTRAS.findall(text):
            extras |= {*names.split(",")}
        for words in re.findall(r"pip install ([\w .-]+)", text):
            assert packages.isdisjoint(words.split()), (path, words)
    assert {"demo", "mine", "fsdp"} <= extras <= set(optional)
    # Messages name the extra of a tracker by the tracker's name.
    named = {tracker.name for tracker in TRACKERS.values() if tracker.package}
    assert named - {"tensorboard"} <= set(optional)
