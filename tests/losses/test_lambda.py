"""loss: lambda, plainly."""

import math

import torch

from tests.losses.reference import lists, mean_over_terms


@mean_over_terms
def reference(plain):
    for first, student, teacher in lists(plain):
        labels = teacher.nan_to_num(nan=0.0)
        order = student.argsort(descending=True).tolist()
        place = {document: number + 1 for number, document in enumerate(order)}
        gains = 2.0 ** labels.clamp(min=0.0) - 1.0
        best = 0.0
        for number, gain in enumerate(sorted(gains.tolist(), reverse=True)):
            best += gain / math.log2(2 + number)
        for a in range(len(labels)):
            for b in range(len(labels)):
                if labels[a] <= labels[b]:
                    continue
                distance = abs(place[a] - place[b])
                close = 1 / math.log2(1 + distance) - 1 / math.log2(2 + distance)
                far = 1 / math.log2(1 + place[a]) - 1 / math.log2(1 + place[b])
                share = (gains[a] - gains[b]).abs() / max(best, 1e-10)
                weight = share * (10 * close + abs(far))
                worse = torch.log1p((student[b] - student[a]).exp())
                yield first, weight * worse / math.log(2)
