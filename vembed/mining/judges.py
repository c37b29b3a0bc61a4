"""Judges: models that read a query and a document together, and a cascade of them whose judgements are cached."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, Protocol

import numpy as np
import torch

from vembed.config.user_folders import cache_folder
from vembed.data.cache import short_hash
from vembed.data.examples import Item
from vembed.errors import UserError
from vembed.inference.reranker import YES_NO_END, YES_NO_PROMPT, Reranker
from vembed.mining.candidates import Candidates
from vembed.mining.choice import Chosen
from vembed.mining.config import Judge, MineConfig, WeightOptions
from vembed.mining.documents import Documents
from vembed.mining.encoders import files_identity
from vembed.mining.endpoint import ChatClient
from vembed.mining.known_positives import KnownPositives
from vembed.models.families.model_files import kind_of, model_folder, whole_model_folder
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import ProgressReport

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Values of `torch_dtype`; `auto` is not among them, and means the file's own."""

ENDPOINT_PROMPT = (
    "{instruction}.\n\nQuery: {query}\n\nDocument: {document}\n\n"
    "Is the document relevant to the query? Answer with one word, yes or no."
)
ANSWER = re.compile(r"\b(yes|no|true|false|relevant|irrelevant|not)\b", re.IGNORECASE)
POSITIVE = frozenset({"yes", "true", "relevant"})

Pair = tuple[str, str]


class JudgeModel(Protocol):
    """A judge that is ready."""

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, float | None]]:
        """The number of each pair and how likely it is relevant, in any order; None where there is no usable answer."""
        ...


class RerankerJudge:
    """A reranker: a classifier of one logit, or two of which the second one says relevant; or a decoder that is asked,
    and whose next token is yes or no."""

    def __init__(
        self,
        judge: Judge,
        kind: Literal["reranker", "yes_no"],
        options: WeightOptions,
        device: torch.device,
    ) -> None:
        self.reranker = Reranker(
            whole_model_folder(judge.model, option="judges"),
            role=f"judges: {judge.model}",
            device=device,
            kind=kind,
            max_labels=2,
            instruction=judge.instruction,
            max_length=judge.max_length,
            dtype=DTYPES.get(options.torch_dtype),
            trust_remote_code=options.trust_remote_code,
        )

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, float | None]]:
        """The number of each pair, and the sigmoid of its score."""
        items = [(Item(text=query), Item(text=document)) for query, document in pairs]
        scores = torch.from_numpy(self.reranker.score(items)[:, 0])
        return enumerate(torch.sigmoid(scores).tolist())


class EndpointJudge:
    """A model behind an OpenAI-compatible endpoint."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._client = ChatClient(judge, judge.model)

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, float | None]]:
        """The number of each pair, and 1 for yes, 0 for no, None for another answer."""
        longest = 4 * self._judge.max_length  # about so many characters
        prompts = [
            ENDPOINT_PROMPT.format(
                instruction=self._judge.instruction,
                query=query,
                document=document[:longest],
            )
            for query, document in pairs
        ]
        return (
            (number, answer_of(text))
            for number, text in self._client.complete(prompts, max_tokens=8)
        )


def answer_of(text: str) -> float | None:
    """1.0 for an answer that says yes, 0.0 for no, None for one that says neither."""
    match = ANSWER.search(text)
    return None if match is None else float(match[1].lower() in POSITIVE)


def load_judge(
    judge: Judge, options: WeightOptions, device: torch.device
) -> JudgeModel:
    """The model of a judge. Its files say of which kind it is if the config leaves it open."""
    if judge.kind == "endpoint" or (judge.kind == "auto" and judge.base_url):
        return EndpointJudge(judge)
    kind = kind_of(model_folder(judge.model, option="judges"))
    if judge.kind == "auto" and kind in ("sparse encoder", "late-interaction model"):
        raise UserError(f"judges: {judge.model} is a {kind}; give a reranker")
    asks = "yes_no" in (kind, judge.kind) and judge.kind != "cross_encoder"
    return RerankerJudge(judge, "yes_no" if asks else "reranker", options, device)


def judge_identity(judge: Judge, options: WeightOptions) -> str:
    """A short name for everything that a judgement depends on besides query and document."""
    model = judge.model if judge.base_url else files_identity(judge.model)
    prompt = [YES_NO_PROMPT, YES_NO_END, ENDPOINT_PROMPT]
    return short_hash(
        model,
        judge.base_url,
        judge.kind,
        judge.instruction,
        judge.max_length,
        options.torch_dtype,
        prompt,
    )


BLOCK = 256
"""Pairs that are judged before they are written down: what a kill loses."""
UNDECIDED = -1.0


class JudgementCache:
    """Judgements of one judge, by the contents of query and document: files of lines, one for each process."""

    def __init__(self, identity: str) -> None:
        self._folder = cache_folder() / "judgements" / identity
        self._known: dict[str, float] = {}
        for path in sorted(self._folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    key, value = json.loads(line)
                except ValueError:  # the last line of a process that was killed
                    continue
                self._known[key] = float(value)

    def get(self, key: str) -> float | None:
        """Return the judgement of a pair; None: it was not judged before."""
        return self._known.get(key)

    def add(self, judgements: Sequence[tuple[str, float]]) -> None:
        """Write judgements down at once."""
        if not judgements:
            return
        self._known.update(judgements)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{os.uname().nodename}-{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            for judgement in judgements:
                file.write(json.dumps(judgement) + "\n")


@dataclass
class JudgeCounts:
    """Counts of one judge on this rank."""

    asked: int = 0
    cached: int = 0
    undecided: int = 0


@dataclass(frozen=True)
class Judged:
    """Remaining candidates of some queries, and those that became positives."""

    chosen: Chosen
    judgements: np.ndarray
    """[Q, budget] how likely each chosen negative is relevant; UNDECIDED where no judge gave an answer."""
    relabelled: dict[int, list[int]] = field(default_factory=dict)
    """Query (of all) -> documents that became its positives."""
    num_relevant: int = 0
    num_undecided: int = 0

    @classmethod
    def unseen(cls, chosen: Chosen) -> Judged:
        """Chosen candidates that no judge has seen."""
        return cls(chosen, np.full(chosen.documents.shape, UNDECIDED, np.float32))

    @classmethod
    def joined(cls, chunks: Sequence[Judged]) -> Judged:
        """Those of consecutive chunks of queries."""
        relabelled: dict[int, list[int]] = {}
        for chunk in chunks:
            relabelled |= chunk.relabelled
        return cls(
            Chosen(
                np.concatenate([chunk.chosen.documents for chunk in chunks]),
                np.concatenate([chunk.chosen.scores for chunk in chunks]),
            ),
            np.concatenate([chunk.judgements for chunk in chunks]),
            relabelled,
            sum(chunk.num_relevant for chunk in chunks),
            sum(chunk.num_undecided for chunk in chunks),
        )


class Cascade:
    """The judges of a config, the cheap one first."""

    def __init__(
        self, judges: Sequence[Judge], options: WeightOptions, session: Session
    ) -> None:
        self._judges = tuple(judges)
        self._session = session
        self._caches = [
            JudgementCache(judge_identity(judge, options)) for judge in judges
        ]
        self.counts = [JudgeCounts() for _ in judges]
        # A later judge is loaded only when an earlier one was unsure of a pair.
        self._load: Callable[[int], JudgeModel] = cache(
            lambda number: load_judge(judges[number], options, session.device)
        )

    @property
    def decided_at(self) -> float:
        """Probability from which on a pair is relevant."""
        return sum(self._judges[-1].unsure) / 2

    def judge(self, num_pairs: int, pair_of: Callable[[int], Pair]) -> np.ndarray:
        """[num_pairs] how likely each pair is relevant; UNDECIDED where no judge gave an answer. Collective."""
        world_size = self._session.world_size
        # Dealt in turn: neighbouring pairs are of one query, and of similar length.
        numbers = range(self._session.rank, num_pairs, world_size)
        judgements = np.full(len(numbers), UNDECIDED, np.float32)
        with ProgressReport("judging", active=self._session.is_main) as progress:
            for begin in range(0, len(numbers), BLOCK):
                pairs = [pair_of(number) for number in numbers[begin : begin + BLOCK]]
                end = begin + len(pairs)
                judgements[begin:end] = self._decide(pairs)
                progress(end, len(numbers))
        sizes = [len(range(rank, num_pairs, world_size)) for rank in range(world_size)]
        gathered = collectives.all_gather_rows(torch.from_numpy(judgements), sizes)
        result = np.empty(num_pairs, np.float32)
        for rank, part in enumerate(torch.split(gathered, sizes)):
            result[rank::world_size] = part.numpy()
        return result

    def summary(self) -> list[str]:
        """One line for each judge. Collective."""
        lines = []
        for judge, counts in zip(self._judges, self.counts, strict=True):
            num_asked, num_cached, num_undecided = collectives.sum_ints(
                [counts.asked, counts.cached, counts.undecided]
            )
            where = f" at {judge.base_url}" if judge.base_url else ""
            line = f"judge {judge.model}{where}: {num_asked:,d} pairs asked, {num_cached:,d} known from before"
            if num_undecided:
                line += f", {num_undecided:,d} answers that are neither yes nor no (not used as negatives)"
            lines.append(line)
        return lines

    def _decide(self, pairs: Sequence[Pair]) -> list[float]:
        """Return the probability that each pair is relevant, by the first judge that is sure; 0 or 1 after the last."""
        judgements = [UNDECIDED] * len(pairs)
        open_pairs = list(range(len(pairs)))
        for number, judge in enumerate(self._judges):
            answers = self._ask(number, [pairs[pair] for pair in open_pairs])
            is_last = number == len(self._judges) - 1
            low, high = judge.unsure
            unsure: list[int] = []
            for pair, answer in zip(open_pairs, answers, strict=True):
                if answer is not None:
                    judgements[pair] = answer
                # The last judge decides even where it is unsure. Without any answer a pair stays undecided.
                if answer is None or (not is_last and low <= answer < high):
                    unsure.append(pair)
            open_pairs = unsure
            if not open_pairs:
                break
        return judgements

    def _ask(self, number: int, pairs: Sequence[Pair]) -> list[float | None]:
        """Return the answers of one judge, from the cache if it was asked before."""
        known = self._caches[number]
        counts = self.counts[number]
        keys = [short_hash(*pair) for pair in pairs]
        answers = [known.get(key) for key in keys]
        missing = [place for place, answer in enumerate(answers) if answer is None]
        counts.cached += len(pairs) - len(missing)
        if not missing:
            return answers
        new: list[tuple[str, float]] = []
        model = self._load(number)
        try:
            for index, answer in model.judge([pairs[place] for place in missing]):
                place = missing[index]
                counts.asked += 1
                if answer is None or not math.isfinite(answer):
                    counts.undecided += 1
                    continue
                answers[place] = answer
                new.append((keys[place], answer))
        finally:
            # Also where an endpoint ends it: what was answered costs nothing again.
            known.add(new)
        return answers


class CandidateJudge:
    """The judges of `vembed mine`, and what becomes of the candidates that they have judged."""

    def __init__(
        self,
        config: MineConfig,
        documents: Documents,
        known: KnownPositives,
        session: Session,
    ) -> None:
        self._config = config
        self._documents = documents
        self._known = known
        self._cascade = Cascade(config.judges, config, session)

    def apply(self, candidates: Candidates, chosen: Chosen) -> Judged:
        """Judge chosen candidates, and keep at most `budget` of each query. Collective: the ranks share the pairs."""
        queries, columns = np.nonzero(chosen.documents >= 0)
        documents = chosen.documents[queries, columns]

        def pair_of(number: int) -> Pair:
            query = self._known.item(candidates.first + int(queries[number]))
            document = self._documents.item(int(documents[number]))
            return text_of(query), text_of(document)

        judgements = np.full(chosen.documents.shape, UNDECIDED, np.float32)
        judgements[queries, columns] = self._cascade.judge(len(queries), pair_of)
        return self._keep(candidates, chosen, judgements)

    def summary(self) -> list[str]:
        """One line for each judge. Collective."""
        return self._cascade.summary()

    def _keep(
        self, candidates: Candidates, chosen: Chosen, judged_QK: np.ndarray
    ) -> Judged:
        config = self._config
        is_candidate = chosen.documents >= 0
        relevant = is_candidate & (judged_QK >= self._cascade.decided_at)
        undecided = is_candidate & (judged_QK == UNDECIDED)
        stays = is_candidate & ~undecided
        if config.false_negatives != "keep":
            stays &= ~relevant
        relabelled: dict[int, list[int]] = {}
        if config.false_negatives == "relabel":
            for query, column in zip(*np.nonzero(relevant), strict=True):
                documents = relabelled.setdefault(candidates.first + int(query), [])
                documents.append(int(chosen.documents[query, column]))
        # Kept ones first, in their order.
        order = np.argsort(~stays, axis=1, kind="stable")[:, : config.budget]
        is_kept = np.take_along_axis(stays, order, axis=1)

        def sorted_values(values: np.ndarray, fill: float) -> np.ndarray:
            return np.where(is_kept, np.take_along_axis(values, order, axis=1), fill)

        scores = sorted_values(chosen.scores, -np.inf).astype(np.float32)
        return Judged(
            Chosen(sorted_values(chosen.documents, -1), scores),
            sorted_values(judged_QK, UNDECIDED),
            relabelled,
            int(relevant.sum()),
            int(undecided.sum()),
        )


def text_of(item: Item) -> str:
    """Return the text of an item that a judge reads."""
    if item.text is None or item.images:
        raise UserError(
            "judges read texts, and these data hold images: leave judges out"
        )
    return item.text
