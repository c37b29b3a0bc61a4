"""Chat text: rendering of prompts, images and texts with a model's chat template."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from vembed.models.processors import ChatTemplate

_MARK = "vembed0text0stands0here"
"""Placeholder for the text while a template is rendered; not a special token of any model."""
_PROBE = "  two lines,\n with <b> & spaces "


class ChatText:
    """Renderer of a prompt (system message), images and a text with a model's chat template.

    A template is rendered once per prompt and number of images, and texts are inserted: rendering costs as much as
    tokenising a short text. A template that modifies its texts is rendered for each text.
    """

    def __init__(self, chat: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._frames: dict[tuple[str, int], tuple[str, str] | None] = {}

    def render(self, prompt: str, text: str | None, num_images: int = 0) -> str:
        """Return the text of a conversation: the prompt as system message if any, then the images, then the text."""
        if text is None:
            return self._render(prompt, None, num_images)
        frame = self._frame(prompt, num_images)
        return (
            self._render(prompt, text, num_images)
            if frame is None
            else frame[0] + text + frame[1]
        )

    def _frame(self, prompt: str, num_images: int) -> tuple[str, str] | None:
        """Return the parts before and after the text; None if the template modifies the text."""
        key = (prompt, num_images)
        if key not in self._frames:
            before, _, after = self._render(prompt, _MARK, num_images).partition(_MARK)
            plain = self._render(prompt, _PROBE, num_images) == before + _PROBE + after
            self._frames[key] = (before, after) if plain else None
        return self._frames[key]

    def _render(self, prompt: str, text: str | None, num_images: int) -> str:
        content: list[dict[str, str]] = [
            {"type": "image", "image": ""} for _ in range(num_images)
        ]
        if text is not None:
            content.append({"type": "text", "text": text})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if prompt:
            messages.insert(
                0, {"role": "system", "content": [{"type": "text", "text": prompt}]}
            )
        rendered = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._chat.template,
            tokenize=False,
            **self._chat.options,
        )
        assert isinstance(rendered, str)
        return rendered
