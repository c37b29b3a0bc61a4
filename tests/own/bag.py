"""A user's model in 40 lines: the mean of word vectors through a linear layer, with two losses of its own."""

import torch
from torch import nn


class Bag(nn.Module):
    """One vector for each text."""

    def __init__(self, vocab_size=400, hidden_dim=16, dropout=0.0):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.words = nn.Embedding(vocab_size, hidden_dim)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, input_ids, attention_mask):
        """Return the vectors, the mean square of the words (a mean over tokens) and of the vectors."""
        real = attention_mask.unsqueeze(-1).to(self.words.weight.dtype)
        words = self.dropout(self.words(input_ids)) * real
        vectors = self.out(words.sum(1) / real.sum(1))
        losses = {
            "word_size": (words.square().sum((1, 2)), attention_mask.sum(1)),
            "vector_size": (vectors.square().sum(1), torch.ones_like(vectors[:, 0])),
        }
        return vectors, losses
