"""The Free Transformer: a decoder whose middle layer receives a latent Z, in one file of plain torch.

After F. Fleuret, "The Free Transformer", 2025 (arXiv:2510.17558); written for this project. Numbers in brackets follow
the order of the paper's text:

  (1)  X = first half of the blocks applied to the embedded tokens S
  (2)  encoder: one non-causal block, whose queries are a learned vector zeta and whose keys and values are X,
       then a linear layer to H logits for each token: Q(B_th = 1 | S) = sigmoid(l_th)
  (3)  binary mapper: draw H bits B_t, and read them as the number of one of 2^H classes, a one-hot Y_t;
       the gradient passes through G_td = prod_h Q(B_th = bit h of d), as Z_t = Y_t + G_t - detach(G_t)
  (4)  R = linear(Z); the first block of the second half has queries X and keys and values X + R
  (5)  loss = cross-entropy of the next token + 1/T sum_t max(0, KL(Q(Z_t | S) || uniform) - free bits)

`latent_dim` is the number of classes of Z, a power of two: latent_dim=64 means 64 = 2^6 classes, drawn through H = 6
bits. (Taken for H it would mean 2^64 classes, whose linear layer nobody can store. The paper's own H = 16 is
latent_dim=65536.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Free Transformer."""

    vocab_size: int = 50000
    hidden_dim: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    latent_dim: int = 65536
    """Classes of Z, a power of two."""
    free_bits: float = math.log(2) / 2
    """Information about the text that Z may carry for each token at no cost, in nats."""
    use_latent: bool = True
    """False: the same decoder without Z, the baseline."""

    def __post_init__(self) -> None:
        if (
            self.latent_dim < 2
            or self.latent_dim & (self.latent_dim - 1)
            or self.latent_dim > 2**20
        ):
            raise ValueError(
                f"latent_dim: {self.latent_dim} must be a power of two from 2 to 2^20, the classes of Z"
            )
        if self.num_layers % 2 or self.hidden_dim % (2 * self.num_heads):
            raise ValueError(
                "num_layers must be even, and hidden_dim a multiple of 2 * num_heads"
            )

    @property
    def latent_bits(self) -> int:
        """H: the number of bits that choose a class."""
        return self.latent_dim.bit_length() - 1


class Attention(nn.Module):
    """Multi-head attention with rotary positions. Queries and the rest may come from different tensors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.hidden_dim
        self.num_heads = config.num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, queries: Tensor, others: Tensor, allowed: Tensor) -> Tensor:
        """`allowed` [n, 1, t, t]: True where a query may look."""
        n, length, dim = queries.shape
        q, k, v = (
            layer(states).view(n, length, self.num_heads, -1).transpose(1, 2)
            for layer, states in (
                (self.query, queries),
                (self.key, others),
                (self.value, others),
            )
        )
        attended = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, attn_mask=allowed
        )
        return self.out(attended.transpose(1, 2).reshape(n, length, dim))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, counted from the first token. x: [n, heads, t, width]."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (
        -torch.arange(half, device=x.device, dtype=torch.float32) / half
    )
    angle = (
        torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * speed
    )
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class DecoderBlock(nn.Module):
    """Pre-norm attention and feed-forward. FSDP shards, and recomputation repeats, one such block at a time."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.hidden_dim
        inner = 4 * config.hidden_dim
        self.attention_norm = nn.RMSNorm(dim)
        self.mlp_norm = nn.RMSNorm(dim)
        self.attention = Attention(config)
        self.up = nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(
        self, x: Tensor, allowed: Tensor, others: Tensor | None = None
    ) -> Tensor:
        """`others`: what keys and values are made of, where it is not x: X + R in (4), X in the encoder of (2)."""
        others = x if others is None else others
        x = x + self.attention(
            self.attention_norm(x), self.attention_norm(others), allowed
        )
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class BinaryMapper(nn.Module):
    """Equation (3): H logits for each token to a one-hot of 2^H classes, with a gradient."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_bits = config.latent_bits

    def forward(self, logits: Tensor) -> Tensor:
        """[n, t, H] to [n, t, 2^H]. The bits are drawn in training mode; in use they are the likelier ones."""
        probability = torch.sigmoid(logits)
        bits = (
            torch.rand_like(probability) < probability
            if self.training
            else probability > 0.5
        )
        powers = 2 ** torch.arange(self.num_bits, device=logits.device)
        drawn = F.one_hot((bits * powers).sum(-1), 2**self.num_bits).to(logits.dtype)
        if not self.training:
            return drawn
        # bit_of[d, h]: bit h of class d, so that log G_td = sum_h log Q(B_th = bit h of d)
        bit_of = (
            torch.arange(2**self.num_bits, device=logits.device)[:, None] & powers > 0
        ).to(logits.dtype)
        log_g = F.logsigmoid(logits) @ bit_of.T + F.logsigmoid(-logits) @ (1 - bit_of).T
        g = log_g.exp()
        return drawn + g - g.detach()


class FreeTransformer(nn.Module):
    """A decoder with a latent Z in the middle; without Z it is a plain decoder."""

    is_causal = True
    _no_split_modules = ("DecoderBlock",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_dim = config.hidden_dim
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.blocks = nn.ModuleList(
            DecoderBlock(config) for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_dim)
        if config.use_latent:
            self.zeta = nn.Parameter(0.02 * torch.randn(config.hidden_dim))
            self.encoder = nn.ModuleList([DecoderBlock(config)])
            self.bits_norm = nn.RMSNorm(config.hidden_dim)
            self.to_bits = nn.Linear(config.hidden_dim, config.latent_bits)
            self.mapper = BinaryMapper(config)
            self.from_latent = nn.Linear(
                config.latent_dim, config.hidden_dim, bias=False
            )
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # About 0.03 at 1024 dimensions; by the width, so that small models learn as fast.
                depth = (
                    math.sqrt(2 * config.num_layers)
                    if "down" in name or "out" in name
                    else 1.0
                )
                nn.init.normal_(
                    parameter, std=1 / (depth * math.sqrt(config.hidden_dim))
                )
        if config.use_latent:  # bits that say something from the start, or the decoder learns to do without Z
            nn.init.normal_(self.to_bits.weight, std=2 / math.sqrt(config.hidden_dim))

    @classmethod
    def from_config(cls, values: dict[str, Any]) -> FreeTransformer:
        """Return a model from the entries of `model_config`."""
        return cls(ModelConfig(**values))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        mode: str = "embedding",
        latent: Tensor | None = None,
    ) -> Any:
        """mode "training": (logits [n, t, vocab], z_logits [n, t, H], or None without Z). "embedding": hidden states,
        and in training mode the losses of equation (5). `latent` [n, t, 2^H]: a given Z, in place of the encoder's."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden, z_logits = self.decode(input_ids, mask, latent)
        if mode == "training":
            return self.logits(hidden), z_logits
        return (
            (hidden, self.losses(hidden, z_logits, input_ids, mask))
            if self.training
            else hidden
        )

    def decode(
        self, input_ids: Tensor, mask: Tensor, latent: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [n, t, dim] and the encoder's logits."""
        length = input_ids.shape[1]
        middle = len(self.blocks) // 2
        is_token = mask[:, None, None, :].bool()
        # A padded position may look at itself: a row without anything to look at would be NaN.
        is_self = torch.eye(length, dtype=torch.bool, device=mask.device)
        causal = is_token & torch.ones_like(is_self).tril() | is_self
        x = self.tokens(input_ids)
        for block in self.blocks[:middle]:
            x = block(x, causal)  # (1)
        z_logits = others = None
        if self.config.use_latent:
            if latent is None:
                z_logits = self.to_bits(
                    self.bits_norm(
                        self.encoder[0](self.zeta.expand_as(x), is_token | is_self, x)
                    )
                )  # (2)
                latent = self.mapper(z_logits)  # (3)
            others = x + self.from_latent(latent)  # (4)
        for number, block in enumerate(self.blocks[middle:]):
            x = block(x, causal, others if number == 0 else None)
        return self.norm(x), z_logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token, by the embedding matrix."""
        return F.linear(hidden, self.tokens.weight)

    def losses(
        self, hidden: Tensor, z_logits: Tensor | None, input_ids: Tensor, mask: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the two terms of (5), each as sums and counts over the tokens of each text."""
        counted = mask[:, 1:].bool() & mask[:, :-1].bool()
        entropy = F.cross_entropy(
            self.logits(hidden[:, :-1]).transpose(1, 2).float(),
            input_ids[:, 1:],
            reduction="none",
        )
        by_name = {"next_token": ((entropy * counted).sum(1), counted.sum(1))}
        if z_logits is not None:
            excess = (kl_to_uniform(z_logits) - self.config.free_bits).clamp(min=0)
            by_name["kl"] = ((excess * mask).sum(1), mask.sum(1))
        return by_name


def kl_to_uniform(z_logits: Tensor) -> Tensor:
    """Return KL(Q(Z_t | S) || uniform) [n, t] in nats: H log 2 less the entropy of the bits."""
    q = torch.sigmoid(z_logits.float())
    entropy = -(
        q * F.logsigmoid(z_logits.float()) + (1 - q) * F.logsigmoid(-z_logits.float())
    )
    return (math.log(2) - entropy).sum(-1)
