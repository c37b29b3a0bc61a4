"""Links, paths and names in the documentation lead somewhere."""

import re
import tomllib

import pytest
import yaml

from tests.docs.cli_page import cli_page
from tests.docs.pages import PAGES, ROOT, anchors, links, spans, text_of
from vembed.cli.commands.config import options_page
from vembed.config.options import OPTION_BLOCKS, target_of
from vembed.config.schema import EpochMining
from vembed.data.records import COLUMNS
from vembed.losses.table import LOSS_ENTRY_ONLY
from vembed.mining.options import AuditConfig, GenerateConfig, MineConfig
from vembed.models.families.table import FAMILIES
from vembed.training.trackers.table import TRACKERS

OTHER_KEYS = {
    "compute_device",
    "num_processes",
    "kind",
    "restartPolicy",
    *OPTION_BLOCKS,
    *LOSS_ENTRY_ONLY,
}
"""Keys in spans such as `compute_device: gpu` that are no options of a training."""
for kind in (MineConfig, AuditConfig, GenerateConfig, EpochMining):
    OTHER_KEYS.update(kind.model_fields)
PROJECT = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FSDP_NAMES = ("fsdp_config", "fsdp_empty_cache", "fsdp_print_memory_usage")


@pytest.fixture(params=PAGES, ids=lambda page: page.stem)
def page(request):
    return request.param


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


def test_paths_of_the_checkout_exist(page):
    for span in spans(page):
        for path in PATHS.findall(span):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_names_of_options_exist(page):
    for span in spans(page):
        match = re.fullmatch(r"([a-z][a-z_0-9]+): [^:{]*", span)
        if match:
            key = match[1]
            assert target_of(key) or key in OTHER_KEYS, f"{page.name}: {span}"
        for name in re.findall(r"\bfsdp_\w+", span):
            known = target_of(name) or name in FSDP_NAMES
            assert known, f"{page.name}: {span}"


def test_plain_text_without_places_of_a_machine(page):
    text = text_of(page)
    assert text.isascii(), [letter for letter in text if not letter.isascii()][:5]
    assert not re.search(r"/(home|root|work|tmp|Users)/", text)


def test_every_page_is_in_the_navigation():
    navigation = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in navigation, page.name


def test_generated_pages_are_current():
    """CONTRIBUTING.md has the commands that write them."""
    for name, page in (("options", options_page()), ("cli", cli_page())):
        assert text_of(ROOT / "docs" / f"{name}.md") == page, name


def test_the_table_of_columns_has_every_name():
    spans_of_page = set(spans(ROOT / "docs" / "data.md"))
    for names in COLUMNS.values():
        assert set(names) <= spans_of_page, sorted(set(names) - spans_of_page)


def test_the_table_of_families_has_every_name():
    page = text_of(ROOT / "docs" / "models.md")
    table = page.partition("## Families")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` ", table, re.MULTILINE) == list(FAMILIES)


def test_the_page_of_the_installation_has_every_extra():
    page = text_of(ROOT / "docs" / "index.md")
    named = set(re.findall(r'"\.\[(\w+)\]"', page))
    assert named == set(EXTRAS) - {"docs"}


INSTALLS = re.compile(r"pip install [^`\n]*?((?:-e )?\"[^\"]*\[([\w,]+)\]\")")
NAMED_EXTRAS = re.compile(r"vembed\[([\w,]+)\]")


def test_installing_is_said_in_one_way():
    """From a checkout on every page, from a wheel in one place; and extras that pages and messages name exist."""
    forms = set()
    extras = set()
    for page in PAGES:
        text = text_of(page)
        for form, names in INSTALLS.findall(text):
            forms.add(form.replace(names, "EXTRA"))
            extras |= {*names.split(",")}
        for names in NAMED_EXTRAS.findall(text):
            extras |= {*names.split(",")}
    assert forms == {'-e ".[EXTRA]"', '"vembed-0.1.0-py3-none-any.whl[EXTRA]"'}
    packages = set()
    for extra in sorted(set(EXTRAS) - {"dev", "docs"}):
        packages.update(name.partition(">")[0] for name in EXTRAS[extra])
    for path in (ROOT / "vembed").rglob("*.py"):
        text = text_of(path)
        for names in NAMED_EXTRAS.findall(text):
            extras |= {*names.split(",")}
        for words in re.findall(r"pip install ([\w .-]+)", text):
            assert packages.isdisjoint(words.split()), (path, words)
    assert {"demo", "mine", "fsdp"} <= extras <= set(EXTRAS)
    # Messages name the extra of a tracker by the tracker's name.
    named = {tracker.name for tracker in TRACKERS.values() if tracker.package}
    assert named - {"tensorboard"} <= set(EXTRAS)
