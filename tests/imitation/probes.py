"""Small functions on the imitation device, which show that it sees what it should."""

from __future__ import annotations

from collections.abc import Callable

import torch


def reads_a_number() -> None:
    torch.ones(3, device="cuda").sum().item()


def indexes_by_a_mask() -> None:
    values = torch.arange(3.0, device="cuda")
    values[values > 1]


def finds_distinct_values() -> None:
    torch.arange(3, device="cuda").unique()


def copies_pageable_memory() -> None:
    torch.ones(3).to("cuda", non_blocking=True)


def copies_with_blocking() -> None:
    torch.ones(3).pin_memory().to("cuda")


def copies_pinned_memory() -> None:
    torch.ones(3).pin_memory()[1:].to("cuda", non_blocking=True)


def multiplies() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3, device="cuda"))
    (torch.ones(2, 3, device="cuda") @ weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == torch.device("cuda", 0)


def uses_autocast() -> None:
    layer = torch.nn.Linear(3, 3).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(torch.ones(2, 3, device="cuda")).dtype is torch.bfloat16


def mixes_devices() -> None:
    torch.ones(3, device="cuda") + torch.ones(3)


def keeps_tied_weights() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    layers[1].weight = layers[0].weight
    layers.to("cuda")
    assert layers[1].weight is layers[0].weight


PROBES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        reads_a_number,
        indexes_by_a_mask,
        finds_distinct_values,
        copies_pageable_memory,
        copies_with_blocking,
        copies_pinned_memory,
        multiplies,
        uses_autocast,
        mixes_devices,
        keeps_tied_weights,
    )
}
