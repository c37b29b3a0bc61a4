"""generate(): from documents alone to pairs of a query and the document that it should find."""

import ast
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from vembed.data.examples import ImageRoot, Item, ReadAs
from vembed.data.near_duplicates import casefolded
from vembed.data.records import Record, document_id, document_text
from vembed.errors import UserError
from vembed.files import short_hash
from vembed.inference.reranker import read_weights
from vembed.mining.candidates import open_candidates
from vembed.mining.endpoint import ChatClient, without_thoughts
from vembed.mining.inputs import (
    EXACT,
    NUMBER,
    CorpusFiles,
    content_key,
    distinct_by,
    open_command_session,
    open_rows,
    read_mining_inputs,
)
from vembed.mining.mine import clear_folder, work_folder
from vembed.mining.options import (
    CommandConfigSource,
    Endpoint,
    GenerateConfig,
    MineConfig,
    RowOptions,
    Writer,
    load_options,
    paths_of,
)
from vembed.mining.output import check_output, write_rows
from vembed.mining.retrievers import VECTOR_DTYPES, files_identity
from vembed.models.families.model_files import whole_model_folder
from vembed.models.processors import open_tokenizer
from vembed.parallel.session import Session
from vembed.progress import Log, ProgressReport, duration

DOCUMENTS_PER_WRITE = 64
"""Documents whose queries are written together."""
MAX_EXAMPLES = 1000
"""Rows of the user from which examples are drawn."""
PROMPTS = {
    "question": "Write one question that the document below answers.",
    "keywords": "Write a search query of two to six keywords for which the document below should be found.",
    "claim": "Write one claim in a single sentence that the document below supports.",
    "instruction": "Write one instruction to a search engine, a single sentence that describes what is wanted, for "
    "which the document below is what it should find.",
}
RULES = "Do not copy whole sentences, do not mention the document, and answer with the {noun} alone."
MAX_QUERY_CHARACTERS = 400
MIN_QUERY_WORDS = 2
MIN_DOCUMENT_WORDS = 5
CROP_WORDS = (8, 64)
_LABEL = re.compile("(?:question|query|claim|instruction):", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s+")
# `## Title ##`: spaces and closing marks are no part of the title.
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t#]*$", re.MULTILINE)


@dataclass(frozen=True)
class GenerateResult:
    """Result: files and counts."""

    output_path: Path
    num_rows: int
    kept: dict[str, int]
    """Rows by kind."""
    left_out: dict[str, int]
    """Pairs and documents that were left out, by reason."""
    seconds: float


def generate(
    source: CommandConfigSource,
    overrides: Sequence[str] = (),
    *,
    log: Log | None = None,
) -> GenerateResult:
    """Make pairs from documents with the options of a YAML file, a dict or a `GenerateConfig`. Collective, as `mine`."""
    config = load_options(GenerateConfig, source, overrides)
    target = check_output(config, config.output_path)
    began = time.monotonic()
    folder = work_folder(config)
    left_out: Counter[str] = Counter()
    with open_command_session(log) as (running, log_line):
        paths = dict.fromkeys(paths_of(config.corpus_path), ReadAs())
        corpus = CorpusFiles(paths, config)
        documents = distinct_by(corpus.table, EXACT)
        if config.max_documents is not None and config.max_documents < len(documents):
            random = np.random.default_rng([config.seed, 3])
            chosen = random.choice(len(documents), config.max_documents, replace=False)
            documents = documents[np.sort(chosen)]
        for line in (f"documents: {len(documents):,d}", *corpus.notes):
            log_line(line)
        texts = {}
        if config.written_kinds():
            texts = _written_texts(config, corpus, documents, folder, running)
        rows = []
        known_pairs = set()
        root = ImageRoot.of(config, target.parent)
        for row in _rows(config, corpus, documents, texts, left_out, root):
            query = casefolded(row["query"])
            positive = json.dumps(row["positive"])
            if query == casefolded(str(row["positive"])):
                left_out["the query is the document"] += 1
            elif (query, positive) in known_pairs:
                left_out["a pair that is there already"] += 1
            else:
                known_pairs.add((query, positive))
                rows.append(row)
        log_line(f"pairs: {len(rows):,d} made")
        if config.model_name is not None and rows:
            num_made = len(rows)
            rows = _round_trip(config, rows, root, folder, running)
            reason = f"round trip: not among the first {config.round_trip_top_k}"
            left_out[reason] = num_made - len(rows)
        for reason, count in (+left_out).most_common():
            log_line(f"left out: {count:,d}: {reason}")
        if not rows:
            raise UserError(
                f"corpus_path: no pair was made of {len(documents):,d} documents. Kinds need a title, several sentences, "
                "sections or long texts: give other documents, or `writer`, a language model that writes queries"
            )
        if running.is_main:
            write_rows(target, rows)
        running.barrier()
        if not config.keep_work:
            clear_folder(folder, running)
        kept = dict(Counter(str(row["kind"]) for row in rows))
        seconds = time.monotonic() - began
        by_kind = ", ".join(f"{kind} {kept[kind]:,d}" for kind in sorted(kept))
        log_line(f"{target}: {len(rows):,d} rows ({by_kind}), in {duration(seconds)}")
    return GenerateResult(target, len(rows), kept, dict(+left_out), seconds)


def _rows(
    config: GenerateConfig,
    corpus: CorpusFiles,
    documents: np.ndarray,
    texts: Mapping[str, str],
    left_out: Counter[str],
    root: ImageRoot,
) -> Iterator[Record]:
    """Yield all pairs, in the order of the documents, with paths of images from `root`."""
    written = config.written_kinds()
    free = [kind for kind in config.kinds if kind not in written]
    for document in documents:
        number = int(document[NUMBER])
        record = corpus.reader.read(number)
        item = corpus.item(record, number)
        identity = document_id(record)
        columns = {} if identity is None else {"document_id": identity}
        if free or not written:
            # By content: a document gets the same pairs wherever it stands in the files.
            random = np.random.default_rng([config.seed, int(document[EXACT])])
            pairs = pairs_of(record, item, free, random)
            images = corpus.images(number)
            for kind, (query, value) in pairs:
                positive = images.renamed(value, root, is_path=False)
                yield {"query": query, "positive": positive, "kind": kind} | columns
            if not pairs:
                left_out["no kind fits"] += 1
        for kind in written if item.text else ():
            key = f"{document[EXACT]} {kind}"
            if key not in texts:
                raise UserError(
                    "another rank has written queries that are not here: set work_dir to a folder that all machines see"
                )
            text = cleaned(texts[key])
            if text:
                yield {"query": text, "positive": item.text, "kind": kind} | columns
            else:
                left_out[f"{kind}: nothing usable was written"] += 1


def _written_texts(
    config: GenerateConfig,
    corpus: CorpusFiles,
    documents: np.ndarray,
    folder: Path,
    session: Session,
) -> dict[str, str]:
    """Return what the language model writes, by content of the document and kind of query.

    Collective: the ranks share the blocks of documents. Answers are written down as they come in, so that one that dies
    loses none.
    """
    writer = config.writer
    assert writer is not None, "the config asks for it"
    # (query, positive) of the user's own rows, for the prompts.
    examples = []
    if config.examples_path is not None:
        rows = open_rows(RowOptions(data_path=config.examples_path))
        for example in islice(rows, MAX_EXAMPLES):
            positive = example.positives[0].text
            if example.query.text and positive:
                examples.append((example.query.text, positive))
    # Everything that a written text depends on besides the document.
    connection = set(Endpoint.model_fields) - {"base_url"}
    options = {"language", "personas", "num_examples", "prompts", "seed"}
    identity = short_hash(
        writer.model if writer.base_url else files_identity(writer.model),
        writer.model_dump(exclude=connection),
        config.model_dump(include=options),
        PROMPTS,
        RULES,
        examples,
    )
    answers = folder / "written" / identity
    answers.mkdir(parents=True, exist_ok=True)
    texts = _read_answers(answers)
    write = None
    num_documents = len(documents)
    blocks = range(
        session.rank * DOCUMENTS_PER_WRITE,
        num_documents,
        session.world_size * DOCUMENTS_PER_WRITE,
    )
    with ProgressReport("generating", active=session.is_main) as progress:
        for first in blocks:
            stop = min(first + DOCUMENTS_PER_WRITE, num_documents)
            keys = []
            prompts = []
            for number in range(first, stop):
                document = documents[number]
                text = corpus.read(int(document[NUMBER])).text or ""
                for kind in config.written_kinds() if text else ():
                    key = f"{document[EXACT]} {kind}"
                    if key not in texts:
                        prompt = prompt_for(kind, text, config, examples, number)
                        keys.append(key)
                        prompts.append(prompt)
            if prompts:
                # Loaded when it is first asked: an interrupted run may have all answers.
                write = write or load_writer(config, writer, session.device)
                # The seed of a block, so that its text does not depend on the rank that writes it.
                seed = config.seed + first // DOCUMENTS_PER_WRITE
                path = answers / f"{os.uname().nodename}-{os.getpid()}.answers"
                with path.open("a", encoding="utf-8") as file:
                    for index, answer in write(prompts, seed):
                        # Behind a line end: the last line of a process that was killed may be half of one.
                        file.write("\n" + json.dumps([keys[index], answer]))
                        file.flush()
            progress(stop, num_documents)
    session.barrier()
    return _read_answers(answers)


def _read_answers(folder: Path) -> dict[str, str]:
    texts = {}
    for path in sorted(folder.glob("*.answers")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # half of a line
                key, text = json.loads(line)
                texts[key] = text
    return texts


def _round_trip(
    config: GenerateConfig,
    rows: list[Record],
    root: ImageRoot,
    folder: Path,
    session: Session,
) -> list[Record]:
    """Return the pairs whose document is among the first for its query. `root`: where their paths of images start.
    Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.jsonl"
    if session.is_main:
        here = ImageRoot.of(config, folder)
        write_rows(path, (root.renamed(row, here, is_path=False) for row in rows))
    session.barrier()
    has_ids = any("document_id" in row for row in rows)
    mining = MineConfig.shared(
        config,
        data_path=str(path),
        top_k=config.round_trip_top_k,
        num_negatives=1,
        relative_margin=None,
        positive_id_field="document_id" if has_ids else None,
    )
    inputs = read_mining_inputs(mining)
    store = open_candidates(mining, inputs, folder, session)
    known = inputs.known
    positives = store.scores_of(known.positives)
    codes = known.positives.codes
    scores = np.concatenate([chunk.scores for chunk in store.chunks()])
    kept_rows = []
    for number, row in enumerate(rows):
        query = int(known.query_of_row[number])
        positive = inputs.rows[number].positives[0]
        document = inputs.documents.find_contents([content_key(positive)])
        # `codes` is ascending, as pairs are, and holds every positive of the rows.
        index = np.searchsorted(codes, query << 32 | document)
        # The candidates leave out the known positives, so that those above it are counted by score.
        num_above = int((scores[query] > positives[index]).sum())
        if num_above < config.round_trip_top_k:
            kept_rows.append(row)
    session.barrier()
    return kept_rows


# ---- queries of a language model --------------------------------------------------------------------------------

WriteTexts = Callable[[Sequence[str], int], Iterator[tuple[int, str]]]
"""Takes prompts and a seed, and gives the index of each prompt and what was written, in any order."""


def load_writer(
    config: GenerateConfig,
    writer: Writer,
    device: torch.device,
) -> WriteTexts:
    """The model of `writer`: behind an endpoint, or a decoder of Transformers here."""
    if writer.base_url:
        client = ChatClient(writer)
        return lambda prompts, _: client.complete(
            prompts, writer.max_new_tokens, writer.temperature
        )
    trust = config.trust_remote_code
    folder = whole_model_folder(writer.model, option="writer")
    tokenizer = open_tokenizer(folder, padding_side="left", trust_remote_code=trust)
    # Padding is masked, so it does not matter which token stands there.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = VECTOR_DTYPES.get(config.torch_dtype)
    model = read_weights(AutoModelForCausalLM, folder, dtype, trust).eval().to(device)
    # None: generate() warns of sampling settings that a model brings along.
    sampling = dict.fromkeys(("temperature", "top_p", "top_k"))
    sampling["do_sample"] = False
    if writer.temperature > 0:
        sampling = {"do_sample": True, "temperature": writer.temperature}

    def write(prompts: Sequence[str], seed: int) -> Iterator[tuple[int, str]]:
        texts = [f"{prompt}\n" for prompt in prompts]
        if tokenizer.chat_template is not None:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            texts = tokenizer.apply_chat_template(
                chats, tokenize=False, add_generation_prompt=True
            )
        # generate() draws from the global generator.
        torch.manual_seed(seed)
        for start in range(0, len(texts), writer.batch_size):
            inputs = tokenizer(
                texts[start : start + writer.batch_size],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=writer.max_length,
            ).to(device)
            input_ids = inputs["input_ids"]
            with torch.inference_mode():
                answers = model.generate(
                    input_ids=input_ids,
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=writer.max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                    **sampling,
                )
            written = tokenizer.batch_decode(
                answers[:, input_ids.shape[1] :], skip_special_tokens=True
            )
            yield from enumerate(written, start)

    return write


def prompt_for(
    kind: str,
    document: str,
    config: GenerateConfig,
    examples: Sequence[tuple[str, str]],
    number: int,
) -> str:
    """The prompt for one document. Documents take turns with the personas, and draw their examples by the seed."""
    assert config.writer is not None, "the config asks for it"
    noun = "query" if kind == "keywords" else kind
    persona = config.personas[number % len(config.personas)] if config.personas else ""
    language = config.language or "the language of the document"
    drawn = []
    if examples and config.num_examples:
        random = np.random.default_rng([config.seed, 2, number])
        count = min(config.num_examples, len(examples))
        for index in random.choice(len(examples), count, replace=False):
            query, positive = examples[index]
            drawn.append(f"Document: {positive}\n{noun}: {query}")
    example_text = "\n\n".join(drawn)
    # About four characters to a token; a local writer is cut exactly, by its tokenizer.
    cut = document[: 4 * config.writer.max_length]
    if kind in config.prompts:
        return config.prompts[kind].format(
            document=cut, language=language, persona=persona, examples=example_text
        )
    parts = [PROMPTS[kind]]
    if persona:
        parts.append(f"Write it as {persona} would.")
    parts += [f"Write in {language}.", RULES.format(noun=noun)]
    if example_text:
        parts.append(f"Examples:\n\n{example_text}\n")
    parts.append(f"Document: {cut}\n{noun}:")
    return "\n".join(parts)


def cleaned(text: str) -> str:
    """Return the first line without quotes and labels. Empty where nothing usable was written."""
    line = without_thoughts(text).strip().partition("\n")[0].strip()
    label = _LABEL.match(line)
    if label:
        line = line[label.end() :]
    line = line.strip().strip("\"'").strip()
    return line if len(line) <= MAX_QUERY_CHARACTERS else ""


# ---- pairs without a language model: what a document's own form says about itself ----------------------------------

GeneratedPair = tuple[str, Any]
"""A query, and the positive as a row holds it: a text, or {"image": ...}."""


def title_body(record: Record) -> list[GeneratedPair]:
    """The title, and the text below it."""
    title = record.get("title")
    text = record.get("text")
    if not isinstance(title, str) or not isinstance(text, str) or not title.strip():
        return []
    if not _is_long(text, MIN_DOCUMENT_WORDS):
        return []
    return [(title.strip(), text.strip())]


def heading_section(text: str) -> list[GeneratedPair]:
    """Each heading of a Markdown text, and its section."""
    headings = list(_HEADING.finditer(text))
    ends = [match.start() for match in headings[1:]] + [len(text)]
    pairs = []
    for match, end in zip(headings, ends, strict=False):
        section = text[match.end() : end].strip()
        if _is_long(section, MIN_DOCUMENT_WORDS):
            pairs.append((match[1].strip(), section))
    return pairs


def first_sentence(text: str) -> list[GeneratedPair]:
    """The first sentence, and the rest."""
    first, *others = _SENTENCE.split(text.strip(), maxsplit=1)
    if not others or not _is_long(first, MIN_QUERY_WORDS):
        return []
    return [(first, others[0])] if _is_long(others[0], MIN_DOCUMENT_WORDS) else []


def docstring_function(text: str) -> list[GeneratedPair]:
    """The first paragraph of each Python function's docstring, and the function without it."""
    if "def " not in text:
        return []
    try:
        pairs = documented_functions(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [pair for pair in pairs if _is_long(pair[0], MIN_QUERY_WORDS)]


def caption_image(record: Record, item: Item) -> list[GeneratedPair]:
    """The text beside an image, and the image."""
    caption = record.get("caption") or item.text
    if not item.images or not isinstance(caption, str) or not caption.strip():
        return []
    images = record.get("image") or record.get("images") or record.get("image_path")
    return [(caption.strip(), {"image": images})]


def crop(text: str, random: np.random.Generator) -> list[GeneratedPair]:
    """One span from each side of a cut at a random place, so that query and document do not overlap."""
    words = text.split()
    shortest, longest = CROP_WORDS
    if len(words) < 2 * shortest:
        return []
    cut = int(random.integers(shortest, len(words) - shortest + 1))
    spans = []
    for side in (words[:cut], words[cut:]):
        size_limit = min(longest, len(side))
        size = int(random.integers(shortest, size_limit + 1))
        start = int(random.integers(0, len(side) - size + 1))
        span = side[start : start + size]
        spans.append(" ".join(span))
    # The query is not always the earlier one.
    if random.integers(2):
        spans.reverse()
    query, document = spans
    return [(query, document)]


def pairs_of(
    record: Any,
    item: Item,
    kinds: Sequence[str],
    random: np.random.Generator,
) -> list[tuple[str, GeneratedPair]]:
    """(kind, pair) of a document: by all of `kinds`, or without any by the first one that fits."""
    fields = record if isinstance(record, dict) else {"text": document_text(record)}
    text = item.text or ""
    # In the order in which they are tried where nobody chooses. Cropping says least, and comes last.
    makers = {
        "docstring_function": partial(docstring_function, text),
        "caption_image": partial(caption_image, fields, item),
        "title_body": partial(title_body, fields),
        "heading_section": partial(heading_section, text),
        "first_sentence": partial(first_sentence, text),
        "crop": partial(crop, text, random),
    }
    pairs = []
    for kind in kinds or makers:
        pairs += [(kind, pair) for pair in makers[kind]()]
        if pairs and not kinds:
            break
    return pairs


def _is_long(text: str, num_words: int) -> bool:
    return len(text.split()) >= num_words


def documented_functions(source: str) -> list[tuple[str, str]]:
    """Return the first paragraph of the docstring of each function that has one, and the function without it and without
    its indentation, in the order of the source. Raise SyntaxError if it is no Python."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    # As Python counts them: a form feed ends no line.
    lines = re.split(r"\r\n?|\n", source)
    pairs = []
    for function in sorted(functions, key=lambda function: function.lineno):
        docstring = ast.get_docstring(function)
        if not docstring or len(function.body) < 2:
            continue
        first = function.body[0]
        # From `def` on, without decorators, to the line before the docstring; then all behind it, comments included.
        head = lines[function.lineno - 1 : first.lineno - 1]
        body = lines[first.end_lineno or first.lineno : function.end_lineno]
        indent = " " * function.col_offset
        code = "\n".join(line.removeprefix(indent) for line in head + body)
        summary = " ".join(docstring.partition("\n\n")[0].split())
        pairs.append((summary, code.rstrip()))
    return pairs
