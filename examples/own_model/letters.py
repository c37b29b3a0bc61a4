"""The synthetic test of the Free Transformer's paper, small: does Z come to hold what a sequence is about?

    python examples/own_model/letters.py

A sequence is a letter, then 16 places of which four in a row hold the letter, at a random start; one place in 16 is
noise. The decoder cannot know the start before it comes; Z can tell it. Prints the loss with a sequence's own Z and
with another's.
"""

from __future__ import annotations

import math

import torch
from free_transformer.model import FreeTransformer, ModelConfig, kl_to_uniform
from torch import Tensor

PLACES = 16
RUN = 4
LETTERS = 8
BATCH = 32
STEPS = 1000
RATE = 3e-3
FREE_BITS = math.log(2) / 8
"""Less in all than the start and the noise of a sequence need, so that the KL rises above it."""
KL_WEIGHT = 0.3
"""With a weight of 1, what Z tells costs beyond the free bits as much as it saves."""


def sequences(draw: torch.Generator) -> Tensor:
    """Return [BATCH, 1 + PLACES]: 0 is an empty place, 1 noise, the rest letters."""
    letter = torch.randint(2, 2 + LETTERS, (BATCH, 1), generator=draw)
    start = torch.randint(0, PLACES - RUN + 1, (BATCH, 1), generator=draw)
    place = torch.arange(PLACES)[None]
    row = torch.where((place >= start) & (place < start + RUN), letter, 0)
    row = torch.where(torch.rand(BATCH, PLACES, generator=draw) < 1 / 16, 1, row)
    return torch.cat([letter, row], dim=1)


def main() -> None:
    """Train, and compare."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = FreeTransformer(
        ModelConfig(12, 32, 2, 2, latent_dim=64, free_bits=FREE_BITS)
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = (
                RATE * min(1.0, (step + 1) / (0.05 * STEPS)) * (1 - step / STEPS)
            )
        ids = sequences(draw)
        mask = torch.ones_like(ids)
        hidden, z_logits = model.decode(ids, mask)
        losses = {
            name: sums.sum() / counts.sum()
            for name, (sums, counts) in model.losses(
                hidden, z_logits, ids, mask
            ).items()
        }
        (losses["next_token"] + KL_WEIGHT * losses["kl"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0 and z_logits is not None:
            with torch.no_grad():
                latent = model.mapper(z_logits)
                ours, theirs = (
                    _next_token(model, ids, mask, vectors)
                    for vectors in (latent, latent.roll(1, dims=0))
                )
            kl = float(kl_to_uniform(z_logits).detach().mean()) / math.log(2)
            print(
                f"step {step + 1}: KL {kl:.2f} bits per token; loss {ours:.3f} with its own Z, {theirs:.3f} with another"
            )


def _next_token(
    model: FreeTransformer, ids: Tensor, mask: Tensor, latent: Tensor
) -> float:
    sums, counts = model.losses(model.decode(ids, mask, latent)[0], None, ids, mask)[
        "next_token"
    ]
    return float(sums.sum() / counts.sum())


if __name__ == "__main__":
    main()
