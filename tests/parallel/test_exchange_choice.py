"""The exchange that `auto` takes, and what its reason says."""

from __future__ import annotations

import pytest

from tests.config.effects import resolve
from vembed.config.resolved import Decision
from vembed.parallel import estimate
from vembed.parallel.environment import RankInfo
from vembed.parallel.estimate import GIB
from vembed.parallel.exchange_choice import Exchange, choose_exchange

FOUR = RankInfo(0, 4, 0, 4, launched=True)


def chosen(rows: int, **options: object) -> Decision[Exchange]:
    return choose_exchange(resolve({"data_path": "unused", **options}), FOUR, GIB, rows)


def test_auto_takes_the_ring_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "hidden_size", lambda _: 1024)
    small, large = chosen(16), chosen(65_536)
    assert (small.value, large.value) == ("gather", "ring")
    assert (
        "262,144 rows of 1,024 numbers" in large.reason
        and "more than 10% of its 1.0GB" in large.reason
    )


def test_a_loss_of_the_whole_batch_says_what_gathering_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimate, "hidden_size", lambda _: 1024)
    found = chosen(65_536, loss="cosent")
    assert found.value == "gather"
    assert found.reason.startswith(
        "auto: loss: cosent needs the embeddings of the whole batch at once, "
    )
    assert found.reason.endswith(
        "GB for 262,144 rows of 1,024 numbers, with their gradients"
    )
    assert chosen(16, loss="cosent").reason.endswith(
        "needs the embeddings of the whole batch at once"
    )
