"""compare_embeddings(): an export in its own runtime against the model, on the same texts; what differs is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.stats import spearmanr

from vembed.config.schema import DataSection
from vembed.data.examples import Item, Kind
from vembed.data.images.files import load_image
from vembed.evaluation.dataset import EvalData, RetrievalData, open_eval_data
from vembed.evaluation.report.record import read_run
from vembed.evaluation.retrieval import retrieval_metrics
from vembed.export.formats import EncodeTexts, ExportReader, Texts, WeightPrecision
from vembed.export.onnx_format import OnnxImages, made_images
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import first_dims
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.poolings.table import POOLINGS

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
METRIC = "ndcg@10"
WORDS = (
    "the a of red green small bird garden sorted list returns house river music number city window open close "
    "value error file name 17 3.5 (x) data, model; query? document. Zurich naive tree between never always"
)


@dataclass(frozen=True)
class ImageCheck:
    """Result of a comparison of images."""

    runtime: str
    num_images: int
    largest_distance: float
    """Largest cosine distance between the two embeddings of an image."""
    largest_length_error: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """True if the export may be used in the model's place."""
        return _are_close(
            self.largest_distance, self.largest_length_error, self.tolerance
        )

    def line(self) -> str:
        """Return what is printed and written into the card."""
        return (
            f"{self.num_images:,d} images through the model and through {self.runtime}: largest cosine distance "
            f"{self.largest_distance:.2g} (tolerance {self.tolerance:.2g})"
        )


@dataclass(frozen=True)
class Check:
    """Result of a comparison. A model of images alone has no texts in it."""

    runtime: str
    num_texts: int = 0
    largest_distance: float = 0.0
    """Largest cosine distance between the two embeddings of a text."""
    tolerance: float = 0.0
    worst_text: str = ""
    worst_kind: Kind = "document"
    largest_length_error: float = 0.0
    """Largest relative difference of the lengths of the two embeddings."""
    ndcg_model: float | None = None
    ndcg_export: float | None = None
    evaluation: str = ""
    rank_correlation: float | None = None
    """Of a student: Spearman's correlation of the similarities of all pairs. It has vectors of its own, so that
    distances to the model's mean nothing."""
    images: ImageCheck | None = None

    @property
    def passes(self) -> bool:
        """True if the texts of the export may be used in the model's place."""
        if self.rank_correlation is not None:
            return 1 - self.rank_correlation <= self.tolerance
        return _are_close(
            self.largest_distance, self.largest_length_error, self.tolerance
        )

    def lines(self) -> list[str]:
        """Return what is printed and written into the card."""
        lines = []
        both = f"{self.num_texts:,d} texts through the model and through {self.runtime}"
        if self.rank_correlation is not None:
            lines.append(
                f"{both}: Spearman correlation {self.rank_correlation:.3f} of the similarities of all pairs (at least "
                f"{1 - self.tolerance:.2g})"
            )
        elif self.num_texts:
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
            lines.append(self.images.line())
        return lines


def _are_close(
    distance: float,
    length_error: float,
    tolerance: float,
) -> bool:
    return distance <= tolerance and length_error <= LENGTH_TOLERANCE_FACTOR * tolerance


# ---- inputs --------------------------------------------------------------------------------------------------------


def evaluation_data(model: str, data: str | None) -> EvalData | None:
    """Return evaluation data: those at `data`, by default those of the run that made the model, if they are there."""
    options = {}
    if data is None:
        options = run_options(model, ("column_mapping", "image_root", "on_bad_record"))
        data = run_options(model, ("val_data_path",)).get("val_data_path")
        if data is None or not Path(data).exists():
            return None
    return open_eval_data(DataSection(data_path=data, **options), data)


def run_options(model: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return options of the run that made a model; none for a model of another origin."""
    path = Path(model).expanduser()
    # The run itself, or its final/ or one of its checkpoints.
    for folder in (path, path.parent):
        if (folder / "config.yaml").is_file():
            config = read_run(folder).config
            return {name: config[name] for name in names if name in config}
    return {}


def texts_to_compare(data: EvalData | None, max_length: int) -> Texts:
    """Return NUM_TEXTS texts: half queries and half documents of the evaluation data, filled up with made ones."""
    texts = []
    for items, kind in _items_by_kind(data):
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
    while len(lengths) < num_made:
        lengths.append(int(draw.integers(1, min(longest, 40))))
    for number, length in enumerate(lengths[:num_made]):
        text = " ".join(draw.choice(WORDS.split(), length))
        texts.append((text, "document" if number % 2 else "query"))
    return texts


def images_to_compare(data: EvalData | None) -> list[Image.Image]:
    """Return NUM_IMAGES images: the first half those of the evaluation data, the others made."""
    images: list[Image.Image] = []
    used = set()
    for items, _ in reversed(_items_by_kind(data)):  # documents first
        for item in items:
            for reference in item.images:
                if len(images) < NUM_IMAGES // 2 and reference not in used:
                    used.add(reference)
                    images.append(load_image(reference))
    return images + made_images(NUM_IMAGES - len(images))


def _items_by_kind(data: EvalData | None) -> list[tuple[Sequence[Item], Kind]]:
    if data is None:
        return []
    if isinstance(data, RetrievalData):
        return [(data.queries, "query"), (data.documents, "document")]
    return [(data.first, "query"), (data.second, "document")]


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
    metrics = retrieval_metrics(queries, documents, data, [10], [], normalize=normalize)
    return metrics[METRIC]


def distances(first_ND: np.ndarray, second_ND: np.ndarray) -> np.ndarray:
    """Return [n] cosine distances of rows, in float64; infinite where a value is not finite."""
    first = first_ND.astype(np.float64)
    second = second_ND.astype(np.float64)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    # A vector of zeros has the distance 1 to any other.
    cosines = np.einsum("nd,nd->n", first, second) / np.maximum(lengths, 1e-300)
    is_finite = np.isfinite(cosines)
    return np.where(is_finite, np.maximum(1 - cosines, 0.0), np.inf)


def length_error(model_ND: np.ndarray, export_ND: np.ndarray) -> float:
    """Return the largest difference between the lengths of two rows, relative to the first."""
    lengths = np.linalg.norm(model_ND, axis=1)
    differences = np.abs(np.linalg.norm(export_ND, axis=1) - lengths)
    return float(np.max(differences / np.maximum(lengths, 1e-12)))


def similarity_correlation(first_ND: np.ndarray, second_ND: np.ndarray) -> float:
    """Return Spearman's correlation of the cosine similarities of all pairs of rows."""
    pairs = np.triu_indices(len(first_ND), 1)
    similarities = []
    for vectors in (first_ND, second_ND):
        unit = first_dims(vectors, vectors.shape[1], True)
        similarities.append((unit @ unit.T)[pairs])
    return float(spearmanr(*similarities).statistic)


def compare_embeddings(
    runtime: str,
    model_ND: np.ndarray,
    export_ND: np.ndarray,
    texts: Texts,
    tolerance: float,
) -> Check:
    """Return the comparison of two sets of embeddings of the same texts."""
    text_distances = np.full(len(model_ND), np.inf)
    largest_length_error = np.inf
    if model_ND.shape == export_ND.shape:
        text_distances = distances(model_ND, export_ND)
        largest_length_error = length_error(model_ND, export_ND)
    worst = int(np.argmax(text_distances))
    worst_text, worst_kind = texts[worst]
    return Check(
        runtime=runtime,
        num_texts=len(texts),
        largest_distance=float(text_distances[worst]),
        tolerance=tolerance,
        worst_text=worst_text,
        worst_kind=worst_kind,
        largest_length_error=largest_length_error,
    )


def compare_images(
    folder: Path,
    images: Sequence[Image.Image],
    model_ND: np.ndarray,
    tolerance: float,
) -> ImageCheck:
    """Return the comparison of the exported image graph with the model's own vectors of the same images."""
    reader = OnnxImages(folder)
    export_ND = reader.encode(images)
    largest = float(distances(model_ND, export_ND).max())
    largest_length_error = length_error(model_ND, export_ND)
    return ImageCheck(
        reader.runtime, len(images), largest, largest_length_error, tolerance
    )


def describe_difference(
    check: Check,
    embedder: Embedder,
    reader: ExportReader,
    model_ND: np.ndarray,
    export_ND: np.ndarray,
) -> str:
    """Return what differs, found on the text with the largest distance: sizes, token ids, lengths or pooling."""
    if model_ND.shape != export_ND.shape:
        return f"embeddings of {export_ND.shape[1]:,d} dimensions instead of {model_ND.shape[1]:,d} (Dense, truncate_dim)"
    text = check.worst_text
    kind = check.worst_kind
    featuriser = embedder.featuriser
    (features,) = featuriser.features([(Item(text=text), kind)])
    model_ids = [] if features.token_ids is None else features.token_ids.tolist()
    export_ids = reader.token_ids(text, kind)
    if model_ids != export_ids:
        return (
            f"its {kind} tokens: {len(export_ids):,d} instead of {len(model_ids):,d} for the text {text!r:.60} "
            "(prompt, tokenizer, special tokens or truncation)"
        )
    if check.largest_distance <= check.tolerance:
        return f"the lengths of its embeddings, by up to {check.largest_length_error:.2g} of them (normalisation)"
    description = embedder.description
    export_1D = reader.encode([text], kind)
    model_pooling = POOLINGS.get(description.pooling)
    for pooling in POOLINGS.values():
        # Only an untrained one of the same width can stand in the place of the model's.
        if model_pooling is None or pooling.is_trained:
            continue
        if pooling.width(1) != model_pooling.width(1):
            continue
        pooled = description.with_(pooling=pooling.name)
        model = EmbeddingModel(pooled, embedder.backbone, embedder.head).eval()
        (vectors,) = model([("text", featuriser.collate([features]))])
        full = vectors.detach().float().numpy()
        pooled_1D = embedder.finish(full, embedder.truncate_dim, None)
        if distances(pooled_1D, export_1D)[0] <= check.tolerance:
            return f"its pooling: {pooling.name} instead of {description.pooling}"
    return "its arithmetic or weights: tokens, sizes and lengths agree"
