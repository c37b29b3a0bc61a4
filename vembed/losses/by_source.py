"""One loss for each source of the data, for runs with several tasks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vembed.losses.batch import EmbeddingLoss, LossBatch


class LossBySource(EmbeddingLoss):
    """The loss of the source that a batch comes from. All ranks are in the same source at the same step."""

    def __init__(self, sources: Sequence[EmbeddingLoss]) -> None:
        """`sources`: the loss of each source; sources of one task have the same one."""
        super().__init__()
        self.sources = nn.ModuleList(dict.fromkeys(sources))
        self._sources = tuple(sources)

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        return self._sources[batch.source].forward(batch)

    def project_parameters(self) -> None:
        """See EmbeddingLoss."""
        for loss in dict.fromkeys(self._sources):
            loss.project_parameters()

    def term_shares(self, source: int) -> dict[str, Tensor]:
        """See EmbeddingLoss."""
        return self._sources[source].term_shares(source)

    def scale_and_bias(self) -> tuple[float, float] | None:
        """Return those of the first source that has learned ones."""
        return next(
            (
                found
                for loss in self._sources
                if (found := loss.scale_and_bias()) is not None
            ),
            None,
        )
