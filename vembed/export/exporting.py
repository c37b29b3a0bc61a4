"""export_model(): a model into a folder of one format, compared with the model before the folder gets its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vembed.config.schema import TrainConfig
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Kind
from vembed.data_tools.init.datasets import open_sets
from vembed.errors import UserError
from vembed.evaluation.dataset import EvalData, RetrievalData, open_eval_data
from vembed.evaluation.report.record import read_run
from vembed.export.check import (
    NO_TEXTS,
    NUM_TEXTS,
    STUDENT_TOLERANCE,
    TOLERANCE,
    Check,
    Texts,
    compare,
    difference,
    encode_all,
    ndcg,
    similarity_correlation,
    smaller,
    texts_to_compare,
)
from vembed.export.formats import (
    PRECISIONS,
    ExportJob,
    ExportReader,
    Format,
    FormatName,
    WeightPrecision,
    say_nothing,
)
from vembed.export.gguf_format import GgufFormat
from vembed.export.onnx_format import OnnxFormat
from vembed.export.onnx_images import compare_images, images_to_compare
from vembed.export.openvino_format import OpenvinoFormat
from vembed.export.safetensors_format import SafetensorsFormat
from vembed.export.servers import ServerName, server_refusal, write_server_files
from vembed.export.static_format import StaticFormat
from vembed.inference.embedder import Embedder
from vembed.models.families.backbones import file_dtype, read_config
from vembed.models.families.description import ModelDescription
from vembed.models.families.weight_files import EXPORT_FILE
from vembed.saving.card import Card, render_card
from vembed.saving.files import replaced_folder

MOST_STUDENT_EXAMPLES = 10_000
"""Examples whose texts train a student; of more, as many spread over all."""
KNOWN: dict[FormatName, Format] = {
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
    form: FormatName,
    precision: WeightPrecision | None = None,
    *,
    check: bool = True,
    data: str | None = None,
    tolerance: float | None = None,
    server: ServerName | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], object] = say_nothing,
) -> Exported:
    """Write `model` to the new folder `output`. With `check`, an export whose embeddings differ by more than
    `tolerance` is refused, and nothing is left behind. `data`: evaluation data for the texts of the check and the nDCG;
    by default those of the run. `say` takes a line before each part that may take minutes."""
    target = Path(output)
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
    kind = KNOWN[form]
    if precision is not None and precision not in kind.precisions:
        raise UserError(
            f"--precision {precision}: --format {form} takes {', '.join(kind.precisions)}"
        )
    missing = kind.missing()
    if missing is not None and (check or form != "safetensors"):
        raise UserError(f"--format {form}: {missing}")
    found = (
        evaluation_data(model, data, trust_remote_code=trust_remote_code)
        if check
        else None
    )
    embedder = Embedder(
        model,
        device="cpu",
        torch_dtype="float32",
        mixed_precision="no",
        trust_remote_code=trust_remote_code,
    )
    # Float32 for every precision: each format rounds the weights itself, and the check compares with unrounded ones.
    refusal = kind.refusal(embedder)
    if refusal is not None:
        raise UserError(f"--format {form}: {model} cannot be exported: {refusal}")
    refusal = None if server is None else server_refusal(server, embedder.description)
    if refusal is not None:
        raise UserError(f"--for {server}: {model} cannot be served: {refusal}")
    precision = precision or _default_precision(form, embedder.description)
    # The folder has another name until the check has passed, so that a refused export leaves nothing behind.
    with replaced_folder(target) as folder:
        job = ExportJob(
            model,
            embedder,
            precision,
            student_texts(model, found) if form == "static" else (),
            say,
        )
        result = None
        if check:
            usual = STUDENT_TOLERANCE if form == "static" else TOLERANCE[precision]
            largest = usual if tolerance is None else tolerance
            result = _write_and_check(kind, job, folder, found, largest, form)
        else:
            _write(kind, job, folder, form)
        facts = _describe(folder, embedder, form, precision, result) | (
            {"num_training_texts": len(job.texts)} if form == "static" else {}
        )
        if server is not None:
            dim = embedder.truncate_dim or embedder.description.embedding_dim
            write_server_files(server, folder, embedder.description, dim)
    return Exported(target, result, embedder.description, facts)


def _default_precision(
    form: FormatName, description: ModelDescription
) -> WeightPrecision:
    """Return float32; for safetensors the dtype of the model's file, so that nothing grows or is rounded."""
    if form != "safetensors":
        return "float32"
    config = read_config(
        Path(description.source), trust_remote_code=description.trust_remote_code
    )
    name = str(file_dtype(config)).removeprefix("torch.")
    return next((one for one in PRECISIONS if one == name), "float32")


def evaluation_data(
    model: str, data: str | None, *, trust_remote_code: bool = False
) -> EvalData | None:
    """Return evaluation data: those at `data`, by default those of the run that made the model, if they are there."""
    config = TrainConfig(
        model_name=model, data_path="-", trust_remote_code=trust_remote_code
    )
    if data is None:
        run = run_folder(model)
        if run is None:
            return None
        values = read_run(run).config
        data = values.get("val_data_path")
        if data is None or not Path(data).exists():
            return None
        known = ("column_mapping", "image_root", "on_bad_record")
        config = config.changed(
            **{name: values[name] for name in known if name in values}
        )
    return open_eval_data(config, data)


def student_texts(model: str, data: EvalData | None) -> Texts:
    """Return the texts to train a student with: queries and documents of the run's training data, otherwise documents
    of the evaluation data that the check does not use."""
    run = run_folder(model)
    if run is not None:
        values = read_run(run).config
        known = (
            "column_mapping",
            "image_root",
            "on_bad_record",
            "max_train_examples",
            "val_split",
            "seed",
        )
        paths = (
            values["data_path"]
            if isinstance(values["data_path"], list)
            else [values["data_path"]]
        )
        if all(isinstance(one, str) and Path(one).exists() for one in paths):
            config = TrainConfig(
                model_name=model,
                data_path=paths,
                **{name: values[name] for name in known if name in values},
            )
            return _texts_of(open_sets(config, compares=False).examples)
    if isinstance(data, RetrievalData):
        # As many spread over the whole corpus, which may have millions; the first are those of the check.
        first = NUM_TEXTS // 2
        step = max(-(-(len(data.documents) - first) // MOST_STUDENT_EXAMPLES), 1)
        some = (
            data.documents[number] for number in range(first, len(data.documents), step)
        )
        return [(one.text, "document") for one in some if one.text and not one.images]
    return []


def _texts_of(examples: ExampleStore) -> Texts:
    # Every step-th example, as rows that stand together are often alike.
    step = -(-len(examples) // MOST_STUDENT_EXAMPLES)
    found: dict[tuple[str, Kind], None] = {}
    for number in range(0, len(examples), step):
        example = examples[number]
        found |= {(example.query.text, "query"): None} if example.query.text else {}
        found |= {
            (one.text, "document"): None
            for one in (*example.positives, *example.negatives)
            if one.text
        }
    return list(found)


def run_folder(model: str) -> Path | None:
    """Return the folder of the run that made a model; None for a model of another origin."""
    place = Path(model).expanduser()
    # `place` is the run itself, or its final/ or one of its checkpoints.
    return next(
        (one for one in (place, place.parent) if (one / "config.yaml").is_file()), None
    )


def _write_and_check(
    kind: Format,
    job: ExportJob,
    folder: Path,
    data: EvalData | None,
    tolerance: float,
    form: FormatName,
) -> Check:
    """Write the export and return its comparison with the model. Raise UserError if it differs."""
    embedder = job.embedder

    def own(texts: list[str], kind: Kind) -> np.ndarray:
        return embedder.encode(texts, kind)

    # The model's own vectors first: a format may change the attention function of the modules.
    images = (
        images_to_compare(data)
        if form == "onnx" and "image" in embedder.description.modalities
        else []
    )
    image_ND = embedder.encode(images)
    if "text" not in embedder.description.modalities:
        _write(kind, job, folder, form)
        return _with_images(NO_TEXTS, job, folder, images, image_ND, tolerance)
    texts = texts_to_compare(data, embedder.description.max_length)
    judged = smaller(data)
    judged_texts = 0 if judged is None else len(judged.queries) + len(judged.documents)
    job.say(f"encoding {len(texts) + judged_texts:,d} texts with the model")
    model_ND = encode_all(own, texts)
    normalize = embedder.description.similarity == "cosine"
    before = None if judged is None else ndcg(own, judged, normalize=normalize)
    _write(kind, job, folder, form)
    reader = kind.reader(folder)
    job.say(f"encoding the same texts with the export in {reader.runtime}")
    vectors = encode_all(reader.encode, texts)
    result = compare(reader.runtime, model_ND, vectors, texts, tolerance)
    if (
        form == "static"
    ):  # another model: its vectors are not the model's, but its similarities should follow
        result = replace(
            result, rank_correlation=similarity_correlation(model_ND, vectors)
        )
        if not result.passes:
            more = (
                ""
                if job.texts
                else "; it had no texts to learn from: export a run, or give --data"
            )
            raise UserError(
                f"the static student of {job.model} does not follow the model: Spearman correlation "
                f"{result.rank_correlation:.3f} of the similarities of {result.num_texts} texts, at least "
                f"{1 - tolerance:.2g} is asked for{more}; nothing was written (--tolerance allows more)"
            )
    elif not result.passes:
        why = difference(result, embedder, reader, model_ND, vectors)
        raise UserError(
            f"the {form} export of {job.model} differs from the model in {why}; largest cosine distance "
            f"{result.largest_distance:.2g} of {result.num_texts} texts, tolerance {tolerance:.2g}; nothing was "
            "written (--tolerance allows more)"
        )
    if images:
        result = _with_images(result, job, folder, images, image_ND, tolerance)
    if judged is not None:
        result = _with_scores(result, reader, judged, before, normalize)
    return result


def _write(kind: Format, job: ExportJob, folder: Path, form: FormatName) -> None:
    job.say(f"writing the {form} files in {job.precision}")
    kind.write(job, folder)


def _with_images(
    result: Check,
    job: ExportJob,
    folder: Path,
    images: list[Image.Image],
    model_ND: np.ndarray,
    tolerance: float,
) -> Check:
    """Add the comparison of images. Raise UserError if they differ."""
    found = compare_images(folder, images, model_ND, tolerance)
    if not found.passes:
        raise UserError(
            f"the onnx export of {job.model} differs from the model in its images (image processor, pooling or "
            f"weights); largest cosine distance {found.largest_distance:.2g} of {found.num_images} images, tolerance "
            f"{tolerance:.2g}; nothing was written (--tolerance allows more)"
        )
    return replace(result, runtime=found.runtime, images=found)


def _with_scores(
    result: Check,
    reader: ExportReader,
    judged: RetrievalData,
    before: float | None,
    normalize: bool,
) -> Check:
    about = (
        f"{len(judged.queries):,d} queries over {len(judged.documents):,d} documents"
    )
    return replace(
        result,
        ndcg_model=before,
        ndcg_export=ndcg(reader.encode, judged, normalize=normalize),
        evaluation=about,
    )


def _describe(
    folder: Path,
    embedder: Embedder,
    form: FormatName,
    precision: WeightPrecision,
    check: Check | None,
) -> dict[str, Any]:
    """Write export.json and the card; return the content of the first."""
    description = embedder.description
    facts = {
        "format": form,
        "precision": precision,
        "embedding_dim": embedder.truncate_dim or description.embedding_dim,
        "normalized": description.normalize,
        "check": None if check is None else check.to_dict(),
    }
    (folder / EXPORT_FILE).write_text(
        json.dumps(facts, indent=2) + "\n", encoding="utf-8"
    )
    section = [
        "## Export",
        "",
        f"Exported by `vembed export --format {form} --precision {precision}`.",
    ]
    lines = (
        ["Not compared with the model (`--no-check`)."]
        if check is None
        else [f"- {one}" for one in check.lines()]
    )
    section += ["", *lines]
    card = folder / "README.md"
    text = (
        card.read_text(encoding="utf-8")
        if card.is_file()
        else render_card(description, Card())
    )
    card.write_text(
        text.rstrip() + "\n\n" + "\n".join(section) + "\n", encoding="utf-8"
    )
    return facts


def precision_of(text: str) -> WeightPrecision | None:
    """Return a precision by its name; None for an empty text."""
    if not text:
        return None
    for one in PRECISIONS:
        if one == text:
            return one
    raise UserError(f"--precision {text}: give one of {', '.join(PRECISIONS)}")
