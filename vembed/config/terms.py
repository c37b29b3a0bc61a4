"""Terms of a run's loss, and the teachers that they name: derived from the options, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from vembed.config.entries import DataSource, Guard, LossTerm, Teacher
from vembed.config.schema import TrainConfig

SCORES = "scores"
"""Name of the teacher whose scores are in the data."""
SCORED = frozenset({"cosent", "cosine", "angle"})
"""Losses that need a score for every pair."""
FOLLOWS_TEACHER = frozenset(
    {"kl", "margin_mse", "score_mse", "embedding", "relational"}
)
"""Losses without a meaning of their own: they need a teacher."""
MAY_FOLLOW_TEACHER = FOLLOWS_TEACHER | {"listwise", "ranknet"}
NEEDS_VECTORS = frozenset({"embedding", "relational", "anchor"})
ANCHOR = "anchor"
"""Loss that follows the start model."""
TEXTS_ALONE = frozenset({"none", ANCHOR, "embedding", "relational", "spread_out"})
"""Losses that read texts without pairs."""
GUIDED = frozenset({"infonce", "sigmoid", "circle"})
OF_ORDER = ("cosent", "angle")
"""Losses that compare the pairs of a batch with each other by their scores."""
ORDER_TEMPERATURE = 0.1
"""Temperature of these losses where none is given: their sum runs over all comparisons of a batch, of
which a smaller one leaves the few worst."""


def loss_terms(config: TrainConfig) -> list[tuple[float, TrainConfig]]:
    """Return each term's weight and the config of a run that had this term as its only loss."""
    terms = [(1.0, config)]
    if config.objective.losses is not None:
        terms = [
            (term.weight, with_term(config, term)) for term in config.objective.losses
        ]
    if config.objective.anchor_weight and all(
        term.objective.loss not in ("none", ANCHOR) for _, term in terms
    ):
        terms.append(
            (
                config.objective.anchor_weight,
                config.changed(**{"loss": ANCHOR, "losses": None}),
            )
        )
    return terms


def with_temperature(config: TrainConfig, own: float | None = None) -> TrainConfig:
    """Return the config with the temperature that suits its loss, if none is given. `own`: the temperature with which
    the model was trained (CLIP, SigLIP)."""
    if config.objective.losses is not None or "temperature" in config.given:
        return config
    usual = (
        ORDER_TEMPERATURE
        if config.objective.loss in OF_ORDER
        else own
        if config.objective.loss == "infonce"
        else None
    )
    if usual is None:
        return config
    found = config.changed(**{"temperature": usual})
    found.objective.model_fields_set.discard(
        "temperature"
    )  # still a default: a learned one is not said to be given
    return found


def with_term(config: TrainConfig, term: LossTerm) -> TrainConfig:
    """Return the config with one term's own options in place of the run's."""
    own = {
        name: value
        for name, value in dict(term).items()
        if name != "weight" and value is not None
    }
    return config.changed(**{**own, "losses": None})


def source_config(config: TrainConfig, source: str | DataSource) -> TrainConfig:
    """Return the config of a run that had one source of `data_path` alone, with the source's own options."""
    if isinstance(source, str):
        return config
    own: dict[str, object] = {
        "temperature": source.temperature,
        "max_negatives": source.max_negatives,
    }
    own = {name: value for name, value in own.items() if value is not None}
    if source.losses is not None:
        own |= {"losses": source.losses}
    return config.changed(**own) if own else config


def data_sources(config: TrainConfig) -> list[str | DataSource]:
    """Return `data_path` as a list, of one source too."""
    return (
        config.data.data_path
        if isinstance(config.data.data_path, list)
        else [config.data.data_path]
    )


def source_configs(config: TrainConfig) -> list[TrainConfig]:
    """Return `source_config` for each source."""
    return [source_config(config, source) for source in data_sources(config)] or [
        config
    ]


def has_tasks(config: TrainConfig) -> bool:
    """Return whether sources differ in their losses."""
    return any(
        one.losses is not None or one.temperature is not None
        for one in data_entries(config)
    )


def data_entries(config: TrainConfig) -> list[DataSource]:
    """Return the entries of `data_path`."""
    return [
        DataSource(path=one) if isinstance(one, str) else one
        for one in data_sources(config)
    ]


def task_numbers(config: TrainConfig) -> list[int]:
    """Return the number of each source's task: its own, or with `homogeneous_batches: task` that of the first source
    with the same losses, temperature and batch size."""
    entries = data_entries(config)
    if config.data.homogeneous_batches != "task":
        return list(range(len(entries)))
    tasks = [
        (one.losses, one.temperature, one.batch_size, one.global_batch_size)
        for one in entries
    ]
    return [tasks.index(one) for one in tasks]


def task_names(config: TrainConfig, names: Sequence[str]) -> list[str]:
    """Return the name of the task of each source, from the names of the sources."""
    numbers = task_numbers(config)
    return [
        " and ".join(
            name for name, one in zip(names, numbers, strict=True) if one == number
        )
        for number in numbers
    ]


def source_batch_sizes(config: TrainConfig, world_size: int) -> list[int]:
    """Return the examples per step of each source, over all processes."""
    # A resumed run on another number of processes keeps its global batch; the sources keep their share of it.
    size = config.batch.global_batch_size or config.batch.batch_size * world_size
    return [
        one.global_batch_size
        or (
            one.batch_size * size // config.batch.batch_size
            if one.batch_size is not None
            else size
        )
        for one in data_entries(config)
    ]


def run_terms(config: TrainConfig) -> list[tuple[float, TrainConfig]]:
    """Return `loss_terms` of all sources."""
    return [term for one in source_configs(config) for term in loss_terms(one)]


def compares_listed_alone(config: TrainConfig) -> bool:
    """Return whether all losses of a run compare a positive with the hard negatives of its record, and nothing else."""
    return all(
        term.objective.loss in ("margin_mse", "score_mse")
        or (
            term.objective.loss == "kl"
            and term.objective.distill_candidates == "listed"
        )
        for _, term in run_terms(config)
    )


def listed_teachers(config: TrainConfig) -> list[Teacher]:
    """Return the entries of `teachers`."""
    return [
        Teacher(model=one) if isinstance(one, str) else one
        for one in config.objective.teachers or []
    ]


def listed_guards(config: TrainConfig) -> list[Guard]:
    """Return the entries of `guards`."""
    return [
        Guard(path=one) if isinstance(one, str) else one
        for one in config.evaluation.guards or []
    ]


def followed_teacher(config: TrainConfig) -> str | None:
    """Return the name of the teacher that the loss of a single-term config follows."""
    if config.objective.loss == ANCHOR:
        return config.model.model_name
    if config.objective.loss not in MAY_FOLLOW_TEACHER:
        return None
    if config.objective.teacher is not None:
        return _label(config, config.objective.teacher)
    listed = listed_teachers(config)
    if (
        config.objective.loss not in FOLLOWS_TEACHER
    ):  # graded scores of the data are what these losses are made for
        return None
    return listed[0].label if listed else None


def reads_scores(config: TrainConfig) -> bool:
    """Return whether a loss of the run reads the scores of the data."""
    return any(
        term.objective.loss in SCORED
        or (
            term.objective.loss in MAY_FOLLOW_TEACHER
            and followed_teacher(term) in (None, SCORES)
        )
        for _, term in loss_terms(config)
    )


def guide_of(config: TrainConfig) -> str | None:
    """Return the name of the guide of a single-term config."""
    if config.objective.loss not in GUIDED or config.objective.guide is None:
        return None
    return _label(config, config.objective.guide)


def needed_teachers(config: TrainConfig) -> list[Teacher]:
    """Return the models that the terms' losses follow or are guided by, each once, in the order of their terms."""
    by_label = {one.label: one for one in listed_teachers(config)}
    found: dict[str, Teacher] = {}
    for _, term in run_terms(config):
        for name in (followed_teacher(term), guide_of(term)):
            if name is not None and name != SCORES:
                found[name] = by_label.get(name) or _model(config, name)
    return list(found.values())


def _model(config: TrainConfig, name: str) -> Teacher:
    """Return the teacher that is named by its model alone. The start model reads what the run reads."""
    if name != config.model.model_name:
        return Teacher(model=name)
    return Teacher(
        model=name,
        query_prompt=config.model.query_prompt,
        document_prompt=config.model.document_prompt,
        max_length=config.model.max_length,
    )


def _label(config: TrainConfig, name: str) -> str:
    """The label of a teacher that may be named by its model too."""
    for one in listed_teachers(config):
        if name in (one.label, one.model):
            return one.label
    return name


def losses_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the names of the run's losses."""
    return tuple(dict.fromkeys(term.objective.loss for _, term in loss_terms(config)))


def takes_vectors(term: TrainConfig) -> bool:
    """Return whether the loss of a single-term config needs the vectors of its teacher, not only scores of pairs."""
    return term.objective.loss in NEEDS_VECTORS or (
        term.objective.loss == "kl" and term.objective.distill_candidates == "batch"
    )


WHOLE_BATCH = frozenset(
    {"cosent", "angle", "listwise", "ranknet", "relational", "spread_out"}
)
"""Losses that compare what a ring never has in one place: they need the embeddings of all processes at once."""


def needs_whole_batch(config: TrainConfig) -> str | None:
    """Return the run's first loss that needs all embeddings on every process, or None."""
    return next(
        (
            term.objective.loss
            for _, term in run_terms(config)
            if term.objective.loss in WHOLE_BATCH
        ),
        None,
    )


_CANDIDATES = frozenset(
    {
        "mask_duplicates",
        "hard_negatives_scope",
        "negatives_from",
        "query_query_negatives",
        "document_document_negatives",
        "false_negative_margin",
        "guide",
        "guide_margin",
        "guide_margin_kind",
        "max_negatives",
        "temperature",
    }
)
_LISTED = frozenset({"teacher", "mask_duplicates", "max_negatives"})
_SOFTMAX = _LISTED | {"temperature", "learn_temperature", "teacher_temperature"}
READS: dict[str, frozenset[str]] = {
    "infonce": _CANDIDATES
    | {
        "learn_temperature",
        "bidirectional",
        "hardness_alpha",
        "focal_gamma",
        "mix_negatives",
    },
    "sigmoid": _CANDIDATES,
    "circle": _CANDIDATES | {"bidirectional", "circle_margin"},
    "angle": frozenset({"temperature", "learn_temperature"}),
    "cosent": frozenset({"temperature", "learn_temperature"}),
    "cosine": frozenset(),
    "triplet": frozenset({"triplet_margin", "mask_duplicates", "max_negatives"}),
    "kl": _SOFTMAX | {"distill_candidates", "hard_negatives_scope", "negatives_from"},
    "margin_mse": _LISTED,
    "score_mse": _SOFTMAX,
    "embedding": frozenset({"teacher", "max_negatives"}),
    "relational": frozenset({"teacher", "max_negatives"}),
    "spread_out": frozenset({"mask_duplicates"}),
    "listwise": _SOFTMAX,
    "ranknet": _SOFTMAX - {"teacher_temperature"},
    ANCHOR: frozenset({"max_negatives"}),
    "none": frozenset(),
}
"""Options of the loss that each loss looks at."""
LOSS_OPTIONS = frozenset().union(*READS.values())
