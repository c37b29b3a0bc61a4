"""The data of a run: training examples, and validation data that are given or held out, compared with each other.

What is held out is a pure function of seed and contents: groups of examples that belong together. A group is what equal
and nearly equal queries, and equal and nearly equal documents, connect. Where most examples are connected, for example
by answers that many queries share, groups are those of queries alone.
"""

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from vembed.config.decisions import decide_epochs, steps_of_epochs
from vembed.config.schema import (
    BatchSection,
    DataSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    parse_sampling,
)
from vembed.config.terms import source_batch_sizes, source_group_names, source_groups
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.example_store import ExampleStore, open_examples
from vembed.data.examples import Example, Examples, Item, Kind, ReadAs, spread
from vembed.data.images.files import image_problem
from vembed.data.near_duplicates import (
    Groups,
    comparable_text,
    near_links,
    ngrams,
    normal_key,
    words,
)
from vembed.errors import UserError
from vembed.evaluation.dataset import (
    EvalData,
    are_scored_pairs,
    from_examples,
    open_eval_data,
)
from vembed.progress import counted

log = logging.getLogger("vembed")


@dataclass(frozen=True)
class Sets:
    """Training and validation data of a run."""

    examples: ExampleStore
    evaluation: EvalData | None
    warnings: tuple[str, ...] = ()
    """Problems in the data, for the log and the report. Those between training and validation data are looked for on
    ranks that compare."""
    by_task: Mapping[str, EvalData] = field(default_factory=dict)
    """Validation data of single tasks, by the task's name."""


def open_sets(
    options: DataSection,
    objective: ObjectiveSection,
    *,
    model_name: str,
    seed: int,
    compares: bool,
) -> Sets:
    """Open and log the data of a run. `seed`: of `val_split`. `compares`: look for validation data in the training
    data, on one rank."""
    store = open_examples(
        options,
        options.data_path,
        objective,
        model_name=model_name,
    )
    for line in store.summary():
        log.info(line)
    doubts = store.warnings()
    for line in doubts:
        log.warning(line)
    evaluation = None
    # Of sources that name validation data, with the prompts of the source.
    by_task: dict[str, EvalData] = {}
    for number, source in enumerate(options.sources()):
        if source.val_data_path is not None:
            mapping = source.column_mapping or options.column_mapping
            as_source = options.model_copy(update={"column_mapping": mapping})
            data = open_eval_data(as_source, source.val_data_path, objective)
            name = source_group_names(options, store.names)[number]
            free_name = f"{name} {len(by_task) + 1}" if name in by_task else name
            by_task[free_name] = data.read_as(ReadAs.of(source))
    if options.val_split is not None:
        parts = hold_out(store, options.val_split, seed)
        store = parts.train
        held = {source for source, _ in parts.examples}
        scored = {source for source in held if are_scored_pairs(parts.of([source]))}
        # Correlations with given scores and retrieval have no common scale: the main score is one of them.
        if scored == held:
            scored.clear()
        notes = parts.notes
        if scored:
            notes.append("without scored pairs")
        sources = [source for source in range(len(store.names)) if source not in scored]
        names = ", ".join(store.names[source] for source in sources)
        # Not rounded: a share may be less than a percent.
        title = f"{100 * options.val_split:g}% of the queries of {names}"
        evaluation = parts.evaluation(sources, title, notes)
        by_task = {**held_by_task(options, parts), **by_task}
        log.info(
            f"val_split: {len(store):,d} examples to train on, {len(parts.examples):,d} held out"
        )
    elif options.val_data_path:
        evaluation = open_eval_data(options, options.val_data_path, objective)
    if evaluation is None:
        return Sets(store, None, tuple(doubts))
    log.info(evaluation.summary())
    for name, data in by_task.items():
        log.info(f"task {name}: {data.summary()}")
    # On one rank: all would find the same, and it reads all data.
    if compares:
        for line in overlap_warnings(store, evaluation.queries):
            log.warning(line)
            doubts.append(line)
    return Sets(store, evaluation, tuple(doubts), by_task)


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """The batches of a run, in their order, and its steps."""

    batch_schedule: BatchSchedule
    batches_per_step: int
    """Global batches of an optimizer step: gradient_accumulation_steps."""
    epochs: float
    """Passes over the data, where `max_steps` does not say how long the run is."""
    total_steps: int
    """Optimizer steps of the whole run."""
    examples_per_step: int
    """Examples of all global batches of an optimizer step, as the options say."""
    mean_examples_per_step: float
    """Examples that a step has on average: fewer where the data fill no batch, or where sources have batches of their own."""


def run_length(
    store: ExampleStore,
    data: DataSection,
    batch: BatchSection,
    model: ModelSection,
    optimizer: OptimizerSection,
    *,
    seed: int,
    world_size: int,
) -> RunLength:
    """Fix and log the order of the batches and the number of steps. Reads the model's description where `epochs` is left
    to `auto`. Otherwise the checkpoint is checked first, and a model of another kind is refused by name."""
    is_open = not optimizer.sets_length()
    has_logit_scale = False
    if is_open:
        from vembed.models.families.description import describe

        has_logit_scale = describe(model).family_traits.has_logit_scale_and_bias
    epochs = decide_epochs(
        optimizer, model, len(store), has_logit_scale=has_logit_scale
    )
    if is_open:
        log.info(f"epochs: {epochs.value:g} (auto; {epochs.reason})")
    size = batch.global_batch_size or batch.batch_size * world_size
    schedule = BatchSchedule(
        store.sizes,
        size,
        seed,
        weights=store.weights,
        names=store.names,
        source_groups=source_groups(data) if data.homogeneous_batches else None,
        batch_sizes=source_batch_sizes(data, batch, size),
        sampling=parse_sampling(data.sampling),
        keys=store.all_keys() if data.no_duplicates else None,
        labels=store.labels,
    )
    level = logging.WARNING if schedule.is_short else logging.INFO
    log.log(level, schedule.summary())
    batches_per_step = batch.gradient_accumulation_steps
    total_steps = optimizer.max_steps or steps_of_epochs(
        epochs.value, schedule.batches_per_epoch, batches_per_step
    )
    num_used = schedule.num_drawn - schedule.num_left_out
    processes = counted(world_size, "process", "processes")
    smallest = schedule.smallest_batch
    examples = smallest if schedule.is_short else size
    line = f"global batch: {examples:,d} examples over {processes} ({examples / world_size:,.6g} each)"
    if batches_per_step > 1:
        line += f", {batches_per_step} batches per step"
    log.info(f"{line}; {counted(total_steps, 'step')}")
    if smallest < world_size:
        raise UserError(
            f"the smallest batch has {smallest} examples, fewer than the {world_size} processes: use fewer processes, "
            "a larger global_batch_size, or more data"
        )
    return RunLength(
        batch_schedule=schedule,
        batches_per_step=batches_per_step,
        epochs=epochs.value,
        total_steps=total_steps,
        examples_per_step=size * batches_per_step,
        mean_examples_per_step=num_used / schedule.batches_per_epoch * batches_per_step,
    )


def held_by_task(data: DataSection, parts: "HeldOut") -> dict[str, EvalData]:
    """Return the examples held out of each task, where batches are of one task and there are several."""
    names = source_group_names(data, parts.train.names)
    if not data.homogeneous_batches or len(set(names)) < 2:
        return {}
    by_task = {}
    for name in dict.fromkeys(names):
        sources = [source for source in range(len(names)) if names[source] == name]
        try:
            by_task[name] = parts.evaluation(sources, f"those held out of {name}")
        except UserError as error:  # too few for a score
            log.info(f"task {name} is not scored by itself: {error}")
    return by_task


MIN_SHARED_WORDS = 0.85
"""Queries are near-duplicates if this share of the shorter one's different words is in the other."""
MIN_COMPARED_QUERY_WORDS = 5
MIN_QUERY_SIZE_RATIO = 0.5
"""The shorter one has at least half as many different words: long texts hold most words of a short one by chance."""
MIN_SHARED_NGRAMS = 0.9
"""Documents are near-duplicates if this share of the shorter one's word 3-grams is in the other."""
MAX_COMPARED_TEXTS = 300_000
"""With more different queries, or documents, only equal ones are kept together."""
MAX_SEARCHED_DOCUMENTS = 20_000
"""Documents of the training examples that an evaluation searches beside those that are held out."""
MAX_COMPARED_EXAMPLES = 1_000_000
"""Training examples that are compared with validation data; of more, a sample spread over all."""
NUM_PREVIEWS = 3
SHOWN_CHARACTERS = 70
SMALL_GROUPS = 4
"""Groups that are held out at least, where enough of them are so small."""
MIN_CHOICE = 2
"""Groups of queries and documents are used if those that can be held out have so many times the examples wanted."""


FIRST_DOCUMENT = 2**63
"""Is added to the keys of documents, which have 63 bits."""


@dataclass(frozen=True)
class HeldOut:
    """The two parts of the data."""

    store: ExampleStore
    """Both parts."""
    train: ExampleStore
    examples: Sequence[tuple[int, Example]]
    """Examples that are held out, each with the number of its source."""
    notes: list[str]
    """What the score on these data has to be read with."""

    def of(self, sources: Collection[int]) -> list[Example]:
        """Return the examples that are held out of these sources."""
        return [example for source, example in self.examples if source in sources]

    def evaluation(
        self, sources: Collection[int], title: str, notes: Sequence[str] = ()
    ) -> EvalData:
        """Return these examples as evaluation data over all documents of the sources."""
        documents = [item for source, item in self.documents if source in sources]
        return from_examples(self.of(sources), title, documents=documents, notes=notes)

    @cached_property
    def documents(self) -> Sequence[tuple[int, Item]]:
        """Documents of all examples, each with the number of its source: all, or of large data a sample, spread over
        equally many examples of each source where it has them. `max_negatives`, an option of the training step, leaves
        none out."""
        sizes = self.store.sizes
        starts = np.cumsum((0, *sizes)).tolist()
        indices: list[int] = []
        num_sources_left = len(sizes)
        # Small sources come first: what they leave is for the others.
        for source in np.argsort(sizes, kind="stable").tolist():
            share = (MAX_SEARCHED_DOCUMENTS - len(indices)) // num_sources_left
            num_sources_left -= 1
            for number in spread(sizes[source], max(share, 1)):
                indices.append(starts[source] + number)
        documents: dict[tuple[int, int], Item] = {}
        num_unreadable = 0
        for index in sorted(indices):
            example = self.store[index]
            # The texts of a class are relevant to each other: those of training would count as wrong.
            if example.label is not None:
                continue
            source = self.store.source_of(index)
            for item in self.store.all_documents(index):
                # The first pass checks the images of documents that are trained on.
                is_checked = item in example.documents
                if not is_checked and any(map(image_problem, item.images)):
                    num_unreadable += 1
                    continue
                documents.setdefault((source, item.key()), item)
        if num_unreadable:
            log.warning(
                f"val_split: {num_unreadable:,d} negatives beyond max_negatives have images that cannot be read, and are "
                "not searched"
            )
        keyed = [(source, item) for (source, _), item in documents.items()]
        return [keyed[place] for place in spread(len(keyed), MAX_SEARCHED_DOCUMENTS)]


def hold_out(
    store: ExampleStore,
    share: float,
    seed: int,
) -> HeldOut:
    """Hold out this share of the examples."""
    groups = example_groups(store)
    num_held_out = max(1, round(share * len(store)))
    # The strictest grouping that leaves enough to choose from, and what a looser one has to be read with.
    ways = [
        (groups.connected, MIN_CHOICE * num_held_out, ""),
        (
            groups.by_query,
            num_held_out,
            "queries alone are held out, because most examples are connected by equal or nearly equal texts",
        ),
        (
            groups.by_equal_query,
            0,
            "queries nearly equal to those of training are among them, because most are nearly equal to another",
        ),
    ]
    note = ""
    for group_of, num_needed, reason in ways:
        note = reason
        sizes = Counter(group_of.tolist())
        # Examples of groups that are small enough to be held out.
        num_available = sum(size for size in sizes.values() if size <= num_held_out)
        if num_available >= num_needed:
            break
    # Texts from one template are one group through chains of near-duplicates, which may be most of the data. A large
    # group would be most of what is held out, so smaller ones are taken where there are enough.
    largest = max(1, num_held_out // SMALL_GROUPS)
    num_small = sum(size for size in sizes.values() if size <= largest)
    if num_small < MIN_CHOICE * num_held_out:
        largest = max(num_held_out, min(sizes.values()))
    chosen = []
    count = 0

    # By a hash of seed and content: what is held out does not depend on the order of the records.
    def draw(group: int) -> bytes:
        return hashlib.blake2b(f"{seed}:{group}".encode(), digest_size=8).digest()

    for group in sorted(sizes, key=draw):
        if count < num_held_out and sizes[group] <= largest:
            chosen.append(group)
            count += sizes[group]
    is_held = np.isin(group_of, chosen)
    if is_held.all():
        raise UserError(
            f"val_split: {share:g} of {len(store):,d} examples with {len(sizes):,d} different queries leaves nothing "
            "to train on (equal queries are held out together); give val_data_path, or more data"
        )
    indices = np.flatnonzero(is_held).tolist()
    # A text with a label has itself as positive here: the others of its class may be trained on.
    held = [(store.source_of(index), store.pair(index, index)) for index in indices]
    train = store.subset(~is_held, note=f"val_split {share:g}")
    is_held_pair = is_held[groups.pair_examples]
    documents = np.unique(groups.pair_documents[is_held_pair])
    trained = np.intersect1d(documents, groups.pair_documents[~is_held_pair])
    notes = []
    # Texts with labels have no documents.
    if len(documents):
        notes.append(
            f"{len(trained):,d} of the {len(documents):,d} documents that should be found are positives of training "
            "examples too"
        )
        if note:
            notes.append(note)
    return HeldOut(store, train, held, notes)


@dataclass(frozen=True)
class ExampleGroups:
    """Groups of examples. Their numbers depend on the contents alone."""

    by_equal_query: np.ndarray
    """[n] the same for equal queries."""
    by_query: np.ndarray
    """[n] the same for equal and nearly equal queries."""
    connected: np.ndarray
    """[n] the same where documents connect examples as well."""
    pair_examples: np.ndarray
    """[p] number of the example of each (example, positive)."""
    pair_documents: np.ndarray
    """[p] key of the positive."""


def example_groups(store: ExampleStore) -> ExampleGroups:
    """Return the groups of all examples."""
    query_keys = array("q")
    texts: dict[Kind, dict[int, str]] = {"query": {}, "document": {}}
    pair_examples = array("q")
    pair_documents = array("q")

    def key_of(item: Item, kind: Kind) -> int:
        key = normal_key(item)
        texts[kind][key] = comparable_text(item)
        return key

    for index, example in enumerate(store):
        query_keys.append(key_of(example.query, "query"))
        # The positive of a text with a label is any other one of its class.
        for item in example.positives if example.label is None else ():
            pair_examples.append(index)
            pair_documents.append(key_of(item, "document"))
    query_links = _near_links(
        texts["query"],
        words,
        threshold=MIN_SHARED_WORDS,
        min_features=MIN_COMPARED_QUERY_WORDS,
        min_size_ratio=MIN_QUERY_SIZE_RATIO,
    )
    document_links = _near_links(texts["document"], ngrams, threshold=MIN_SHARED_NGRAMS)
    by_query = Groups()
    connected = Groups()
    for first, second in query_links:
        by_query.join(first, second)
        connected.join(first, second)
    # A query and a document may be the same text. Documents have larger numbers, so that queries name the groups.
    for first, second in document_links:
        connected.join(first + FIRST_DOCUMENT, second + FIRST_DOCUMENT)
    for index, document in zip(pair_examples, pair_documents, strict=True):
        connected.join(query_keys[index], document + FIRST_DOCUMENT)
    return ExampleGroups(
        np.array(query_keys, np.int64),
        np.array([by_query.of(key) for key in query_keys], np.int64),
        np.array([connected.of(key) for key in query_keys], np.int64),
        np.array(pair_examples, np.int64),
        np.array(pair_documents, np.int64),
    )


def _near_links(
    texts: dict[int, str],
    features: Callable[[str], Iterable[Hashable]],
    **options: float,
) -> list[tuple[int, int]]:
    """Return pairs of keys that connect near-duplicates."""
    if len(texts) > MAX_COMPARED_TEXTS:
        return []
    # In the order of the keys, so that the groups do not depend on that of the records.
    keys = sorted(texts)
    links = near_links((features(texts[key]) for key in keys), **options)
    return [(keys[first], keys[second]) for first, second in links]


def overlap_warnings(train: Examples, queries: Iterable[Item]) -> list[str]:
    """Return a sentence on the queries of validation data that are queries of the training data too, if there are any.

    Texts are equal if they differ in case, spaces and punctuation alone, images if their files are equal. Documents that
    are shared are no fault: a corpus serves both.
    """
    validation = {normal_key(query): query for query in queries}
    shared = {}
    for index in spread(len(train), MAX_COMPARED_EXAMPLES):
        key = normal_key(train[index].query)
        if key in validation:
            shared[key] = validation[key]
    if not shared:
        return []
    samples = map(short_item, list(shared.values())[:NUM_PREVIEWS])
    return [
        f"queries of the validation data that are in the training data too: {len(shared):,d} of {len(validation):,d} "
        f"({len(shared) / len(validation):.1%}), for example: {'; '.join(samples)}; what was learned says little about new "
        "queries (val_split holds out whole queries instead)"
    ]


def short_item(item: Item, length: int = SHOWN_CHARACTERS) -> str:
    """Return a short form of an item for messages."""
    parts = []
    if text := " ".join((item.text or "").split()):
        parts.append(repr(text))
    for image in item.images:
        # The name with its folder, which is often the class.
        place = Path(image.path or "an image").parts[-2:]
        parts.append("/".join(place))
    joined = " + ".join(parts)
    return joined if len(joined) <= length else joined[: length - 3] + "..."
