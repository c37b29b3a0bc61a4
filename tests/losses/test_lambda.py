"""loss: lambda, plainly."""

import math

import torch

from tests.losses.reference import labelled


def reference(plain):
    total = plain.zero
    count = 0
    for first, student, labels in labelled(plain):
        scores = student.detach().tolist()
        order = sorted(range(len(labels)), key=lambda at: -scores[at])
        place = {document: number + 1 for number, document in enumerate(order)}
        gains = [2.0 ** max(float(label), 0.0) - 1.0 for label in labels]
        best = 0.0
        for number, gain in enumerate(sorted(gains, reverse=True)):
            best += gain / math.log2(2 + number)
        for a in range(len(labels)):
            for b in range(len(labels)):
                if labels[a] <= labels[b]:
                    continue
                count += 1
                if first not in plain.rank_rows:
                    continue
                distance = abs(place[a] - place[b])
                close = 1 / math.log2(1 + distance) - 1 / math.log2(2 + distance)
                far = 1 / math.log2(1 + place[a]) - 1 / math.log2(1 + place[b])
                weight = (
                    abs(gains[a] - gains[b])
                    / max(best, 1e-10)
                    * (10 * close + abs(far))
                )
                worse = torch.log1p((student[b] - student[a]).exp())
                total = total + weight * worse / math.log(2)
    return total / max(1, count)
