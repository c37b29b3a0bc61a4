"""Rules and remarks on the losses, teachers and tasks of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vembed.config.schema import (
    BatchSection,
    DataSection,
    MatryoshkaSection,
    ModelSection,
    ObjectiveSection,
)
from vembed.config.terms import (
    Term,
    has_tasks,
    listed_teachers,
    loss_names,
    loss_terms,
    needed_teachers,
    run_terms,
)
from vembed.config.violation import Violation, word
from vembed.losses.declaration import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from vembed.losses.table import LOSSES, loss_options, read_options
from vembed.losses.teacher_scores import SCORES


def _one_loss_or_a_list(objective: ObjectiveSection) -> Violation | None:
    if objective.losses is None:
        return None
    if not objective.losses:
        return Violation(
            ("losses", "loss"), "losses is an empty list: name a loss in it"
        )
    # A config that a run has written names every option, and `loss` with its default.
    if objective.loss == "infonce":
        return None
    return Violation(
        ("losses", "loss"),
        f"losses and loss: {objective.loss} are two ways to say one thing: keep one of them",
    )


def _each_loss_accepts_its_options(
    terms: list[Term], mrl_dims: list[int]
) -> Violation | None:
    for term in terms:
        refusal = term.loss.refusal(mrl_dims)
        if refusal is not None:
            return Violation(*refusal)
    return None


def _losses_have_negatives(
    losses: tuple[str, ...], max_negatives: int | None
) -> Violation | None:
    if max_negatives != 0:
        return None
    for name in losses:
        if LOSSES[name].negatives == "each":
            return Violation(
                ("loss", "max_negatives"),
                f"loss: {name} needs hard negatives in every record, and max_negatives: 0 leaves none: raise it",
            )
    return None


def _learned_temperature_in_range(terms: list[Term]) -> Violation | None:
    for term in terms:
        start = term.temperature
        if start is None or not term.loss.learns_temperature():
            continue
        if not LOWEST_TEMPERATURE <= start <= HIGHEST_TEMPERATURE:
            return Violation(
                ("temperature", "learn_temperature", "losses"),
                f"temperature: {start:g} is where a learned temperature starts, and it is kept from "
                f"{LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}: start inside",
            )
    return None


def _teachers_have_different_names(objective: ObjectiveSection) -> Violation | None:
    labels = [teacher.label for teacher in listed_teachers(objective)]
    for label in labels:
        if labels.count(label) > 1:
            return Violation(
                ("teachers",),
                f"teachers: {label} is named twice: keep it once, or give each entry a name",
            )
        if label == SCORES:
            return Violation(
                ("teachers",),
                f"teachers: the name {SCORES!r} stands for scores in the data: choose another",
            )
    return None


def _losses_have_teachers(terms: list[Term]) -> Violation | None:
    for term in terms:
        loss = f"loss: {term.loss.name}"
        if term.loss.follows in ("teacher", "vectors") and term.teacher is None:
            return Violation(
                ("loss", "losses", "teacher"),
                f"{loss} follows a teacher, and the config names none: give teacher a model, or scores where the data "
                "have them",
            )
        if term.teacher == SCORES and term.loss.needs_vectors():
            if term.loss.follows == "teacher":
                loss += " with distill_candidates: batch"
            return Violation(
                ("loss", "losses", "teacher"),
                f"{loss} needs vectors, and teacher: {SCORES} has scores of listed pairs alone: name a model",
            )
        if term.guide == SCORES:
            return Violation(
                ("guide",),
                f"guide: {SCORES} cannot score pairs that nobody listed: give guide an embedding model",
            )
    return None


def _tasks_have_separate_batches(data: DataSection) -> Violation | None:
    if data.homogeneous_batches:
        return None
    sources = data.sources()
    is_sized = any(
        source.batch_size is not None or source.global_batch_size is not None
        for source in sources
    )
    if not has_tasks(data) and not is_sized:
        return None
    what = "losses or a temperature" if has_tasks(data) else "a batch size"
    return Violation(
        ("data_path", "homogeneous_batches"),
        f"data_path: a source with {what} of its own needs batches of its own: set homogeneous_batches: true",
    )


def _batches_are_counted_alike(
    data: DataSection, batch: BatchSection
) -> Violation | None:
    wrong_option = "global_batch_size"
    run_option = "batch_size"
    if batch.global_batch_size is not None:
        wrong_option = "batch_size"
        run_option = "global_batch_size"
    for source in data.sources():
        size = dict(source)[wrong_option]
        if size is not None:
            return Violation(
                ("data_path", "batch_size", "global_batch_size"),
                f"data_path: {source.name or source.path} has {wrong_option}: {size:,d}, and the run counts by "
                f"{run_option}: give the source {run_option} too",
            )
    return None


def _turns_need_batches_of_one_source(data: DataSection) -> Violation | None:
    if data.sampling != "round_robin" or data.homogeneous_batches:
        return None
    if len(data.sources()) < 2:
        return None
    return Violation(
        ("sampling", "homogeneous_batches"),
        "sampling: round_robin takes a batch of each source in turn: set homogeneous_batches: true",
    )


def _tasks_are_scored_beside_the_run(data: DataSection) -> Violation | None:
    if data.val_data_path is not None or data.val_split is not None:
        return None
    for source in data.sources():
        if source.val_data_path is not None:
            return Violation(
                ("data_path", "val_data_path"),
                f"data_path: {source.name or source.path} has val_data_path, and the run has none: give it "
                "val_data_path too, whose score chooses the checkpoint",
            )
    return None


def _mined_negatives_are_read(
    data: DataSection, losses: tuple[str, ...], terms: list[Term]
) -> Violation | None:
    if data.mine is None:
        return None
    if all(term.loss.negatives == "unread" for term in terms):
        return Violation(
            ("mine", "loss", "losses"),
            f"mine adds hard negatives, and loss: {', '.join(losses)} reads none: use loss: infonce, or "
            "leave mine out",
        )
    if any(term.teacher == SCORES for term in terms):
        return Violation(
            ("mine", "teacher"),
            f"mine adds negatives that have no scores in the data, and teacher: {SCORES} follows these: name a model "
            "as teacher, or leave mine out",
        )
    return None


def loss_violations(
    objective: ObjectiveSection,
    matryoshka: MatryoshkaSection,
    data: DataSection,
    batch: BatchSection,
    start_model: str,
) -> list[Violation]:
    """Return the violations of rules on losses, teachers and tasks."""
    terms = run_terms(objective, data, start_model)
    # Without those of single sources.
    losses = loss_names(loss_terms(objective, start_model))
    results = [
        _losses_have_negatives(losses, data.max_negatives),
        _learned_temperature_in_range(terms),
        _one_loss_or_a_list(objective),
        _teachers_have_different_names(objective),
        _losses_have_teachers(terms),
        _tasks_have_separate_batches(data),
        _batches_are_counted_alike(data, batch),
        _turns_need_batches_of_one_source(data),
        _tasks_are_scored_beside_the_run(data),
        _each_loss_accepts_its_options(terms, matryoshka.mrl_dims or []),
        _mined_negatives_are_read(data, losses, terms),
    ]
    return [violation for violation in results if violation is not None]


def loss_remarks(
    objective: ObjectiveSection,
    data: DataSection,
    model: ModelSection,
    changed: Mapping[str, Any],
) -> list[str]:
    """Return remarks on options that no loss of the run, or of an entry of `losses`, reads.

    `changed`: the options whose value is not their default, with that value.
    """
    terms = run_terms(objective, data, model.model_name)
    remarks = []
    for name in sorted(_unread_options(terms) & set(changed)):
        remarks.append(
            f"{name}: {word(changed[name])} has no effect with {_names(objective, terms)}"
        )
    for number, entry in enumerate(objective.losses or [], 1):
        read = read_options(entry.loss)
        for name in sorted(loss_options()):
            value = dict(entry)[name]
            if value is not None and name not in read:
                remarks.append(
                    f"losses, entry {number}: {name}: {word(value)} has no effect with loss: {entry.loss}"
                )
    if all(term.guide is None for term in terms):
        for name in ("guide_margin", "guide_margin_kind"):
            if name in changed:
                remarks.append(
                    f"{name}: {word(changed[name])} has no effect without guide"
                )
    needed = {teacher.label for teacher in needed_teachers(objective, data, model)}
    for teacher in listed_teachers(objective):
        if teacher.label not in needed:
            remarks.append(
                f"teachers: {teacher.label} has no effect: no loss follows it, and it is no guide"
            )
    return remarks


def _unread_options(terms: list[Term]) -> set[str]:
    # A guide or a teacher may serve one of several losses, so an option of the run needs
    # one loss that reads it.
    unread = {*loss_options(), "max_negatives"}
    for term in terms:
        unread -= read_options(term.loss.name)
    return unread


def _names(objective: ObjectiveSection, terms: list[Term]) -> str:
    names = loss_names(terms)
    if len(names) == 1 and objective.losses is None:
        return f"loss: {names[0]}"
    return f"losses: {', '.join(names)}"
