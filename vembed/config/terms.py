"""Terms of a run's loss, the groups of sources with the same loss (tasks of the data), and the teachers that it needs.
Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vembed.config.schema import (
    BatchSection,
    DataSection,
    DataSource,
    LossEntry,
    ModelSection,
    ObjectiveSection,
    Teacher,
)
from vembed.losses.declaration import LABEL_SCORES, LossDeclaration
from vembed.losses.table import LOSSES


@dataclass(frozen=True)
class ResolvedTerm:
    """One term of the sum that is trained, with its options resolved."""

    weight: float
    loss: LossDeclaration
    """The loss, with the options of this term."""
    teacher: str | None
    """Name of the teacher that it follows."""
    guide: str | None
    """Name of the teacher that chooses its candidates."""
    temperature_source: str
    """Where its temperature comes from, for the log. `given` if a user set it."""
    is_alone: bool
    """It is the whole loss, rather than an entry of `losses`."""

    @property
    def follows_data(self) -> bool:
        """Whether it follows the scores of the data."""
        takes_data = self.teacher is None and self.loss.follows == "scores_or_teacher"
        return self.teacher == LABEL_SCORES or takes_data

    @property
    def temperature(self) -> float | None:
        """The temperature, if the loss has one."""
        return getattr(self.loss, "temperature", None)


def loss_terms(
    objective: ObjectiveSection,
    start_model: str,
    source: DataSource | None = None,
    model_temperature: float | None = None,
    *,
    is_reranker: bool = False,
) -> list[ResolvedTerm]:
    """Return the terms of the loss of one source of the data.

    `start_model`: `model_name`, the teacher of the anchor. `model_temperature`: the
    temperature with which the model was trained (CLIP, SigLIP). An option of an entry of
    `losses` comes before that of the source, and that before the option of the run.
    `is_reranker`: the scores are logits, which need no temperature where none is given.
    """
    entries = objective.losses
    if source is not None and source.losses is not None:
        entries = source.losses
    run_options = dict(objective)
    # A teacher may be named by its model too.
    listed = listed_teachers(objective)
    labels: dict[Any, str] = {}
    for known in reversed(listed):
        labels[known.model] = known.label
    labels |= {known.label: known.label for known in listed}

    terms = []
    for entry in entries or [LossEntry(loss=objective.loss)]:
        loss_class = LOSSES[entry.loss]
        options: dict[str, Any] = {}
        for name, field in loss_class.model_fields.items():
            value = getattr(entry, name)
            if value is None:
                value = run_options.get(name, field.default)
            options[name] = value
        reason = "default"
        of_source = None if source is None else source.temperature
        if "temperature" in options:
            is_of_entry = dict(entry)["temperature"] is not None
            if of_source is not None and not is_of_entry:
                options["temperature"] = of_source
                reason = "given"
            elif is_of_entry or "temperature" in objective.model_fields_set:
                reason = "given"
            elif is_reranker:
                options["temperature"] = 1.0
                reason = "default of task: rerank"
            elif loss_class.default_temperature is not None:
                options["temperature"] = loss_class.default_temperature
                reason = f"default of loss: {loss_class.name}"
            elif loss_class.takes_model_temperature and model_temperature is not None:
                options["temperature"] = model_temperature
                reason = "with which this model was trained"
        loss = loss_class(**options)
        guide = options.get("guide")
        teacher = None
        if loss.follows == "start_model":
            teacher = start_model
        elif loss.follows != "nobody":
            teacher = options["teacher"]
            # Graded scores of the data are what listwise and ranknet are made for.
            if teacher is None and listed and loss.follows != "scores_or_teacher":
                teacher = listed[0].label
            teacher = labels.get(teacher, teacher)
        guide = labels.get(guide, guide)
        terms.append(
            ResolvedTerm(
                entry.weight, loss, teacher, guide, reason, is_alone=entries is None
            )
        )
    return terms


def run_temperature(
    objective: ObjectiveSection,
    data: DataSection,
    model: ModelSection,
    model_temperature: float | None = None,
) -> float | None:
    """Return the temperature of the run's one loss, for `config.yaml` and the checkpoints.

    None: an option gives it, or it is learned, or there are several losses. Then the run's
    files name no other than the config does, so that each loss chooses its own again.
    """
    is_given = "temperature" in objective.model_fields_set
    if is_given or objective.losses is not None or losses_differ(data):
        return None
    (term,) = loss_terms(
        objective,
        model.model_name,
        model_temperature=model_temperature,
        is_reranker=model.task == "rerank",
    )
    return None if term.loss.learns_temperature() else term.temperature


def source_terms(
    objective: ObjectiveSection,
    data: DataSection,
    start_model: str,
    **facts: Any,
) -> list[list[ResolvedTerm]]:
    """Return the terms of the loss of each source. `facts`: further arguments of `loss_terms`."""
    return [
        loss_terms(objective, start_model, source, **facts) for source in data.sources()
    ]


def run_terms(
    objective: ObjectiveSection,
    data: DataSection,
    start_model: str,
) -> list[ResolvedTerm]:
    """Return the terms of all sources."""
    return list(chain.from_iterable(source_terms(objective, data, start_model)))


def losses_differ(data: DataSection) -> bool:
    """Return whether sources differ in their losses."""
    return any(
        source.losses is not None or source.temperature is not None
        for source in data.sources()
    )


def source_groups(data: DataSection) -> list[int]:
    """Return the number of each source's group, from which batches are drawn.

    Every source is a group of its own. With `homogeneous_batches: task`, sources with the
    same losses, temperature and batch size share the number of the first of them.
    """
    sources = data.sources()
    if data.homogeneous_batches != "task":
        return list(range(len(sources)))
    groups = []
    for source in sources:
        sizes = (source.batch_size, source.global_batch_size)
        groups.append((source.losses, source.temperature, sizes))
    return [groups.index(group) for group in groups]


def source_group_names(data: DataSection, names: Sequence[str]) -> list[str]:
    """Return the name of the group of each source, from the names of the sources."""
    numbers = source_groups(data)
    members: dict[int, list[str]] = {}
    for name, number in zip(names, numbers, strict=True):
        members.setdefault(number, []).append(name)
    return [" and ".join(members[number]) for number in numbers]


def source_batch_sizes(
    data: DataSection,
    batch: BatchSection,
    run_size: int,
) -> list[int]:
    """Return the examples per step of each source, over all processes.

    `run_size`: that of the run. A resumed run on another number of processes keeps its
    global batch, and the sources keep their share of it.
    """
    sizes = []
    for source in data.sources():
        size = run_size
        if source.global_batch_size:
            size = source.global_batch_size
        elif source.batch_size is not None:
            size = source.batch_size * run_size // batch.batch_size
        sizes.append(size)
    return sizes


def reads_scores(terms: Sequence[ResolvedTerm]) -> bool:
    """Return whether one of the terms reads the scores of the data."""
    return any(term.loss.records == "scores" or term.follows_data for term in terms)


def loss_names(terms: Sequence[ResolvedTerm]) -> tuple[str, ...]:
    """Return the names of the terms' losses, each once."""
    return tuple(dict.fromkeys(term.loss.name for term in terms))


def listed_teachers(objective: ObjectiveSection) -> list[Teacher]:
    """Return the entries of `teachers`."""
    return [
        Teacher(model=entry) if isinstance(entry, str) else entry
        for entry in objective.teachers or []
    ]


def needed_teachers(
    objective: ObjectiveSection,
    data: DataSection,
    model: ModelSection,
) -> list[Teacher]:
    """Return the models that losses follow or are guided by, in the order of the terms."""
    by_label = {teacher.label: teacher for teacher in listed_teachers(objective)}
    needed = {}
    for term in run_terms(objective, data, model.model_name):
        for name in (term.teacher, term.guide):
            if name is not None and name != LABEL_SCORES:
                needed[name] = by_label.get(name) or Teacher(model=name)
    return list(needed.values())
