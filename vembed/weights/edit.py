"""edit(): a model and two sets of texts in, a model without what tells them apart out, with scores before and after."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from vembed.config.values import EditDirection, EditPlace, ModelDtype
from vembed.data.examples import Item, Kind
from vembed.errors import UserError, require_package
from vembed.evaluation.dataset import EvalData, open_test_data
from vembed.evaluation.report.record import Scores
from vembed.evaluation.scores import evaluate
from vembed.files import replace_text, write_json
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import unit_rows
from vembed.models.embedding_model import EmbeddingModel, tower_module
from vembed.models.families.backbones import layers_of, unwrapped_name
from vembed.models.families.description import ModelDescription
from vembed.models.heads import Dense
from vembed.parallel import collectives
from vembed.parallel.parameters import (
    copy_local_shards,
    edit_weights,
    full_state_dict,
    restore_local_shards,
)
from vembed.parallel.session import Session
from vembed.saving.card import Card
from vembed.saving.files import save_model

log = logging.getLogger("vembed")

TextSets = tuple[tuple[str, ...], tuple[str, ...]]
"""Two sets of texts that differ in what is to be removed. Every other text is held out for the probe."""
TextSource = str | Path | Sequence[str]
"""Texts, or a file with one text per line."""
EDIT_FILE = "edit.json"
MIN_TEXTS = 8
"""In each set: half of them estimate the direction, the other half test the probe."""
FEWEST_PROBE_TEXTS = 100
"""Below it the standard error of the probe's accuracy at chance is above 0.05, and a warning says so."""
MAX_STRENGTH = 1.5
DEFAULT_MAX_DROP = 0.01
RANKING_CUTOFF = 10
ONE_AT_A_TIME = 1
"""Texts at a time where directions are estimated: a text's numbers then depend on no other text, so that any number of
ranks finds the same bits."""


@dataclass(frozen=True)
class EditPlan:
    """Specification of an edit: direction, places and strength."""

    where: EditPlace = "layers"
    """layers: out of the weights that write to the residual stream; embedding: by a linear layer behind the model."""
    direction: EditDirection = "mean_difference"
    components: int = 1
    """principal: how many directions."""
    strength: float = 1.0
    layers: tuple[int, ...] | None = None
    """Of which layers' weights; None: of all."""


@dataclass(frozen=True)
class EditTrial:
    """One plan that was tried."""

    plan: EditPlan
    scores: Scores


@dataclass(frozen=True)
class EditResult:
    """Result of an edit."""

    model_dir: Path
    plan: EditPlan
    before: Scores
    after: Scores
    """`probe`, `across` and the scores on the evaluation data."""
    trials: tuple[EditTrial, ...]


def edit(
    model: str | Path,
    output: str | Path,
    first: TextSource,
    second: TextSource,
    *,
    where: EditPlace = "layers",
    direction: EditDirection = "mean_difference",
    components: int = 1,
    strength: float = 1.0,
    layers: Sequence[int] | None = None,
    kind: Kind = "document",
    data: str | Path | None = None,
    trials: int = 0,
    max_drop: float = DEFAULT_MAX_DROP,
    seed: int = 42,
    torch_dtype: ModelDtype = "auto",
    trust_remote_code: bool = False,
    session: Session | None = None,
) -> EditResult:
    """Remove what tells two sets of texts apart from a model, and write it to the new folder `output`.

    Args:
        model: a folder, a run or a Hub name.
        output: the new folder.
        first: texts of one kind, as a list or a file with one text per line.
        second: texts of the other kind.
        where: layers (the weights), embedding (a linear layer behind the model) or both.
        data: evaluation data, scored before and after.
        trials: search over strength, layers and components with so many trials. 0: no search.
        max_drop: largest loss of the main score that the search accepts.
        session: the process group. If its strategy is fsdp, the model is sharded.
    """
    target = Path(output)
    sets = (read_texts(first), read_texts(second))
    chosen_layers = None if layers is None else tuple(layers)
    plan = EditPlan(where, direction, components, strength, chosen_layers)
    _check(target, sets, plan, trials)
    # Opened before the model is loaded: a mistake in the data shows at once.
    evaluation = None
    if data is not None:
        evaluation = open_test_data(data)
    embedder = Embedder(
        model,
        torch_dtype=torch_dtype,
        mixed_precision="no",
        trust_remote_code=trust_remote_code,
        session=session,
    )
    editor = Editor(embedder, sets, kind, evaluation, keeps_original=trials > 0)
    before = editor.scores()
    tried = []
    if trials:
        metric = editor.metric
        if metric is None:
            raise UserError(
                "a search weighs the probe against a main score: give data, or sets of equal length"
            )
        tried = _search(editor, metric, plan, trials, seed)
        lowest = before[metric] - max_drop
        holding = [trial for trial in tried if trial.scores[metric] >= lowest]
        if not holding:
            raise UserError(
                f"no trial held {metric} within {max_drop:g} of {before[metric]:.4f}: give a larger max_drop, or more trials"
            )
        # The lowest probe among those that hold the main score.
        best = min(
            holding,
            key=lambda trial: (trial.scores["probe"], -trial.scores[metric]),
        )
        plan = best.plan
    editor.apply(plan)
    after = editor.scores()
    editor.save(target)
    result = EditResult(target, plan, before, after, tuple(tried))
    if collectives.rank() == 0:
        _write_result(result)
    collectives.barrier()
    return result


def read_texts(source: TextSource) -> tuple[str, ...]:
    """Return texts as they are, or those of a file with one per line."""
    if not isinstance(source, str | Path):
        return tuple(source)
    try:
        content = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{source} cannot be read as a file of texts, one per line: {error}"
        ) from error
    # Not splitlines(): it splits at line separators inside a text too, and pairs of the two files would shift.
    lines = content.rstrip().split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UserError(
                f"{source}:{number} is blank, and each line is a text: files are paired line by line"
            )
    return tuple(lines)


def _check(
    target: Path,
    sets: TextSets,
    plan: EditPlan,
    trials: int,
) -> None:
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
    for texts in sets:
        if len(texts) < MIN_TEXTS:
            raise UserError(
                f"a set has {len(texts)} texts, and each needs at least {MIN_TEXTS}: half of them estimate the "
                "direction, the other half test what is left of it"
            )
    num_held_out = sum(len(texts[1::2]) for texts in sets)
    if num_held_out < FEWEST_PROBE_TEXTS:
        log.warning(
            "the probe is tested on %d texts: its accuracy varies by chance; give at least 100 texts per set",
            num_held_out,
        )
    if plan.direction == "erase" and plan.where != "embedding":
        raise UserError(
            "direction: erase is a map behind the model: use it with where: embedding"
        )
    if plan.components != 1 and plan.direction != "principal":
        raise UserError(
            f"components: {plan.components} is for direction: principal; {plan.direction} has one"
        )
    if plan.layers is not None and plan.where == "embedding":
        raise UserError("layers are of where: layers; the embedding has none")
    default = EditPlan()
    for name in ("strength", "layers"):
        value = getattr(plan, name)
        if trials and value != getattr(default, name):
            raise UserError(
                f"{name}: {value} has no effect with trials: {trials}, which searches over {name}. Leave out one of them"
            )
    if trials:
        require_package("optuna", "search")


# ---- the editor ----------------------------------------------------------------------------------------------------


class Editor:
    """A model, two sets of texts, and the data to score it on. Every method is collective where there are several
    ranks, and gives all of them the same."""

    def __init__(
        self,
        embedder: Embedder,
        sets: TextSets,
        kind: Kind,
        data: EvalData | None,
        *,
        keeps_original: bool,
    ) -> None:
        """`keeps_original`: so that edits can be undone, at the cost of a second copy of this rank's weights."""
        self.embedder = embedder
        self.first, self.second = sets
        self.is_paired = len(self.first) == len(self.second)
        """True if line i of one set belongs to line i of the other."""
        self.kind: Kind = kind
        self.data = data
        self.metric = "across" if self.is_paired else None
        """The key of the main score; None without any."""
        if data is not None:
            self.metric = data.metric
        self._model = embedder.model
        self._map: tuple[Tensor, Tensor] | None = None
        """The linear layer behind the model: matrix [D, D] and offset [D]."""
        self._model.register_forward_hook(self._mapped)
        self._original = copy_local_shards(embedder.model) if keeps_original else {}
        self._states: np.ndarray | None = None
        """[texts, layers, width] of the model before any edit, of the texts that estimate directions."""

    @cached_property
    def writers(self) -> list[ResidualWriter]:
        """The weights that `where: layers` edits. Raises for families whose names are not known."""
        return residual_writers(
            self._model, self.embedder.backbone, self.embedder.description
        )

    def scores(self) -> Scores:
        """Return `probe` (what a linear probe finds in held-out texts), `across` (nDCG@10 from each text of the first
        set to its counterpart in the second, where they are paired), and the scores on the evaluation data."""
        first = self._vectors(self.first)
        second = self._vectors(self.second)
        if self.embedder.description.normalize:
            first = unit_rows(first)
            second = unit_rows(second)
        # Even texts have estimated the direction (`apply`), odd ones test: the probe is fitted on the former as well.
        train = (first[0::2], second[0::2])
        test = (first[1::2], second[1::2])
        scores = {"probe": linear_probe(train, test)}
        if self.is_paired:
            similarities = unit_rows(test[0]) @ unit_rows(test[1]).T
            right = np.diag(similarities)[:, None]
            # Pessimistic: candidates that tie with the right one count as ranked before it, so that equal vectors score
            # low.
            rank = (similarities >= right).sum(axis=1) - 1  # without itself
            gains = np.where(rank < RANKING_CUTOFF, 1 / np.log2(rank + 2), 0.0)
            scores["across"] = float(gains.mean())
        if self.data is not None:
            session = self.embedder.session
            scores |= evaluate(self.embedder, self.data, session=session, dims=[])
        return scores

    def _vectors(
        self, texts: Sequence[str], *, batch_size: int | None = None
    ) -> np.ndarray:
        items = [Item(text=text) for text in texts]
        return self.embedder.encode(
            items,
            self.kind,
            batch_size=batch_size,
            normalize=False,
            # The map stands before the cut.
            truncate_dim=self.embedder.description.embedding_dim,
        )

    def apply(self, plan: EditPlan) -> None:
        """Edit the model as it is now."""
        if plan.where in ("layers", "both"):
            self._edit_layers(plan)
        if plan.where in ("embedding", "both"):
            # where: both estimates the embedding's direction behind the layers as they are edited now.
            first = self._vectors(self.first[0::2], batch_size=ONE_AT_A_TIME)
            second = self._vectors(self.second[0::2], batch_size=ONE_AT_A_TIME)
            if plan.direction == "erase":
                matrix, offset = erasure(first, second, plan.strength)
            else:
                removed = directions(first, second, plan.direction, plan.components)
                matrix, offset = projection(removed, plan.strength)
            self._map = (
                torch.from_numpy(matrix).float().to(self.embedder.device),
                torch.from_numpy(offset).float().to(self.embedder.device),
            )

    def _mapped(self, _: nn.Module, __: Any, outputs: list[Tensor]) -> list[Tensor]:
        """Map the embeddings that the model gives."""
        if self._map is None:
            return outputs
        matrix_DD, offset_D = self._map
        return [embeddings @ matrix_DD.T + offset_D for embeddings in outputs]

    def undo(self) -> None:
        """Bring the model back to what it was."""
        restore_local_shards(self._model, self._original)
        self._map = None

    def save(self, target: Path) -> None:
        """Write the model as it is now."""
        weights = full_state_dict(self._model)
        if collectives.rank() == 0:
            head = self.embedder.head
            if self._map is not None:
                matrix_DD, offset_D = self._map
                # The map becomes the last Dense module of the saved model, in front of its normalisation.
                modules = list(head or ())
                prefix = f"head.{len(modules)}.linear"
                weights[f"{prefix}.weight"] = matrix_DD
                weights[f"{prefix}.bias"] = offset_D
                size = len(offset_D)
                head = nn.Sequential(*modules, Dense(size, size, bias=True))
            model = EmbeddingModel(
                self.embedder.description,
                self.embedder.backbone,
                head,
                pooling=self.embedder.pooling,
            )
            save_model(target, model, weights, card=Card())
        collectives.barrier()

    def _edit_layers(self, plan: EditPlan) -> None:
        first = self.first[0::2]
        if self._states is None:
            texts = [*first, *self.second[0::2]]
            self._states = self.embedder.hidden_states(
                texts, "all", self.kind, batch_size=ONE_AT_A_TIME
            )
        edits = {}
        for writer in self.writers:
            if plan.layers is not None and writer.layer not in plan.layers:
                continue
            # Of each layer, from the model before any edit.
            states = self._states[:, writer.layer]
            vectors_CD = torch.from_numpy(
                directions(
                    states[: len(first)],
                    states[len(first) :],
                    plan.direction,
                    plan.components,
                )
            )
            edits[f"{writer.name}.weight"] = _removal(
                vectors_CD, plan.strength, by_rows=writer.by_rows
            )
            if writer.has_bias:
                edits[f"{writer.name}.bias"] = _removal(
                    vectors_CD, plan.strength, by_rows=True
                )
        edit_weights(self._model, edits)
        log.info("edited %d tensors of the residual stream's writers", len(edits))


def _removal(
    vectors_CD: Tensor, strength: float, *, by_rows: bool
) -> Callable[[Tensor], Tensor]:
    """Return W -> W - strength * V'VW, or W - strength * WV'V by rows; computed in float64, so that every strategy
    stores the same bits."""

    def edit(weight: Tensor) -> Tensor:
        wide = weight.double()
        vectors = vectors_CD.to(weight.device)
        if by_rows:
            component = (wide @ vectors.T) @ vectors
        else:
            component = vectors.T @ (vectors @ wide)
        return (wide - strength * component).to(weight.dtype)

    return edit


# ---- weights that write to the residual stream ---------------------------------------------------------------------

# Llama, Qwen, Mistral: o_proj, down_proj; CLIP, SigLIP: out_proj, fc2; BERT (attention.output.dense and output.dense);
# DistilBERT: out_lin, lin2; GPT-2: c_proj, twice; GPT-NeoX, BLOOM, Falcon: (self_)attention.dense, dense_4h_to_h;
# ModernBERT: Wo; T5: o, wo; MPNet: attn.o.
_OUTPUT_LAYER = re.compile(
    r"(^|\.)(o_proj|out_proj|out_lin|down_proj|output\.dense|(self_)?attention\.dense|fc2|lin2|c_proj|dense_4h_to_h"
    r"|[Ww]o|o)$"
)
"""Names of the linear layers, within a transformer layer, whose output is added to what the layer was given."""
MIN_WRITERS_PER_LAYER = 2
"""One of attention, one of the feed-forward part."""


@dataclass(frozen=True)
class ResidualWriter:
    """One weight that writes to the residual stream behind a layer (0: the embeddings)."""

    name: str
    """Of the module in the model."""
    layer: int
    by_rows: bool
    """True if each row of the weight is a vector of the residual stream; otherwise each column is."""
    has_bias: bool


def residual_writers(
    model: nn.Module,
    backbone: nn.Module,
    description: ModelDescription,
) -> list[ResidualWriter]:
    """Return the weights that write to the residual stream of the text tower, in the order of the forward pass: the
    embeddings, and in each layer the last linear layers of attention and feed-forward."""
    tower: Any = tower_module(backbone, description.family_traits, "text")
    names = {id(module): unwrapped_name(name) for name, module in model.named_modules()}
    embeddings = names[id(tower.get_input_embeddings())]
    writers = [ResidualWriter(embeddings, 0, by_rows=True, has_bias=False)]
    for number, layer in enumerate(layers_of(tower), start=1):
        num_before = len(writers)
        for name, module in layer.named_modules():
            is_linear = isinstance(module, nn.Linear | Conv1D)
            if not is_linear or not _OUTPUT_LAYER.search(unwrapped_name(name)):
                continue
            writer = ResidualWriter(
                names[id(module)],
                number,
                # Conv1D of GPT-2 stores its weight as [in, out], transposed to nn.Linear: there each row is a vector
                # of the stream.
                by_rows=isinstance(module, Conv1D),
                has_bias=module.bias is not None,
            )
            writers.append(writer)
        # With fewer, one part of the layer would keep what is taken out of the others.
        if len(writers) - num_before < MIN_WRITERS_PER_LAYER:
            raise UserError(
                f"{description.name}: the linear layers of a {type(layer).__name__} have names that vembed does not "
                "know, so it cannot tell which of them write to the residual stream; use --where embedding"
            )
    return writers


# ---- the search ----------------------------------------------------------------------------------------------------


def _search(
    editor: Editor,
    metric: str,
    plan: EditPlan,
    num_trials: int,
    seed: int,
) -> list[EditTrial]:
    """Try plans that rank 0 proposes, by strength, range of layers and number of components."""
    import optuna

    # Rank 0 alone uses the study. The others apply what it proposes, since every method of the editor is collective.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    tried = []
    for number in range(1, num_trials + 1):
        asked = study.ask()
        values: dict[str, Any] = {"components": 1, "layers": None}
        values["strength"] = asked.suggest_float("strength", 0.0, MAX_STRENGTH)
        if plan.direction == "principal":
            values["components"] = asked.suggest_int("components", 1, plan.components)
        if plan.where != "embedding":
            # Two independent ends, put in order: a range that depends on the other end would be another distribution
            # in every trial.
            last_layer = max(writer.layer for writer in editor.writers)
            first = asked.suggest_int("first_layer", 0, last_layer)
            last = asked.suggest_int("last_layer", 0, last_layer)
            values["layers"] = tuple(range(min(first, last), max(first, last) + 1))
        values = collectives.broadcast_object(values)
        candidate = replace(plan, **values)
        editor.apply(candidate)
        scores = editor.scores()
        editor.undo()
        tried.append(EditTrial(candidate, scores))
        study.tell(asked, [scores["probe"], scores[metric]])
        log.info(
            "trial %d of %d: probe %.4f, %s %.4f",
            number,
            num_trials,
            scores["probe"],
            metric,
            scores[metric],
        )
    return tried


def _write_result(result: EditResult) -> None:
    """Write edit.json and a section of the card."""
    summary = asdict(result)
    del summary["model_dir"]
    trials = summary.pop("trials")
    card = result.model_dir / "README.md"
    section = f"\n## Edit\n\n```json\n{json.dumps(summary, indent=2)}\n```\n"
    replace_text(card, card.read_text(encoding="utf-8") + section)
    if trials:
        summary["trials"] = trials
    write_json(result.model_dir / EDIT_FILE, summary)


# ---- directions between two sets of vectors, maps that take them out, and the probe ------------------------------------


VectorSets = tuple[np.ndarray, np.ndarray]
"""The vectors [N, D] of both sets of texts."""
LinearMap = tuple[np.ndarray, np.ndarray]
"""A matrix [D, D], and the offset [D] that is added to its products."""
SHRINKAGE = 1e-3
"""erase and probe: share of the mean variance that is added to each variance, so that few texts still have an inverse."""


def directions(
    first_ND: np.ndarray,
    second_ND: np.ndarray,
    how: EditDirection,
    count: int = 1,
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
        principal: np.ndarray = components[:count]
        return principal
    difference = first.mean(axis=0) - second.mean(axis=0)
    norm = float(np.linalg.norm(difference))
    if norm == 0:
        raise UserError(
            "the two sets of texts have the same mean, so there is no direction between them"
        )
    unit: np.ndarray = difference[None] / norm
    return unit


def projection(directions_CD: np.ndarray, strength: float) -> LinearMap:
    """Return the map x -> x - strength * V'Vx as a matrix [D, D] and an offset [D] of zeros."""
    size = directions_CD.shape[1]
    return np.eye(size) - strength * directions_CD.T @ directions_CD, np.zeros(size)


def erasure(
    first_ND: np.ndarray,
    second_ND: np.ndarray,
    strength: float,
) -> LinearMap:
    """Return the map, as a matrix [D, D] and an offset [D], that changes the vectors least so that both sets have one
    mean and no linear probe can tell them apart (LEACE); `strength` below 1 goes a part of the way."""
    mean, covariance = _mean_and_covariance(first_ND, second_ND)
    # LEACE: whiten, take out the one direction that correlates with the label, undo the whitening. In whitened space
    # the orthogonal projection is the smallest change.
    values, vectors = np.linalg.eigh(covariance)
    whiten = vectors @ np.diag(values**-0.5) @ vectors.T
    colour = vectors @ np.diag(values**0.5) @ vectors.T
    direction = whiten @ directions(first_ND, second_ND, "mean_difference")[0]
    direction /= np.linalg.norm(direction)
    matrix = (
        np.eye(len(mean)) - strength * colour @ np.outer(direction, direction) @ whiten
    )
    # The offset keeps the common mean where it was: x -> mean + M (x - mean).
    return matrix, mean - matrix @ mean


def _mean_and_covariance(
    first_ND: np.ndarray, second_ND: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean [D] and the covariance [D, D] of two sets together, with SHRINKAGE."""
    both = np.concatenate([first_ND, second_ND]).astype(np.float64)
    mean = both.mean(axis=0)
    centred = both - mean
    covariance = centred.T @ centred / len(both)
    # The covariance of N texts has rank N - 1 at most, which is below D for small sets; it must be inverted.
    shrinkage = SHRINKAGE * np.trace(covariance) / len(covariance)
    return mean, covariance + shrinkage * np.eye(len(covariance))


def linear_probe(train: VectorSets, test: VectorSets) -> float:
    """Return the share of the test vectors whose set a linear discriminant, fitted on the training vectors, finds: 0.5 is
    chance, 1.0 is always. Both sets count alike, whatever their sizes."""
    first_mean, second_mean = (vectors.mean(axis=0) for vectors in train)
    _, covariance = _mean_and_covariance(*train)
    normal = np.linalg.solve(covariance, first_mean - second_mean)
    threshold = (first_mean + second_mean) @ normal / 2
    is_first, is_second = (vectors @ normal > threshold for vectors in test)
    return float(is_first.mean() + 1 - is_second.mean()) / 2
