"""Directions between two sets of vectors, maps that take them out, and the linear probe that looks for what is left."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.optimize import minimize

from vembed.errors import UserError

Direction = Literal["mean_difference", "principal", "erase"]
SHRINKAGE = 1e-3
"""erase: share of the mean variance that is added to each variance, so that few texts still have an inverse."""
RIDGE = 1e-2
"""Probe: penalty on the squared weights of standardised vectors, per text."""
MAX_ITERATIONS = 500


def directions(
    first_ND: np.ndarray, second_ND: np.ndarray, how: Direction, count: int = 1
) -> np.ndarray:
    """Return [count, D] orthonormal directions in which two sets of vectors differ, in float64.

    mean_difference: of the two means. principal: leading principal components of the differences of vectors that belong
    together, row by row.
    """
    first = first_ND.astype(np.float64)
    second = second_ND.astype(np.float64)
    if how == "principal":
        if len(first) != len(second):
            raise UserError(
                f"direction: principal compares line by line, and the sets have {len(first):,d} and {len(second):,d} "
                "texts; use mean_difference"
            )
        _, _, components = np.linalg.svd(first - second, full_matrices=False)
        principal = components[:count]
        # SVD leaves the signs open.
        largest = np.abs(principal).argmax(axis=1)
        signs = np.sign(principal[np.arange(len(principal)), largest])
        oriented: np.ndarray = principal * signs[:, None]
        return oriented
    difference = first.mean(axis=0) - second.mean(axis=0)
    norm = float(np.linalg.norm(difference))
    if norm == 0:
        raise UserError(
            "the two sets of texts have the same mean, so there is no direction between them"
        )
    unit: np.ndarray = difference[None] / norm
    return unit


def projection(
    directions_CD: np.ndarray, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the map x -> x - strength * V'Vx as a matrix [D, D] and an offset [D] of zeros."""
    size = directions_CD.shape[1]
    return np.eye(size) - strength * directions_CD.T @ directions_CD, np.zeros(size)


def erasure(
    first_ND: np.ndarray, second_ND: np.ndarray, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the map, as a matrix [D, D] and an offset [D], that changes the vectors least so that both sets have one
    mean and no linear probe can tell them apart (LEACE); `strength` below 1 goes a part of the way."""
    both = np.concatenate([first_ND, second_ND]).astype(np.float64)
    labels = np.concatenate([np.ones(len(first_ND)), -np.ones(len(second_ND))])
    mean = both.mean(axis=0)
    centred = both - mean
    covariance = centred.T @ centred / len(both)
    # The covariance of N texts has rank N - 1 at most, which is below D for small sets; it must be inverted.
    covariance += (
        SHRINKAGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    )
    # LEACE: whiten, take out the one direction that correlates with the label, undo the whitening. In whitened space
    # the orthogonal projection is the smallest change.
    values, vectors = np.linalg.eigh(covariance)
    whiten = vectors @ np.diag(values**-0.5) @ vectors.T
    colour = vectors @ np.diag(values**0.5) @ vectors.T
    direction = whiten @ (centred.T @ (labels - labels.mean()) / len(both))
    norm = np.linalg.norm(direction)
    if norm == 0:
        raise UserError(
            "the two sets of texts have the same mean, so there is nothing to erase"
        )
    direction /= norm
    matrix = (
        np.eye(len(mean)) - strength * colour @ np.outer(direction, direction) @ whiten
    )
    # The offset keeps the common mean where it was: x -> mean + M (x - mean).
    return matrix, mean - matrix @ mean


def linear_probe(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> float:
    """Return the share of the test vectors whose set a logistic regression, fitted on the training vectors, finds: 0.5
    is chance for sets of one size, 1.0 is always."""
    trained = np.concatenate(train).astype(np.float64)
    labels = np.concatenate([np.ones(len(train[0])), -np.ones(len(train[1]))])
    mean = trained.mean(axis=0)
    spread = trained.std(axis=0)
    # A constant coordinate stays 0 after centring instead of becoming 0 / 0.
    spread[spread < 1e-9 * max(float(spread.max()), 1e-30)] = 1.0

    def standardised(vectors: np.ndarray) -> np.ndarray:
        """Return the vectors with a last column of ones, for the intercept."""
        ones = np.ones((len(vectors), 1))
        return np.concatenate([(vectors - mean) / spread, ones], axis=1)

    inputs = standardised(trained)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margin = labels * (inputs @ weights)
        # The last weight is the intercept, which has no penalty.
        free = np.append(weights[:-1], 0.0)
        value = np.logaddexp(0, -margin).mean() + RIDGE / 2 * free @ free
        # exp overflows float64 above 709.
        slope = -labels / (1 + np.exp(np.clip(margin, -500, 500)))
        return float(value), inputs.T @ slope / len(labels) + RIDGE * free

    fitted = minimize(
        loss,
        np.zeros(inputs.shape[1]),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": MAX_ITERATIONS},
    ).x
    # Both sets count alike, whatever their sizes.
    first_scores = standardised(test[0].astype(np.float64)) @ fitted
    second_scores = standardised(test[1].astype(np.float64)) @ fitted
    return float((first_scores > 0).mean() + (second_scores < 0).mean()) / 2
