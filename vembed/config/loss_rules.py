"""Rules and remarks on the losses, teachers and guides of a run."""

from __future__ import annotations

from vembed.config.entries import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from vembed.config.schema import TrainConfig
from vembed.config.terms import (
    FOLLOWS_TEACHER,
    LOSS_OPTIONS,
    READS,
    SCORES,
    data_entries,
    followed_teacher,
    guide_of,
    has_tasks,
    listed_teachers,
    losses_of,
    needed_teachers,
    needs_whole_batch,
    run_terms,
    takes_vectors,
)
from vembed.config.violation import Rule, Violation, word


def _triplet_has_negatives(config: TrainConfig) -> Violation | None:
    if "triplet" not in losses_of(config) or config.data.max_negatives != 0:
        return None
    return Violation(
        ("loss", "max_negatives"),
        "loss: triplet compares each positive with given negatives, and max_negatives: 0 leaves none: raise it",
    )


def _learned_temperature_in_range(config: TrainConfig) -> Violation | None:
    learned = [
        term
        for _, term in run_terms(config)
        if term.objective.learn_temperature or term.objective.loss == "sigmoid"
    ]
    outside = [
        one.objective.temperature
        for one in learned
        if not LOWEST_TEMPERATURE <= one.objective.temperature <= HIGHEST_TEMPERATURE
    ]
    if not outside:
        return None
    return Violation(
        ("temperature", "learn_temperature", "losses"),
        f"temperature: {outside[0]:g} is where a learned temperature starts, and it is kept from "
        f"{LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}: start inside",
    )


def _one_loss_or_a_list(config: TrainConfig) -> Violation | None:
    # A config that was written by a run names every option, and `loss` with its default value.
    if config.objective.losses is None or (
        config.objective.losses and config.objective.loss == "infonce"
    ):
        return None
    problem = f"and loss: {config.objective.loss} are two ways to say one thing: keep one of them"
    return Violation(
        ("losses", "loss"),
        f"losses {problem if config.objective.losses else 'is an empty list: name a loss'}",
    )


def _teachers_have_names_of_their_own(config: TrainConfig) -> Violation | None:
    labels = [one.label for one in listed_teachers(config)]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is None and SCORES not in labels:
        return None
    if twice is None:
        return Violation(
            ("teachers",),
            f"teachers: the name {SCORES!r} stands for scores in the data: choose another",
        )
    return Violation(
        ("teachers",),
        f"teachers: {twice} is named twice: keep it once, or give each entry a name",
    )


def _losses_have_teachers(config: TrainConfig) -> Violation | None:
    for _, term in run_terms(config):
        teacher, what = followed_teacher(term), f"loss: {term.objective.loss}"
        if term.objective.loss in FOLLOWS_TEACHER and teacher is None:
            return Violation(
                ("loss", "losses", "teacher"),
                f"{what} follows a teacher, and the config names none: give teacher a model, or scores where the data "
                "have them",
            )
        if teacher == SCORES and takes_vectors(term):
            more = (
                " with distill_candidates: batch" if term.objective.loss == "kl" else ""
            )
            return Violation(
                ("loss", "losses", "teacher"),
                f"{what}{more} needs vectors, and teacher: {SCORES} has scores of listed pairs alone: name a model",
            )
        if guide_of(term) == SCORES:
            return Violation(
                ("guide",),
                f"guide: {SCORES} cannot score pairs that nobody listed: give guide an embedding model",
            )
    return None


def _tasks_have_batches_of_their_own(config: TrainConfig) -> Violation | None:
    entries = data_entries(config)
    sized = any(
        one.batch_size is not None or one.global_batch_size is not None
        for one in entries
    )
    if config.data.homogeneous_batches or not (has_tasks(config) or sized):
        return None
    what = "losses or a temperature" if has_tasks(config) else "a batch size"
    return Violation(
        ("data_path", "homogeneous_batches"),
        f"data_path: a source with {what} of its own needs batches of its own: set homogeneous_batches: true",
    )


def _batches_are_counted_alike(config: TrainConfig) -> Violation | None:
    given, wanted = "global_batch_size", "batch_size"
    if config.batch.global_batch_size is not None:
        given, wanted = wanted, given
    other = next(
        (one for one in data_entries(config) if dict(one)[given] is not None), None
    )
    if other is None:
        return None
    return Violation(
        ("data_path", "batch_size", "global_batch_size"),
        f"data_path: {other.name or other.path} has {given}: {dict(other)[given]:,d}, and the run counts by {wanted}: "
        f"give the source {wanted} too",
    )


def _tasks_are_scored_beside_the_run(config: TrainConfig) -> Violation | None:
    own = next(
        (one for one in data_entries(config) if one.val_data_path is not None), None
    )
    if (
        own is None
        or config.data.val_data_path is not None
        or config.data.val_split is not None
    ):
        return None
    return Violation(
        ("data_path", "val_data_path"),
        f"data_path: {own.name or own.path} has val_data_path, and the run has none: give it val_data_path too, whose "
        "score chooses the checkpoint",
    )


def _turns_need_batches_of_one_source(config: TrainConfig) -> Violation | None:
    if (
        config.data.sampling != "round_robin"
        or config.data.homogeneous_batches
        or len(data_entries(config)) < 2
    ):
        return None
    return Violation(
        ("sampling", "homogeneous_batches"),
        "sampling: round_robin takes a batch of each source in turn: set homogeneous_batches: true",
    )


def _angles_need_even_sizes(config: TrainConfig) -> Violation | None:
    odd = [dim for dim in config.matryoshka.mrl_dims or [] if dim % 2]
    if not odd or all(term.objective.loss != "angle" for _, term in run_terms(config)):
        return None
    return Violation(
        ("loss", "losses", "mrl_dims"),
        f"loss: angle reads halves of a vector as real and imaginary parts, and mrl_dims has {odd[0]:,d}: give even "
        "sizes",
    )


def _mixtures_are_candidates(config: TrainConfig) -> Violation | None:
    if config.objective.negatives_from != "own_rank" or not any(
        term.objective.mix_negatives for _, term in run_terms(config)
    ):
        return None
    return Violation(
        ("mix_negatives", "negatives_from"),
        "mix_negatives makes negatives of the whole batch, and negatives_from: own_rank leaves them out: keep one of "
        "them",
    )


def _ring_losses(config: TrainConfig) -> Violation | None:
    loss = needs_whole_batch(config)
    if config.objective.loss_exchange != "ring" or loss is None:
        return None
    return Violation(
        ("loss_exchange", "loss", "losses"),
        f"loss_exchange: ring passes embeddings on block by block, and loss: {loss} compares those of the whole batch "
        "at once: use loss_exchange: gather, or auto",
    )


def _mined_negatives_are_read(config: TrainConfig) -> Violation | None:
    if config.data.mine is None:
        return None
    terms = [term for _, term in run_terms(config)]
    if not any("max_negatives" in READS[term.objective.loss] for term in terms):
        return Violation(
            ("mine", "loss", "losses"),
            f"mine adds hard negatives, and loss: {', '.join(losses_of(config))} reads none: use loss: infonce, or "
            "leave mine out",
        )
    if any(followed_teacher(term) == SCORES for term in terms):
        return Violation(
            ("mine", "teacher"),
            f"mine adds negatives that have no scores in the data, and teacher: {SCORES} follows these: name a model "
            "as teacher, or leave mine out",
        )
    return None


def _ring_of_float_embeddings(config: TrainConfig) -> Violation | None:
    if (
        config.objective.loss_exchange != "ring"
        or config.objective.quantize_embeddings is None
    ):
        return None
    return Violation(
        ("loss_exchange", "quantize_embeddings"),
        f"quantize_embeddings: {config.objective.quantize_embeddings} takes its levels from the whole batch, which "
        "loss_exchange: ring does not hold: use loss_exchange: gather, or auto",
    )


LOSS_RULES: tuple[Rule, ...] = (
    _triplet_has_negatives,
    _learned_temperature_in_range,
    _one_loss_or_a_list,
    _teachers_have_names_of_their_own,
    _losses_have_teachers,
    _tasks_have_batches_of_their_own,
    _batches_are_counted_alike,
    _turns_need_batches_of_one_source,
    _tasks_are_scored_beside_the_run,
    _angles_need_even_sizes,
    _mixtures_are_candidates,
    _ring_losses,
    _mined_negatives_are_read,
    _ring_of_float_embeddings,
)


def loss_remarks(config: TrainConfig, set_apart: set[str]) -> list[str]:
    """Return remarks on options that none of the run's losses reads, or that an entry of `losses` does not read."""
    values = config.options()
    losses = tuple(dict.fromkeys(term.objective.loss for _, term in run_terms(config)))
    unread = LOSS_OPTIONS.difference(*(READS[loss] for loss in losses))
    which = (
        f"loss: {losses[0]}"
        if len(losses) == 1 and config.objective.losses is None
        else f"losses: {', '.join(losses)}"
    )
    # One guide or teacher may serve some of the losses, so an option of the run needs one loss that reads it.
    found = [
        f"{name}: {word(values[name])} has no effect with {which}"
        for name in sorted(unread & set_apart)
    ]
    for number, term in enumerate(config.objective.losses or [], 1):
        own = {
            name: value
            for name, value in dict(term).items()
            if value is not None and name in LOSS_OPTIONS
        }
        found += [
            f"losses, entry {number}: {name}: {word(own[name])} has no effect with loss: {term.loss}"
            for name in sorted(own.keys() - READS[term.loss])
        ]
    if not any(term.objective.guide for _, term in run_terms(config)):
        found += [
            f"{name}: {word(values[name])} has no effect without guide"
            for name in ("guide_margin", "guide_margin_kind")
            if name in set_apart
        ]
    needed = {one.label for one in needed_teachers(config)}
    found += [
        f"teachers: {one.label} has no effect: no loss follows it, and it is no guide"
        for one in listed_teachers(config)
        if one.label not in needed
    ]
    return found
