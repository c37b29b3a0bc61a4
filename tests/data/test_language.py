"""The language of texts, and the language on a model card."""

import pytest

from vembed.data.language import is_english, language_of


@pytest.mark.parametrize(
    "text, language",
    [
        ("how do you sort the list of numbers in this file", "en"),
        ("wie kann ich die Liste mit den Zahlen sortieren", "de"),
        ("comment est la liste des nombres dans le fichier", "fr"),
        ("\u3053\u308c\u306f\u672c\u3067\u3059", "ja"),
        ("xyz abc", None),
        ("", None),
        ("\u043f\u0440\u0438\u0432\u0435\u0442", None),
    ],
)
def test_languages(text, language):
    assert language_of([text]) == language
    unknown = text in ("", "xyz abc")
    assert is_english([text]) == (language == "en" or unknown)
