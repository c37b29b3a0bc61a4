"""A bag of words that takes texts in one row, without padding; and one that mixes them up."""

import torch
from torch import nn


class PackedBag(nn.Module):
    """The mean of word vectors through a linear layer, for padded texts and for texts one behind the other."""

    def __init__(self, vocab_size=400, hidden_dim=16):
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden_dim)
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, input_ids, attention_mask=None, cu_seqlens=None):
        """Return one vector for each text, and the mean square of the words."""
        words = self.words(input_ids)
        if cu_seqlens is None:
            real = (
                torch.ones_like(input_ids) if attention_mask is None else attention_mask
            )
            words = words * real.unsqueeze(-1)
            counts = real.sum(1)
            sums = words.sum(1)
        else:
            counts = cu_seqlens.diff().long()
            text = torch.arange(len(counts), device=counts.device).repeat_interleave(
                counts
            )
            sums = words.new_zeros(len(counts), words.shape[2]).index_add(
                0, text, words[0]
            )
        vectors = self.out(sums / counts.unsqueeze(1))
        return vectors, {"word_size": (words.square().sum(), counts.sum())}


class Mixed(PackedBag):
    """Takes texts in one row, and sees all of them at once."""

    def forward(self, input_ids, attention_mask=None, cu_seqlens=None):
        """Return the same vector for all."""
        if cu_seqlens is None:
            return super().forward(input_ids, attention_mask)[0]
        mean = self.out(self.words(input_ids).mean(1))
        return mean.expand(len(cu_seqlens) - 1, -1)
