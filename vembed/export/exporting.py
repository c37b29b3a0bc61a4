"""export_model(): a model into a folder of one format, compared with the model before the folder gets its name."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from vembed.config.schema import DataSection, ObjectiveSection, RunSection
from vembed.config.values import FormatName, ServerName, WeightPrecision
from vembed.data.datasets import open_sets
from vembed.data.examples import Item, Kind, spread
from vembed.data.features import Features, PairFeaturiser
from vembed.errors import RunError, UserError
from vembed.evaluation.dataset import EvalData, RetrievalData, open_eval_data
from vembed.evaluation.report.record import run_options
from vembed.evaluation.scores import retrieval_metrics
from vembed.export.formats import (
    EncodeTexts,
    ExportFormat,
    ExportJob,
    ExportReader,
    GgufFormat,
    SafetensorsFormat,
    StaticFormat,
    Texts,
    encode_all,
    log_nothing,
)
from vembed.export.onnx_format import (
    ONNX_FILE,
    OnnxFormat,
    OnnxGraph,
    OnnxImages,
    OpenvinoFormat,
    made_images,
    write_graph,
)
from vembed.files import replace_text, write_json
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import unit_rows
from vembed.inference.reranker import Reranker, read_weights
from vembed.models.embedding_model import SEGMENTS, Inputs
from vembed.models.families.backbones import file_dtype
from vembed.models.families.description import DESCRIPTION_FILE, ModelDescription
from vembed.models.families.model_files import EXPORT_FILE, is_reranker, read_object
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS, poolings_of
from vembed.models.processors import load_tokenizer, save_processors
from vembed.progress import Log
from vembed.saving.card import Card, render_card
from vembed.saving.files import replaced_folder, write_reranker_layout

MAX_STUDENT_EXAMPLES = 10_000
"""Examples whose texts train a student; of more, as many spread over all."""
EXPORT_FORMATS: dict[FormatName, ExportFormat] = {
    "safetensors": SafetensorsFormat(),
    "onnx": OnnxFormat(),
    "openvino": OpenvinoFormat(),
    "gguf": GgufFormat(),
    "static": StaticFormat(),
}


@dataclass(frozen=True)
class Exported:
    """Result: the folder, and the check if it was made."""

    path: Path
    check: Check | None
    description: ModelDescription
    facts: dict[str, Any]
    """Content of export.json."""


def export_model(
    model: str,
    output: str | Path,
    format_name: FormatName,
    precision: WeightPrecision | None = None,
    *,
    check: bool = True,
    data: str | None = None,
    tolerance: float | None = None,
    server: ServerName | None = None,
    trust_remote_code: bool = False,
    log: Log = log_nothing,
) -> Exported:
    """Write `model` to the new folder `output`. With `check`, an export whose embeddings differ by more than
    `tolerance` is refused, and nothing is left behind. `data`: evaluation data for the texts of the check and the nDCG;
    by default those of the run. `server`: the one that the export is for. `log` takes a line before each part that may
    take minutes."""
    target = Path(output)
    export_format = EXPORT_FORMATS[format_name]
    if precision is not None and precision not in export_format.precisions:
        raise UserError(
            f"--precision {precision}: --format {format_name} takes {', '.join(export_format.precisions)}"
        )
    gives_scores = is_reranker(model)
    if gives_scores and format_name != "onnx":
        raise UserError(
            f"--format {format_name}: {model} is a reranker, which is exported to onnx; servers such as TEI and vLLM read "
            "its folder as it is"
        )
    missing = export_format.missing()
    if missing is not None and (check or format_name != "safetensors"):
        raise UserError(f"--format {format_name}: {missing}")
    evaluation = evaluation_data(model, data) if check else None
    if gives_scores:
        return export_reranker(
            model,
            target,
            precision or "float32",
            check=check,
            data=evaluation,
            tolerance=tolerance,
            trust_remote_code=trust_remote_code,
            log=log,
        )
    # Float32 for every precision: each format rounds the weights itself, and the check compares with unrounded ones.
    embedder = Embedder(
        model,
        device="cpu",
        torch_dtype="float32",
        trust_remote_code=trust_remote_code,
    )
    description = embedder.description
    if server is not None:
        check_served(server, description)
    refusal = export_format.refusal(embedder)
    if refusal is not None:
        raise UserError(f"{model} cannot be exported as {format_name}: {refusal}")
    if precision is None:
        precision = "float32"
        if format_name == "safetensors":
            # The dtype of the model's file, so that nothing grows or is rounded.
            dtype = file_dtype(description.read_config())
            for name in export_format.precisions:
                if str(dtype) == f"torch.{name}":
                    precision = name
    is_student = format_name == "static"
    if tolerance is None:
        tolerance = STUDENT_TOLERANCE if is_student else DISTANCE_TOLERANCE[precision]
    texts = student_texts(model, evaluation) if is_student else []
    job = ExportJob(model, embedder, precision, texts, log)
    # The folder has another name until the check has passed, so that a refused export leaves nothing behind.
    with replaced_folder(target) as folder:
        result = None
        if check:
            result = _write_and_check(format_name, job, folder, tolerance, evaluation)
        else:
            log(f"writing the {format_name} files in {precision}")
            export_format.write(job, folder)
        size = description.output_dim
        vectors = {"embedding_dim": size, "normalized": description.normalize}
        facts = _describe(folder, description, format_name, precision, result, vectors)
        if is_student:
            facts["num_training_texts"] = len(texts)
        if server == "fastembed":
            prompt = description.query_prompt
            text = _FASTEMBED.format(file=FASTEMBED_FILE, dim=size, query=prompt)
            replace_text(folder / FASTEMBED_FILE, text)
    return Exported(target, result, description, facts)


# ---- data ----------------------------------------------------------------------------------------------------------


def student_texts(model: str, data: EvalData | None) -> Texts:
    """Return the texts to train a student with: queries and documents of the run's training data, otherwise documents
    of the evaluation data that the check does not use."""
    names = (
        "data_path",
        "column_mapping",
        "image_root",
        "retrieval_mode",
        "on_bad_record",
        "max_train_examples",
        "val_split",
        "seed",
    )
    options = run_options(model, names)
    if options:
        seed = options.pop("seed", RunSection().seed)
        # The texts of the sources are read, and not their validation data.
        sources = []
        for source in DataSection(**options).sources():
            sources.append(source.model_copy(update={"val_data_path": None}))
        if all(Path(source.path).exists() for source in sources):
            sets = open_sets(
                DataSection(**{**options, "data_path": sources}),
                ObjectiveSection(),
                model_name=model,
                seed=seed,
                compares=False,
            )
            examples = sets.examples
            different: dict[tuple[str, Kind], None] = {}
            # Spread, as rows that stand together are often alike.
            for number in spread(len(examples), MAX_STUDENT_EXAMPLES):
                example = examples[number]
                if example.query.text:
                    different[example.query.text, "query"] = None
                for item in example.documents:
                    if item.text:
                        different[item.text, "document"] = None
            return list(different)
    if not isinstance(data, RetrievalData):
        return []
    # As many spread over the whole corpus, which may have millions; the first are those of the check.
    first = NUM_TEXTS // 2
    texts: Texts = []
    for number in spread(len(data.documents) - first, MAX_STUDENT_EXAMPLES):
        item = data.documents[first + number]
        if item.text and not item.images:
            texts.append((item.text, "document"))
    return texts


# ---- writing and checking ------------------------------------------------------------------------------------------


def _write_and_check(
    format_name: FormatName,
    job: ExportJob,
    folder: Path,
    tolerance: float,
    data: EvalData | None,
) -> Check:
    """Write the export and return its comparison with the model. Raise UserError if it differs."""
    export_format = EXPORT_FORMATS[format_name]
    embedder = job.embedder
    description = embedder.description
    has_texts = "text" in description.modalities
    nothing = "nothing was written (--tolerance allows more)"
    # The model's own vectors first: a format may change the attention function of the modules.
    images = []
    if format_name == "onnx" and "image" in description.modalities:
        images = made_images(NUM_IMAGES)
    image_ND = embedder.encode(images)
    texts = []
    scored = None
    if has_texts:
        texts = texts_to_compare(data, description.max_length)
        scored = bounded(data)
        job.log("encoding the texts of the check with the model")
        model_ND = encode_all(embedder.encode, texts)
    normalize = description.compares_unit_vectors
    ndcg_model = None
    if scored is not None:
        ndcg_model = ndcg(embedder.encode, scored, normalize=normalize)
    job.log(f"writing the {format_name} files in {job.precision}")
    export_format.write(job, folder)
    check = Check("")
    if has_texts:
        reader = export_format.reader(folder)
        job.log(f"encoding the same texts with the export in {reader.runtime}")
        export_ND = encode_all(reader.encode, texts)
        check = compare_embeddings(reader.runtime, model_ND, export_ND, tolerance)
        check.num_texts = len(texts)
        if format_name == "static":
            # A student is another model: its similarities should follow the model's.
            check.rank_correlation = similarity_correlation(model_ND, export_ND)
        if not check.passes and format_name == "static":
            advice = ""
            if not job.texts:
                advice = "; it had no texts to learn from: export a run, or give --data"
            raise UserError(
                f"the static student of {job.model} does not follow the model: {check.lines()[0]}{advice}; {nothing}"
            )
        if not check.passes:
            reason = describe_difference(
                check, embedder, reader, model_ND, export_ND, texts
            )
            raise UserError(
                f"the {format_name} export of {job.model} differs from the model in {reason}: {check.lines()[0]}; {nothing}"
            )
    if images:
        image_reader = OnnxImages(folder)
        exported_ND = image_reader.encode(images)
        of_images = compare_embeddings(
            image_reader.runtime, image_ND, exported_ND, tolerance
        )
        of_images.num_images = len(images)
        if not of_images.passes:
            raise UserError(
                f"the onnx export of {job.model} differs from the model in its images (image processor, pooling or "
                f"weights): {of_images.lines()[0]}; {nothing}"
            )
        check.runtime = of_images.runtime
        check.images = of_images
    if scored is not None:
        check.ndcg_model = ndcg_model
        check.ndcg_export = ndcg(reader.encode, scored, normalize=normalize)
        check.evaluation = scored.summary()
    return check


def _describe(
    folder: Path,
    description: ModelDescription,
    format_name: FormatName,
    precision: WeightPrecision,
    check: Check | None,
    vectors: Mapping[str, Any],
) -> dict[str, Any]:
    """Write export.json and the card; return the content of the first. `vectors`: facts about embeddings."""
    facts = {
        "format": format_name,
        "precision": precision,
        **vectors,
        "check": None if check is None else asdict(check),
    }
    write_json(folder / EXPORT_FILE, facts)
    card = folder / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8")
    else:
        text = render_card(description, Card())
    lines = ["Not compared with the model (`--no-check`)."]
    if check is not None:
        lines = [f"- {line}" for line in check.lines()]
    command = f"vembed export --format {format_name} --precision {precision}"
    text = f"{text.rstrip()}\n\n## Export\n\nExported by `{command}`.\n\n"
    replace_text(card, text + "\n".join(lines) + "\n")
    return facts


# ---- rerankers with a head of one label, as a graph from pairs to scores -----------------------------------------------


SCORE_TOLERANCE: dict[WeightPrecision, float] = {
    "float32": 1e-4,
    "float16": 1e-2,
    "int8": 1e-1,
}
"""Largest allowed difference of two scores by the precision of the weights, relative to the largest score."""


class PairGraph(nn.Module):
    """A sequence classifier from token ids to scores."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        # Eager attention is plain matrix products: every runtime has them, and int8 kernels replace them.
        classifier.set_attn_implementation("eager")
        self.classifier = classifier

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Map [n, tokens] inputs to [n, labels] logits. BERT takes `token_type_ids`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs[SEGMENTS] = token_type_ids
        logits: Tensor = self.classifier(**inputs).logits
        return logits


class OnnxReranker:
    """A reranker exported to ONNX, in onnxruntime. It uses the exported files alone."""

    def __init__(self, folder: Path) -> None:
        values = read_object(folder / DESCRIPTION_FILE)
        self.description = ModelDescription.from_dict(values, folder)
        self.featuriser = PairFeaturiser(self.description)
        self.graph = OnnxGraph(folder / ONNX_FILE)

    def scores_of(self, features: Sequence[Features]) -> np.ndarray:
        """Return [n, 1] float32 scores of tokenized pairs."""
        lengths = [feature.length for feature in features]
        collate = partial(padded_inputs, self.featuriser)
        logits: np.ndarray = self.graph.run(lengths, features, collate)
        if logits.shape[1] == 1:
            return logits
        # As vembed.models.heads has it for two labels.
        return np.diff(logits, axis=1)


def padded_inputs(featuriser: PairFeaturiser, features: Sequence[Features]) -> Inputs:
    """Return the inputs of a batch of pairs with a mask, which a graph always takes."""
    inputs = featuriser.joined(features)
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    return inputs


def export_reranker(
    model: str,
    target: Path,
    precision: WeightPrecision,
    *,
    check: bool,
    data: EvalData | None,
    tolerance: float | None,
    trust_remote_code: bool,
    log: Log,
) -> Exported:
    """Write a reranker into the new folder `target`. With `check`, raise UserError if its scores differ from the model's."""
    reranker = Reranker(
        model,
        device="cpu",
        torch_dtype="float32",
        trust_remote_code=trust_remote_code,
    )
    description = reranker.description
    if description.scores == "answer":
        raise UserError(
            f"--format onnx: {model} answers yes or no to a question in a template, which runtimes of ONNX do not "
            "write; serve its folder with vLLM or `vembed serve`, or train with reranker_head: label"
        )
    # Pairs of the texts that other exports are compared by: queries and documents of the evaluation data.
    of_kind: dict[str, list[Item]] = {"query": [], "document": []}
    for text, kind in texts_to_compare(data, description.max_length):
        of_kind[kind].append(Item(text=text))
    pairs = list(zip(of_kind["query"], of_kind["document"], strict=False))
    features = reranker.featuriser.features(pairs)
    if check:
        log(f"scoring {len(features):,d} pairs with the model")
        expected = reranker.scores_of(features)
    del reranker
    with replaced_folder(target) as folder:
        log(f"writing the onnx file in {precision}")
        save_processors(description, folder)
        write_reranker_layout(folder, description)
        write_json(folder / DESCRIPTION_FILE, description.to_dict())
        classifier = read_weights(
            AutoModelForSequenceClassification,
            description.folder,
            torch.float32,
            trust_remote_code,
        )
        if classifier.config.pad_token_id is None:
            # Decoders look for the last token that is no padding.
            classifier.config.pad_token_id = load_tokenizer(description).pad_token_id
        classifier.config.save_pretrained(folder)
        # Two pairs of different lengths: sizes of 1 would be taken for constants.
        padded = padded_inputs(PairFeaturiser(description), features[:2])
        names = ("input_ids", "attention_mask", SEGMENTS)
        write_graph(
            PairGraph(classifier),
            {name: padded[name] for name in names if name in padded},
            {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")},
            folder / ONNX_FILE,
            precision,
            output="logits",
        )
        result = None
        if check:
            exported = OnnxReranker(folder)
            log(f"scoring the same pairs with the export in {exported.graph.runtime}")
            scores = exported.scores_of(features)[:, 0]
            largest = float(np.abs(scores - expected[:, 0]).max())
            result = Check(
                runtime=exported.graph.runtime,
                num_pairs=len(features),
                largest_difference=largest / max(float(np.abs(expected).max()), 1.0),
                tolerance=SCORE_TOLERANCE[precision]
                if tolerance is None
                else tolerance,
            )
            if not result.passes:
                raise UserError(
                    f"the onnx export of {model} differs from the model: {result.lines()[0]}; nothing was written "
                    "(--tolerance allows more)"
                )
        facts = _describe(folder, description, "onnx", precision, result, {})
    return Exported(target, result, description, facts)


# ---- servers of other projects: which export each reads, and the command that starts it ----------------------------


FORMAT_OF: dict[ServerName, FormatName] = {
    "tei": "safetensors",
    "vllm": "safetensors",
    "llama.cpp": "gguf",
    "infinity": "safetensors",
    "fastembed": "onnx",
}
FASTEMBED_FILE = "use_fastembed.py"
_FASTEMBED = '''"""Loads this export in fastembed: `python {file}`."""

from pathlib import Path

from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

HERE = Path(__file__).resolve().parent
TextEmbedding.add_custom_model(
    model="vembed/export",
    pooling=PoolingType.DISABLED,  # pooling and normalisation are inside the graph
    normalization=False,
    sources=ModelSource(url="https://localhost/unused"),
    dim={dim},
    model_file="model.onnx",
)
model = TextEmbedding("vembed/export", specific_model_path=str(HERE))
print(next(iter(model.embed([{query!r} + "a query"])))[:5])
'''


def check_served(server: ServerName, description: ModelDescription) -> None:
    """Raise UserError if a server cannot run a model as it is."""
    runs_own_code = server == "vllm" and description.pooling == MODEL_POOLING
    # Empty for servers that run the model's own pooling.
    known = poolings_of(server)
    if known and not runs_own_code and description.pooling not in known:
        raise UserError(
            f"--for {server}: it pools by {', '.join(known)}, and {description.name} by {description.pooling}: use --for "
            "fastembed, whose graph has the pooling inside"
        )


def start_of(
    server: ServerName,
    folder: Path,
    description: ModelDescription,
) -> dict[str, str | None]:
    """Return the command that starts a server on an export ("start"), and what to know about it ("note"). Options that
    the server does not read from the folder are in the command."""
    note = None
    if description.query_prompt or description.document_prompt:
        note = (
            f"the server adds no prompt: send {description.query_prompt!r} before queries and "
            f"{description.document_prompt!r} before documents"
        )
    pooling = ""
    if server in ("tei", "llama.cpp"):
        pooling = POOLINGS[description.pooling].servers[server]
    gguf = folder / "model.gguf"
    commands = {
        "tei": f"text-embeddings-router --model-id {folder} --pooling {pooling} --port 8080",
        "vllm": f"vllm serve {folder} --runner pooling --port 8080",
        "infinity": f"infinity_emb v2 --model-id {folder} --port 8080",
        "llama.cpp": f"llama-server -m {gguf} --embeddings --pooling {pooling} --port 8080",
        "fastembed": f"python {folder / FASTEMBED_FILE}",
    }
    return {"start": commands[server], "note": note}


# ---- a running server against the model that it should serve -----------------------------------------------------------


TEXTS_PER_REQUEST = 16
TIMEOUT_SECONDS = 60
OPENAI_ROUTE = "/v1/embeddings"
"""vLLM, TEI, llama.cpp and `vembed serve` all have it."""


def served_embeddings(url: str, model: str, texts: list[str]) -> np.ndarray:
    """Return [n, d] embeddings of a running server. Raise UserError with what it answered. `url`: of the route.
    `model`: the name of the model there."""
    values = {"model": model, "input": texts, "encoding_format": "float"}
    body = json.dumps(values).encode()
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("VEMBED_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            answer = json.load(response)
        # OpenAI's format does not promise the order of the inputs.
        rows = sorted(answer["data"], key=lambda row: int(row["index"]))
        return np.array([row["embedding"] for row in rows], np.float32)
    except urllib.error.HTTPError as error:
        content = error.read(300).decode(errors="replace")
        raise UserError(f"{url} answers {error.code}: {content}") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{url} does not answer as an embedding server: {error}"
        ) from error


def compare_server(
    url: str,
    model: str,
    *,
    data: str | None,
    served_name: str | None,
    tolerance: float,
    log: Log,
) -> float:
    """Compare a server with `model` and return the largest cosine distance. Raise RunError above `tolerance`.

    The prompts are sent as a part of each text: servers add none by themselves.
    """
    name = served_name or model
    route = url.rstrip("/")
    if not route.endswith("/embeddings"):
        route = route.removesuffix("/v1") + OPENAI_ROUTE
    served_embeddings(route, name, ["a"])  # before the model is loaded
    embedder = Embedder(model, device="cpu", torch_dtype="float32")
    description = embedder.description
    texts = texts_to_compare(evaluation_data(model, data), description.max_length)
    expected_ND = encode_all(embedder.encode, texts)
    prompts: dict[Kind, str] = {
        "query": description.query_prompt,
        "document": description.document_prompt,
    }
    prompted = [prompts[kind] + text for text, kind in texts]
    served = []
    for start in range(0, len(texts), TEXTS_PER_REQUEST):
        batch = prompted[start : start + TEXTS_PER_REQUEST]
        served.append(served_embeddings(route, name, batch))
        log(f"{start + len(batch)} of {len(texts)} texts")
    served_ND = np.concatenate(served)
    if served_ND.shape != expected_ND.shape:
        raise RunError(
            f"{route} differs from {model}: embeddings of {served_ND.shape[1]:,d} dimensions for "
            f"{expected_ND.shape[1]:,d}"
        )
    check = compare_embeddings(route, expected_ND, served_ND, tolerance)
    largest = check.largest_distance
    compared = f"largest cosine distance {largest:.2g} (tolerance {tolerance:.2g})"
    if largest > tolerance:
        raise RunError(
            f"{route} differs from {model}: {compared}, for the text {texts[check.worst][0][:60]!r}; "
            "compare its pooling, its maximum length and its tokenizer with the model's"
        )
    log(f"{route} equals {model}: {compared}")
    return largest


# ---- the check: an export in its own runtime against the model, on the same texts; what differs is named -----------


NUM_TEXTS = 200
NUM_IMAGES = 40
DISTANCE_TOLERANCE: dict[WeightPrecision, float] = {
    "float32": 1e-4,
    "float16": 1e-3,
    "bfloat16": 1e-2,
    "int8": 5e-2,
}
"""Largest allowed cosine distance by the precision of the weights."""
LENGTH_TOLERANCE_FACTOR = 10
"""Times the tolerance that the lengths of two embeddings may differ, relatively: a length changes in proportion to an
error, a cosine distance with its square."""
STUDENT_TOLERANCE = 0.5
"""Largest 1 - Spearman's correlation of a student's similarities with the model's."""
MAX_SCORED_QUERIES = 500
MAX_SCORED_DOCUMENTS = 2_000
"""For the nDCG of an export. Relevant documents are always among them."""
WORDS = (
    "the a of red green small bird garden sorted list returns house river music number city window open close "
    "value error file name 17 3.5 (x) data, model; query? document. Zurich naive tree between never always"
)


@dataclass
class Check:
    """Result of a comparison of texts or of images, or of a reranker's pairs. A model of images alone has no texts in
    it."""

    runtime: str
    num_texts: int = 0
    num_images: int = 0
    largest_distance: float = 0.0
    """Largest cosine distance between the two embeddings of an input."""
    worst: int = 0
    """The input with that distance."""
    tolerance: float = 0.0
    largest_length_error: float = 0.0
    """Largest relative difference of the lengths of the two embeddings."""
    ndcg_model: float | None = None
    ndcg_export: float | None = None
    evaluation: str = ""
    rank_correlation: float | None = None
    """Of a student: Spearman's correlation of the similarities of all pairs. It has vectors of its own, so that
    distances to the model's mean nothing."""
    images: Check | None = None
    num_pairs: int = 0
    largest_difference: float = 0.0
    """Between the two scores of a pair, relative to the largest score of the model, which counts as at least 1."""

    @property
    def passes(self) -> bool:
        """True if the export may be used in the model's place."""
        if self.rank_correlation is not None:
            return 1 - self.rank_correlation <= self.tolerance
        errors = (
            self.largest_distance,
            self.largest_difference,
            self.largest_length_error / LENGTH_TOLERANCE_FACTOR,
        )
        # Written so that NaN does not pass.
        return all(error <= self.tolerance for error in errors)

    def lines(self) -> list[str]:
        """Return what is printed and written into the card."""
        lines = []
        inputs = f"{self.num_texts:,d} texts"
        if self.num_images:
            inputs = f"{self.num_images:,d} images"
        elif self.num_pairs:
            inputs = f"{self.num_pairs:,d} pairs"
        both = f"{inputs} through the model and through {self.runtime}"
        if self.rank_correlation is not None:
            lines.append(
                f"{both}: Spearman correlation {self.rank_correlation:.3f} of the similarities of all pairs (at least "
                f"{1 - self.tolerance:.2g})"
            )
        elif self.num_pairs:
            lines.append(
                f"{both}: largest difference of scores {self.largest_difference:.2g} of the largest score (tolerance "
                f"{self.tolerance:.2g})"
            )
        elif self.num_texts or self.num_images:
            lines.append(
                f"{both}: largest cosine distance {self.largest_distance:.2g} (tolerance {self.tolerance:.2g})"
            )
        if self.ndcg_model is not None and self.ndcg_export is not None:
            difference = self.ndcg_export - self.ndcg_model
            lines.append(
                f"nDCG@10 of the model {self.ndcg_model:.4f}, of the export {self.ndcg_export:.4f} "
                f"(difference {difference:+.4f}; {self.evaluation})"
            )
        if self.images is not None:
            lines += self.images.lines()
        return lines


# ---- inputs --------------------------------------------------------------------------------------------------------


def evaluation_data(model: str, data: str | None) -> EvalData | None:
    """Return evaluation data: those at `data`, by default those of the run that made the model, if they are there."""
    names = ["retrieval_mode"]
    if data is None:
        names += ["val_data_path", "column_mapping", "image_root", "on_bad_record"]
    options = run_options(model, names)
    if data is None:
        data = options.pop("val_data_path", None)
        if data is None or not Path(data).exists():
            return None
    return open_eval_data(DataSection(data_path=data, **options), data)


def texts_to_compare(data: EvalData | None, max_length: int) -> Texts:
    """Return NUM_TEXTS texts: half queries and half documents of the evaluation data, filled up with made ones."""
    texts = []
    collections = () if data is None else data.collections
    for items, kind in zip(collections, get_args(Kind), strict=False):
        of_kind: dict[str, None] = {}
        # Only as far as needed: a corpus may have millions.
        for item in items:
            if len(of_kind) == NUM_TEXTS // 2:
                break
            if item.text and not item.images:
                of_kind[item.text] = None
        texts += [(text, kind) for text in of_kind]
    # Made ones, of one word up to more than the limit, so that the cut is compared too; the same at every call.
    draw = np.random.default_rng(0)
    longest = min(max_length, 512) + 8
    num_made = NUM_TEXTS - len(texts)
    lengths = [1, 2, 3, longest]
    lengths += draw.integers(1, min(longest, 40), NUM_TEXTS).tolist()
    for number, length in enumerate(lengths[:num_made]):
        text = " ".join(draw.choice(WORDS.split(), length))
        texts.append((text, "document" if number % 2 else "query"))
    return texts


def bounded(data: EvalData | None) -> RetrievalData | None:
    """Return retrieval data of texts with a bounded corpus; None for data without nDCG or with images in that part."""
    if not isinstance(data, RetrievalData):
        return None
    queries = data.queries[:MAX_SCORED_QUERIES]
    relevance = data.relevance[:MAX_SCORED_QUERIES]
    # Relevant documents first, so that the bound leaves out none of them.
    new_numbers: dict[int, int] = {}
    for grades in relevance:
        for document in grades:
            new_numbers.setdefault(document, len(new_numbers))
    for document in range(len(data.documents)):
        if len(new_numbers) >= MAX_SCORED_DOCUMENTS:
            break
        new_numbers.setdefault(document, len(new_numbers))
    documents = tuple(data.documents[number] for number in new_numbers)
    if any(item.images or not item.text for item in (*queries, *documents)):
        return None
    new_relevance = []
    for grades in relevance:
        new_grades = {new_numbers[number]: grade for number, grade in grades.items()}
        new_relevance.append(new_grades)
    return RetrievalData(data.name, queries, documents, tuple(new_relevance))


# ---- comparisons ---------------------------------------------------------------------------------------------------


def ndcg(
    encode: EncodeTexts,
    data: RetrievalData,
    *,
    normalize: bool,
) -> float:
    """Return nDCG@10 of an encoder."""
    queries = encode([item.text or "" for item in data.queries], "query")
    documents = encode([item.text or "" for item in data.documents], "document")
    metrics = retrieval_metrics(queries, documents, data, [10], normalize=normalize)
    return metrics[data.metric]


def distances(first_ND: np.ndarray, second_ND: np.ndarray) -> np.ndarray:
    """Return [n] cosine distances of rows, in float64; infinite where a value is not finite."""
    first = first_ND.astype(np.float64)
    second = second_ND.astype(np.float64)
    products = np.einsum("nd,nd->n", first, second)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    # A vector of zeros has the distance 1 to any other.
    cosines = products / np.maximum(lengths, 1e-300)
    is_finite = np.isfinite(cosines)
    return np.where(is_finite, np.maximum(1 - cosines, 0.0), np.inf)


def similarity_correlation(first_ND: np.ndarray, second_ND: np.ndarray) -> float:
    """Return Spearman's correlation of the cosine similarities of all pairs of rows."""
    pairs = np.triu_indices(len(first_ND), 1)
    similarities = []
    for vectors in (first_ND, second_ND):
        unit = unit_rows(vectors)
        similarities.append((unit @ unit.T)[pairs])
    return float(spearmanr(*similarities).statistic)


def compare_embeddings(
    runtime: str,
    model_ND: np.ndarray,
    export_ND: np.ndarray,
    tolerance: float,
) -> Check:
    """Return the comparison of two sets of embeddings of the same inputs."""
    input_distances = np.full(len(model_ND), np.inf)
    largest_length_error = np.inf
    if model_ND.shape == export_ND.shape:
        input_distances = distances(model_ND, export_ND)
        lengths = np.linalg.norm(model_ND, axis=1)
        differences = np.abs(np.linalg.norm(export_ND, axis=1) - lengths)
        relative = differences / np.maximum(lengths, 1e-12)
        largest_length_error = float(relative.max())
    worst = int(np.argmax(input_distances))
    return Check(
        runtime=runtime,
        largest_distance=float(input_distances[worst]),
        worst=worst,
        tolerance=tolerance,
        largest_length_error=largest_length_error,
    )


def describe_difference(
    check: Check,
    embedder: Embedder,
    reader: ExportReader,
    model_ND: np.ndarray,
    export_ND: np.ndarray,
    texts: Texts,
) -> str:
    """Return what differs, found on the text with the largest distance: sizes, token ids, lengths or the rest."""
    if model_ND.shape != export_ND.shape:
        return f"embeddings of {export_ND.shape[1]:,d} dimensions instead of {model_ND.shape[1]:,d} (Dense, truncate_dim)"
    text, kind = texts[check.worst]
    (features,) = embedder.featuriser.features([(Item(text=text), kind)])
    model_ids = [] if features.token_ids is None else features.token_ids.tolist()
    (export_ids,) = reader.texts.token_ids([text], kind)
    if model_ids != export_ids:
        return (
            f"its {kind} tokens: {len(export_ids):,d} instead of {len(model_ids):,d} for the text {text!r:.60} "
            "(prompt, tokenizer, special tokens or truncation)"
        )
    if check.largest_distance <= check.tolerance:
        return f"the lengths of its embeddings, by up to {check.largest_length_error:.2g} of them (normalisation)"
    return "its pooling, arithmetic or weights: tokens, sizes and lengths agree"
