"""StaticModel: one vector for each token and no layers, as a model of Transformers; a text is the mean of its tokens.

Its folder is one of Sentence Transformers' StaticEmbedding (`embedding.weight` and tokenizer.json) with a config.json.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

STATIC_TYPE = "vembed_static"


class StaticConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes of a table of token vectors."""

    model_type = STATIC_TYPE

    def __init__(
        self, vocab_size: int = 1, hidden_size: int = 1, **others: Any
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        super().__init__(**others)


class StaticModel(PreTrainedModel):  # type: ignore[misc]
    """A table of token vectors."""

    config_class = StaticConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules: list[str] = []  # noqa: RUF012 - Transformers reads it from the class
    _supports_sdpa = True  # no attention: every implementation will do
    _supports_flash_attn = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the table."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table."""
        self.embedding = value  # type: ignore[assignment]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> BaseModelOutput:
        """Return the vectors of the tokens; the mask belongs to the pooling."""
        del attention_mask
        return BaseModelOutput(last_hidden_state=self.embedding(input_ids))
