"""docs/cli.md says what the commands say."""

from tests.docs.cli_page import cli_page
from tests.docs.pages import ROOT


def test_the_page_of_commands_is_current():
    """`python -m tests.docs.cli_page > docs/cli.md` writes it."""
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == cli_page()
