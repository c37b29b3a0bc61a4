"""Judges: models that read a query and a document together, and a cascade of them whose judgements are cached."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from vembed.data.examples import ImageRoot, Item, distinct
from vembed.data.features import ANSWER_END, ANSWER_PROMPT
from vembed.data.records import Record
from vembed.data.row_store import KEY_BYTES, RowStore
from vembed.errors import UserError
from vembed.files import cache_folder, short_hash
from vembed.inference.encoding import from_all_ranks
from vembed.inference.reranker import Reranker
from vembed.mining.candidates import UNDECIDED, CandidateChunk, Chosen
from vembed.mining.endpoint import ChatClient, without_thoughts
from vembed.mining.inputs import (
    MiningInputs,
    content_key,
    open_command_session,
    open_rows,
)
from vembed.mining.options import (
    CommandConfigSource,
    Judge,
    JudgeConfig,
    MineConfig,
    WeightOptions,
    load_options,
)
from vembed.mining.output import (
    JUDGEMENTS_NAME,
    check_output,
    row_with_negatives,
    write_rows,
    written_judgements,
)
from vembed.mining.retrievers import files_identity
from vembed.models.families.model_files import whole_model_folder
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import Log, ProgressReport, duration

ENDPOINT_PROMPT = (
    "{instruction}.\n\nQuery: {query}\n\nDocument: {document}\n\n"
    "Is the document relevant to the query? Answer with one word, yes or no."
)
RELEVANCE = (
    "Given a search query, retrieve the passages that answer it or are relevant to it"
)
"""Definition of relevance for an endpoint, unless the options give one."""
ANSWER = re.compile(r"\b(yes|no|true|false|relevant|irrelevant|not)\b", re.IGNORECASE)
POSITIVE = frozenset({"yes", "true", "relevant"})
PAIRS_PER_WRITE = 256
"""Pairs that are judged before they are written down: what a kill loses."""

TextPair = tuple[str, str]
JudgePairs = Callable[[Sequence[TextPair]], Iterator[tuple[int, float | None]]]
"""Gives the number of each pair and how likely it is relevant, in any order; None where there is no usable answer."""


def answer_of(text: str) -> float | None:
    """1.0 for an answer that says yes, 0.0 for no, None for one that says neither."""
    match = ANSWER.search(without_thoughts(text))
    return None if match is None else float(match[1].lower() in POSITIVE)


def load_judge(
    judge: Judge,
    options: WeightOptions,
    device: torch.device,
) -> JudgePairs:
    """Return what judges pairs: an endpoint, a decoder that answers yes or no, or a cross-encoder."""
    if judge.base_url is not None and judge.kind in ("auto", "endpoint"):
        client = ChatClient(judge)

        def ask(pairs: Sequence[TextPair]) -> Iterator[tuple[int, float | None]]:
            prompts = []
            for query, document in pairs:
                # About four characters to a token.
                prompts.append(
                    ENDPOINT_PROMPT.format(
                        instruction=judge.instruction or RELEVANCE,
                        query=query,
                        document=document[: 4 * judge.max_length],
                    )
                )
            for number, text in client.complete(prompts, max_tokens=8):
                yield number, answer_of(text)

        return ask

    reranker = Reranker(
        whole_model_folder(judge.model, option="judges"),
        role=f"judges: {judge.model}",
        device=device,
        head=HEADS.get(judge.kind, "auto"),
        instruction=judge.instruction,
        max_length=judge.max_length,
        torch_dtype=options.torch_dtype,
        trust_remote_code=options.trust_remote_code,
    )

    def score(pairs: Sequence[TextPair]) -> Iterator[tuple[int, float | None]]:
        scores = torch.from_numpy(reranker.predict(pairs))
        return enumerate(torch.sigmoid(scores).tolist())

    return score


HEADS: dict[str, Literal["label", "answer"]] = {
    "cross_encoder": "label",
    "yes_no": "answer",
}
"""Kind of judge -> the layer that gives its score; of others, that of its files."""


@dataclass
class CachedJudge:
    """One judge, whose judgements are kept on disk by the contents of query and document, for all runs."""

    judge: Judge
    options: WeightOptions
    device: torch.device

    def __post_init__(self) -> None:
        judge = self.judge
        self._model: JudgePairs | None = None
        """Loaded when it is first asked. A later judge may never be."""
        identity = short_hash(
            judge.model if judge.base_url else files_identity(judge.model),
            judge.base_url,
            judge.kind,
            judge.instruction,
            judge.max_length,
            self.options.torch_dtype,
            [ANSWER_PROMPT, ANSWER_END, ENDPOINT_PROMPT],
        )
        self._store = RowStore(
            cache_folder() / "judgements", identity, "judges", ".judgements"
        )
        self.counts = {"asked": 0, "cached": 0, "undecided": 0}

    def answers(self, pairs: Sequence[TextPair]) -> list[float | None]:
        """Return how likely each pair is relevant; None where there is no usable answer."""
        keys = []
        for pair in pairs:
            content = json.dumps(pair).encode()
            keys.append(blake2b(content, digest_size=KEY_BYTES).digest())
        answers: list[float | None] = [None] * len(pairs)
        for place, row in self._store.find_rows(keys).items():
            answers[place] = float(row[0])
        missing = [place for place, answer in enumerate(answers) if answer is None]
        self.counts["cached"] += len(pairs) - len(missing)
        if not missing:
            return answers
        if self._model is None:
            self._model = load_judge(self.judge, self.options, self.device)
        for index, answer in self._model([pairs[place] for place in missing]):
            self.counts["asked"] += 1
            if answer is None or not math.isfinite(answer):
                self.counts["undecided"] += 1
                continue
            place = missing[index]
            answers[place] = answer
            # At once: what was answered before an endpoint ends it costs nothing again.
            self._store.add_rows([keys[place]], np.array([[answer]], np.float32))
        return answers

    def summary(self) -> str:
        """One line for the log. Collective."""
        asked, cached, undecided = collectives.sum_ints(list(self.counts.values()))
        where = f" at {self.judge.base_url}" if self.judge.base_url else ""
        line = f"judge {self.judge.model}{where}: {asked:,d} pairs asked, {cached:,d} known from before"
        if undecided:
            line += f", {undecided:,d} answers that are neither yes nor no (not used as negatives)"
        return line


class Cascade:
    """The judges of a config, the cheap one first."""

    def __init__(
        self,
        config: MineConfig | JudgeConfig,
        session: Session,
    ) -> None:
        self._judges = [
            CachedJudge(judge, config, session.device) for judge in config.judges
        ]
        self._session = session

    def judge(
        self,
        num_pairs: int,
        pair_of: Callable[[int], TextPair],
    ) -> tuple[np.ndarray, np.ndarray]:
        """[num_pairs] how likely each pair is relevant; UNDECIDED where no judge gave an answer. [num_pairs] whether it
        counts as relevant. Collective."""
        session = self._session
        # Dealt in turn: neighbouring pairs are of one query, and of similar length.
        numbers = range(session.rank, num_pairs, session.world_size)
        judgements = np.zeros((len(numbers), 2), np.float32)
        with ProgressReport("judging", active=session.is_main) as progress:
            for begin in range(0, len(numbers), PAIRS_PER_WRITE):
                pairs = [
                    pair_of(number)
                    for number in numbers[begin : begin + PAIRS_PER_WRITE]
                ]
                end = begin + len(pairs)
                judgements[begin:end] = self._decide(pairs)
                progress(end, len(numbers))
        judgements = from_all_ranks(judgements, num_pairs, session)
        return judgements[:, 0], judgements[:, 1] > 0

    def summary(self) -> list[str]:
        """One line for each judge. Collective."""
        return [judge.summary() for judge in self._judges]

    def _decide(self, pairs: Sequence[TextPair]) -> list[tuple[float, bool]]:
        """Return the probability that each pair is relevant, and whether it is, by the first judge that is sure."""
        judgements = [(UNDECIDED, False)] * len(pairs)
        open_pairs = list(range(len(pairs)))
        for judge in self._judges:
            answers = judge.answers([pairs[pair] for pair in open_pairs])
            is_last = judge is self._judges[-1]
            low, high = judge.judge.unsure
            unsure = []
            for pair, answer in zip(open_pairs, answers, strict=True):
                if answer is not None:
                    judgements[pair] = (answer, answer >= (low + high) / 2)
                # The last judge decides even where it is unsure. Without any answer a pair stays undecided.
                if answer is None or (not is_last and low <= answer < high):
                    unsure.append(pair)
            open_pairs = unsure
        return judgements


class CandidateJudge(Cascade):
    """The judges of `vembed mine`, and what becomes of the candidates that they have judged."""

    def __init__(
        self,
        config: MineConfig,
        inputs: MiningInputs,
        session: Session,
    ) -> None:
        super().__init__(config, session)
        self._config = config
        self._inputs = inputs
        self.counts = {"judged_relevant": 0, "undecided": 0}
        self.relabelled: dict[int, list[int]] = {}
        """Query -> documents that became its positives."""

    def apply(
        self,
        candidates: CandidateChunk,
        chosen: Chosen,
    ) -> Chosen:
        """Judge chosen candidates, and keep at most `budget` of each query. Collective: the ranks share the pairs."""
        config = self._config
        is_candidate = chosen.documents >= 0
        queries, columns = np.nonzero(is_candidate)
        documents = chosen.documents[is_candidate]

        def pair_of(number: int) -> TextPair:
            query = self._inputs.known.item(candidates.first + int(queries[number]))
            document = self._inputs.documents.item(int(documents[number]))
            return text_of(query), text_of(document)

        judged = chosen.judgements.copy()
        relevant = np.zeros_like(is_candidate)
        answers = self.judge(len(queries), pair_of)
        judged[queries, columns], relevant[queries, columns] = answers
        undecided = is_candidate & (judged == UNDECIDED)
        self.counts["judged_relevant"] += int(relevant.sum())
        self.counts["undecided"] += int(undecided.sum())
        stays = is_candidate & ~undecided
        if config.false_negatives != "keep":
            stays &= ~relevant
        if config.false_negatives == "relabel":
            for query, column in np.argwhere(relevant).tolist():
                positives = self.relabelled.setdefault(candidates.first + query, [])
                positives.append(int(chosen.documents[query, column]))
        # Those that stay first, in their order.
        order = np.argsort(~stays, axis=1, kind="stable")
        order = order[:, : config.negatives_per_query]
        kept_documents = np.where(stays, chosen.documents, -1)
        return Chosen(
            np.take_along_axis(kept_documents, order, axis=1),
            np.take_along_axis(chosen.scores, order, axis=1),
            np.take_along_axis(judged, order, axis=1),
        )


def text_of(item: Item) -> str:
    """Return the text of an item that a judge reads."""
    if item.text is None or item.images:
        raise UserError(
            "judges read texts, and these data hold images: leave judges out"
        )
    return item.text


PER_NEGATIVE = ("negative_ids", JUDGEMENTS_NAME)
"""Fields with one entry per negative, as `vembed mine` writes them."""


@dataclass(frozen=True)
class JudgeResult:
    """Result: the file and counts."""

    output_path: Path
    num_rows: int
    num_negatives: int
    """Negatives of the rows that were read."""
    num_judged: int
    """Distinct pairs of a query and a negative."""
    num_relevant: int
    """Negatives that the judges call relevant, in all rows."""
    num_undecided: int
    """Negatives for which no judge gave a usable answer."""
    num_kept: int
    """Negatives that stay."""
    seconds: float


class RowNegatives:
    """The rows of `data_path`, and the distinct (query, negative) pairs of all of them."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raise UserError if there is nothing to judge."""
        self.rows = open_rows(config)
        self.starts = [0]
        """Of each row, the index of its first negative among those of all rows."""
        places = []
        for row, example in enumerate(self.rows):
            items = (example.query, *example.negatives)
            if example.negatives and any(item.images for item in items):
                raise UserError(
                    f"{example.where}: judges read texts, and this row holds an image"
                )
            query = content_key(example.query)
            for index, item in enumerate(example.negatives):
                places.append((row, index, (query, content_key(item))))
            self.starts.append(len(places))
        # A pair that occurs in several rows is judged once.
        self.pairs, self.pair_of = distinct(places, key=lambda place: place[2])
        """The first negative of each distinct pair (row, index in the row, content), and the pair of each negative."""
        if not places:
            raise UserError(
                "data_path: no row has a negative to judge; `vembed mine` finds some, and judges them too"
            )

    def texts(self, pair: int) -> TextPair:
        """Return a pair as judges read it."""
        row, index, _ = self.pairs[pair]
        example = self.rows[row]
        return text_of(example.query), text_of(example.negatives[index])

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"data: {len(self.rows):,d} rows with {len(self.pair_of):,d} negatives, {len(self.pairs):,d} distinct pairs "
            "of a query and a negative"
        )


def judge(
    source: CommandConfigSource,
    overrides: Sequence[str] = (),
    *,
    log: Log | None = None,
) -> JudgeResult:
    """Judge the negatives of training data with the options of a YAML file, a dict or a `JudgeConfig`. Collective, as `mine`."""
    config = load_options(JudgeConfig, source, overrides)
    target = check_output(config, config.output_path)
    began = time.monotonic()
    with open_command_session(log) as (running, log_line):
        data = RowNegatives(config)
        log_line(data.summary())
        cascade = Cascade(config, running)
        answers, relevant = cascade.judge(len(data.pairs), data.texts)
        judgements = answers[data.pair_of]
        is_relevant = relevant[data.pair_of]
        for line in cascade.summary():
            log_line(line)
        is_undecided = judgements == UNDECIDED
        stays = ~(is_relevant | is_undecided)
        if config.false_negatives == "keep":
            stays[:] = True
        if running.is_main:
            write_rows(
                target,
                _judged_rows(
                    config,
                    data,
                    ImageRoot.of(config, target.parent),
                    judgements,
                    is_relevant,
                    stays,
                ),
            )
        running.barrier()
        result = JudgeResult(
            target,
            len(data.rows),
            len(judgements),
            len(data.pairs),
            int(is_relevant.sum()),
            int(is_undecided.sum()),
            int(stays.sum()),
            time.monotonic() - began,
        )
        log_line(
            f"{target}: {result.num_rows:,d} rows; of {result.num_negatives:,d} negatives {result.num_relevant:,d} are "
            f"relevant and {result.num_undecided:,d} have no usable answer; {result.num_kept:,d} stay, in "
            f"{duration(result.seconds)}"
        )
        if not result.num_kept:
            log_line(
                f"warning: no negative stays in {target}. Check the judges on a few known pairs, or set "
                "false_negatives: keep"
            )
    return result


def _judged_rows(
    config: JudgeConfig,
    data: RowNegatives,
    root: ImageRoot,
    judgements: np.ndarray,
    is_relevant: np.ndarray,
    stays: np.ndarray,
) -> Iterator[Record]:
    """Yield the rows to write, in the order of the input, with paths of images from `root`. A row that loses no negative is
    written as it was read.

    Another one gets one list of the negatives that stay, with what stands beside them in the same order. With
    `relabel` the relevant ones become positives, unless the row has scores of its own.
    """
    for row in range(len(data.rows)):
        span = slice(data.starts[row], data.starts[row + 1])
        indices = np.flatnonzero(stays[span]).tolist()
        fields = dict(data.rows.row(row, root))
        if len(indices) < span.stop - span.start:
            example = data.rows[row]
            negatives = example.negatives
            added = []
            if config.false_negatives == "relabel" and example.scores is None:
                relevant = np.flatnonzero(is_relevant[span]).tolist()
                added = [negatives[index] for index in relevant]
            fields = row_with_negatives(
                data.rows,
                row,
                [negatives[index] for index in indices],
                added,
                root,
            )
            for name in PER_NEGATIVE:
                # Only lists with one entry per negative: anything else of that name is the user's own.
                values = fields.get(name)
                if isinstance(values, list) and len(values) == len(negatives):
                    fields[name] = [values[index] for index in indices]
            if example.negative_scores is not None and indices:
                scores = [example.negative_scores[index] for index in indices]
                fields["negative_scores"] = scores
        if config.scores and span.start < span.stop:
            fields[JUDGEMENTS_NAME] = written_judgements(judgements[span][indices])
        yield fields
