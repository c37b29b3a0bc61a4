"""ExportFormat: the interface of an export format, what it is given and what reads its files; safetensors, GGUF and static
models. ONNX and OpenVINO are in onnx_format."""

import logging
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, get_args

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vembed.config.values import WeightPrecision
from vembed.data.examples import Kind
from vembed.data.features import MAX_CHARACTERS_PER_TOKEN, cut_words
from vembed.errors import RunError, UserError
from vembed.files import write_json
from vembed.inference.embedder import Embedder
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import StaticConfig, quiet_transformers
from vembed.models.families.model_files import STATIC, read_object
from vembed.models.poolings.table import poolings_of
from vembed.models.processors import load_tokenizer
from vembed.progress import Log
from vembed.saving.files import MODULE, save_model, write_modules

PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
Texts = list[tuple[str, Kind]]
EncodeTexts = Callable[[list[str], Kind], np.ndarray]
COPY = "give OUTPUT alone, without --check, --format and --precision, to copy it"


def log_nothing(line: str) -> None:
    """Take a line that nobody reads."""


@dataclass(frozen=True)
class ExportJob:
    """The model to export and how."""

    model: str
    """Name that the user gave."""
    embedder: Embedder
    """The model in float32. A format may change its attention function, so that its own vectors are computed first."""
    precision: WeightPrecision
    texts: Texts
    """Texts to train a student with; other formats need none."""
    log: Log
    """Takes a line before each part that may take minutes."""


class ExportReader(Protocol):
    """An export in its own runtime. It uses the exported files alone."""

    runtime: str
    """Name and version of the runtime."""
    texts: "FolderTexts"
    """Its prompts and tokenizer."""

    def encode(self, texts: list[str], kind: Kind) -> np.ndarray:
        """Return [n, d] float32 embeddings of the texts. `kind`: whose prompt is put before them."""
        ...


def encode_all(encode: EncodeTexts, texts: Texts) -> np.ndarray:
    """Return [n, d] embeddings in the order of the texts; each kind is encoded together."""
    rows: dict[int, np.ndarray] = {}
    for kind in get_args(Kind):
        numbers = [number for number, entry in enumerate(texts) if entry[1] == kind]
        if numbers:
            vectors = encode([texts[number][0] for number in numbers], kind)
            rows |= zip(numbers, vectors, strict=True)
    return np.stack([rows[number] for number in range(len(texts))])


class ExportFormat(ABC):
    """One export format."""

    precisions: ClassVar[tuple[WeightPrecision, ...]]
    """Precisions of the weights that the format has."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules that writing or checking it imports."""
    install: ClassVar[str] = ""
    """The command that installs them."""
    reader: ClassVar[Any]
    """The class that reads a folder of the export: an ExportReader."""

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        names = [name for name in self.packages if find_spec(name) is None]
        if not names:
            return None
        return f"{', '.join(names)} not installed: {self.install}"

    @abstractmethod
    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""

    @abstractmethod
    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the export into an existing folder."""


class FolderTexts:
    """Prompts, tokenizer and maximum length of an exported folder, read from its files alone."""

    def __init__(self, folder: Path) -> None:
        stored = read_object(folder / PROMPTS_FILE).get("prompts") or {}
        self.prompts = {name: prompt or "" for name, prompt in stored.items()}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.max_length = int(self.tokenizer.model_max_length)

    def with_prompt(self, text: str, kind: Kind | None) -> str:
        """Return a text with the prompt of its kind."""
        return self.prompts.get(kind or "", "") + text

    def token_ids(self, texts: Sequence[str], kind: Kind | None) -> list[list[int]]:
        """Return the token ids of each text with its prompt."""
        longest = MAX_CHARACTERS_PER_TOKEN * self.max_length
        from_left = self.tokenizer.truncation_side == "left"
        inputs = []
        for text in texts:
            whole = self.with_prompt(text, kind)
            inputs.append(cut_words(whole, longest, from_left=from_left))
        ids: list[list[int]] = self.tokenizer(
            inputs, truncation=True, max_length=self.max_length
        ).input_ids
        return ids

    def padded(
        self, rows: Sequence[Sequence[int]], length: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return int64 `input_ids` and `attention_mask` [n, tokens] of a batch, padded to its longest text or to
        `length`."""
        with quiet_transformers():  # it advises to tokenise and pad at once
            padded = self.tokenizer.pad(
                {"input_ids": rows},
                padding="max_length" if length else "longest",
                max_length=length,
                return_tensors="np",
                return_attention_mask=True,
            )
        return dict(padded)


def write_texts(
    folder: Path,
    query_prompt: str,
    document_prompt: str,
    max_length: int,
    similarity: str,
) -> None:
    """Write the files that FolderTexts and Sentence Transformers read, beside the tokenizer's own."""
    settings = {
        "model_type": "SentenceTransformer",
        "prompts": {"query": query_prompt, "document": document_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": similarity,
    }
    write_json(folder / PROMPTS_FILE, settings)
    lengths = {"max_seq_length": max_length, "do_lower_case": False}
    write_json(folder / LENGTH_FILE, lengths)


# ---- safetensors: the folder of Sentence Transformers, with weights in a chosen dtype ----------------------------------


class SentenceTransformersReader:
    """A folder in Sentence Transformers."""

    def __init__(self, folder: Path) -> None:
        from sentence_transformers import SentenceTransformer

        self.runtime = f"sentence-transformers {version('sentence-transformers')}"
        self.texts = FolderTexts(folder)
        # It warns of bfloat16 on a CPU.
        logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
        try:
            with quiet_transformers():
                self.model = SentenceTransformer(
                    str(folder), device="cpu", local_files_only=True
                )
        except (ImportError, ValueError) as error:
            if "torchvision" not in str(error):
                raise
            raise UserError(
                "Sentence Transformers reads this model with torchvision, which is not installed: `pip install "
                "torchvision`, or --no-check"
            ) from error

    def encode(self, texts: list[str], kind: Kind) -> np.ndarray:
        """Return [n, d] embeddings."""
        encode = self.model.encode_document
        if kind == "query":
            encode = self.model.encode_query
        vectors: np.ndarray = encode(texts, show_progress_bar=False, batch_size=16)
        return vectors.astype(np.float32)


class SafetensorsFormat(ExportFormat):
    """Whole weights, adapters merged, in the layout that Sentence Transformers, TEI, vLLM and infinity read."""

    precisions = ("float32", "float16", "bfloat16")
    packages = ("sentence_transformers",)
    install = "`pip install sentence-transformers`, or --no-check"
    reader = SentenceTransformersReader

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        if "text" not in embedder.description.modalities:
            return f"the check takes texts, and this model embeds images only; {COPY}"
        if embedder.description.family_traits.sentence_transformers is None:
            return f"Sentence Transformers cannot read its layout; {COPY}"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the model's folder."""
        model = job.embedder.model
        assert isinstance(model, EmbeddingModel)  # an export has no shards
        dtype = getattr(torch, job.precision)
        save_model(folder, model, model.state_dict(), dtype=dtype)


# ---- gguf: a file for llama.cpp, written by its own converter and checked in xllamacpp -----------------------------


GGUF_FILE = "model.gguf"
CONVERTER = "convert_hf_to_gguf.py"
_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}
NUM_SPECIAL_TOKENS = 8
"""Room for special tokens beside a text of the greatest length."""


class GgufServer:
    """An export in llama.cpp's own server, inside this process, by xllamacpp."""

    def __init__(self, folder: Path) -> None:
        module = import_module("xllamacpp")
        self.runtime = f"llama.cpp (xllamacpp {module.__version__})"
        self.texts = FolderTexts(folder)
        settings = module.CommonParams()
        settings.model.path = str(folder / GGUF_FILE)
        settings.embedding = True
        settings.n_parallel = 1
        settings.cpuparams.n_threads = torch.get_num_threads()
        num_tokens = self.texts.max_length + NUM_SPECIAL_TOKENS
        settings.n_ctx = num_tokens
        settings.n_batch = num_tokens
        settings.n_ubatch = num_tokens
        self.server: Any = module.Server(settings)

    def encode(self, texts: list[str], kind: Kind) -> np.ndarray:
        """Return [n, d] embeddings."""
        vectors = []
        for text in texts:
            (ids,) = self.texts.token_ids([text], kind)
            # The server refuses what is longer than its context; clients cut such texts, and so it is done here.
            is_cut = len(ids) >= self.texts.max_length
            content = ids if is_cut else self.texts.with_prompt(text, kind)
            answer = self.server.handle_embeddings({"input": content})
            if "data" not in answer:
                raise RunError(
                    f"llama.cpp gave no embedding of a text of {len(ids):,d} tokens: {answer}"
                )
            vectors.append(answer["data"][0]["embedding"])
        return np.array(vectors, np.float32)


class GgufFormat(ExportFormat):
    """GGUF. llama.cpp pools and normalises itself; a Dense module or truncation has no place in the file."""

    precisions = ("float32", "float16", "bfloat16", "int8")
    packages = ("xllamacpp",)
    install = "`pip install xllamacpp`"
    reader = GgufServer

    def missing(self) -> str | None:
        """Return what is not installed and how to install it; None if everything is there."""
        if shutil.which(CONVERTER) is None:
            return (
                f"{CONVERTER} is not on the PATH: `git clone https://github.com/ggml-org/llama.cpp`, install its "
                "requirements, and add its folder to PATH"
            )
        return super().missing()

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        description = embedder.description
        if not description.family_traits.reads_only_text:
            return "llama.cpp's embeddings are of text models"
        if embedder.head is not None or description.truncate_dim is not None:
            return (
                "llama.cpp has no Dense module and no truncate_dim; export it as onnx"
            )
        known = poolings_of("llama.cpp")
        if description.pooling not in known:
            return f"llama.cpp pools by {', '.join(known)}, and this model by {description.pooling}"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write `model.gguf` and, for the check, the tokenizer and prompts."""
        # The converter reads a folder of Transformers and rounds the weights itself.
        whole = folder / "whole"
        SafetensorsFormat().write(replace(job, precision="float32"), whole)
        converter = shutil.which(CONVERTER)
        assert converter is not None
        command = [sys.executable, converter, str(whole)]
        command += ["--outfile", str(folder / GGUF_FILE)]
        command += ["--outtype", _TYPES[job.precision]]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            last_line = process.stderr.strip().splitlines()[-1:]
            raise RunError(f"{CONVERTER} failed: {last_line}")
        # The tokenizer files stay for the check.
        for path in whole.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                path.rename(folder / path.name)
        shutil.rmtree(whole)


# ---- static: a student without layers, one vector per token and their mean, distilled from the model ---------------


MAX_DIMS = 256
"""Most dimensions of a student."""
FREQUENCY_COEFFICIENT = 1e-4
"""Weight of a token: this / (this + its frequency), so that frequent tokens count little."""
TOKENS_PER_BATCH = 512
MAX_LENGTH_TOKENS = 65_536
"""As good as no limit. Sentence Transformers has no limit for this module."""

BATCH_TEXTS = 256
MAX_STEPS = 400
MAX_DISTILLATION_EPOCHS = 20
MIN_TRAINING_TEXTS = 32
LEARNING_RATE = 5e-3


class StaticFormat(ExportFormat):
    """A table of token embeddings made by the model: each token alone through the model, principal components, weights
    by frequency; then trained on texts, so that its similarities follow the model's. It is another model, so that the
    check compares similarities and not vectors."""

    precisions = ("float32", "float16")
    packages = ("sentence_transformers",)
    install = "`pip install sentence-transformers`"
    reader = SentenceTransformersReader

    def refusal(self, embedder: Embedder) -> str | None:
        """Return why this model cannot be exported; None if it can."""
        description = embedder.description
        if not description.family_traits.reads_only_text:
            return "a static student embeds texts, and this model also images"
        if not isinstance(load_tokenizer(description), PreTrainedTokenizerFast):
            return "a static student needs the tokenizer as tokenizer.json"
        return None

    def write(self, job: ExportJob, folder: Path) -> None:
        """Write the table, the tokenizer and modules.json."""
        tokenizer = load_tokenizer(job.embedder.description)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        table = token_table(job.embedder, tokenizer)
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        if job.texts:
            # The student's tokens, without special ones; the teacher reads the texts with its own tokenizer and
            # prompts.
            texts = [text for text, _ in job.texts]
            encodings = backend.encode_batch(texts, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
            table = distil(table, ids, encode_all(job.embedder.encode, job.texts))
        # No special tokens.
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B")
        dtype = torch.float16 if job.precision == "float16" else torch.float32
        weights = {"embedding.weight": table.to(dtype).contiguous()}
        save_file(weights, folder / "model.safetensors")
        config = StaticConfig(
            *table.shape,
            dtype=str(dtype).removeprefix("torch."),
            architectures=["StaticModel"],
        )
        config.save_pretrained(folder)
        tokenizer.model_max_length = MAX_LENGTH_TOKENS
        tokenizer.save_pretrained(folder)
        (folder / "1_Normalize").mkdir()
        modules = [("", MODULE + STATIC), ("1_Normalize", MODULE + "Normalize")]
        write_modules(folder, modules)
        write_texts(folder, "", "", MAX_LENGTH_TOKENS, "cosine")


def token_table(embedder: Embedder, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return [vocabulary, d] token vectors. Frequencies follow Zipf's law by the order of ids, as vocabularies are
    sorted by frequency; special tokens get zeros."""
    size = len(tokenizer)
    # Each token stands between the special tokens that the model was trained to see around a text.
    whole = tokenizer("a").input_ids
    inner = tokenizer("a", add_special_tokens=False).input_ids
    num_before = whole.index(inner[0])
    before = whole[:num_before]
    after = whole[num_before + len(inner) :]
    chunks = []
    with torch.no_grad():
        for first in range(0, size, TOKENS_PER_BATCH):
            tokens = range(first, min(first + TOKENS_PER_BATCH, size))
            ids = torch.tensor([[*before, token, *after] for token in tokens])
            (vectors,) = embedder.model([("text", {"input_ids": ids})])
            chunks.append(vectors.float())
    vectors_VD = torch.cat(chunks)
    is_special = torch.zeros(size, dtype=torch.bool)
    special_ids = [token for token in tokenizer.all_special_ids if token < size]
    is_special[special_ids] = True
    centred_VD = (vectors_VD - vectors_VD[~is_special].mean(dim=0)).double()
    covariance_DD = centred_VD[~is_special].T @ centred_VD[~is_special]
    # eigh gives ascending eigenvalues: the last vectors are the principal components.
    components_DD = torch.linalg.eigh(covariance_DD).eigenvectors.flip(1)
    num_dims = min(MAX_DIMS, vectors_VD.shape[1])
    shares = 1 / torch.arange(2, size + 2, dtype=torch.float64)
    frequency_V = shares / shares.sum()
    weight_V = FREQUENCY_COEFFICIENT / (FREQUENCY_COEFFICIENT + frequency_V)
    table_VD = (centred_VD @ components_DD[:, :num_dims]) * weight_V[:, None]
    table_VD[is_special] = 0.0
    table: Tensor = table_VD.float().contiguous()
    return table


# ---- training of a student -----------------------------------------------------------------------------------------


def distil(
    table_VD: Tensor,
    token_ids: Sequence[Sequence[int]],
    teacher_NE: np.ndarray,
) -> Tensor:
    """Return the table trained so that similarities of texts follow those of the model.

    `token_ids`, `teacher_NE`: of each text, its tokens and the model's vector. Texts without a token are left out. The
    loss is `loss: relational` of training: the squared difference of the student's and the model's similarities over
    all pairs of a batch.
    """
    used = [number for number, ids in enumerate(token_ids) if len(ids)]
    if len(used) < MIN_TRAINING_TEXTS:
        return table_VD
    texts = [torch.tensor(token_ids[number]) for number in used]
    vectors_NE = F.normalize(torch.from_numpy(teacher_NE[used]).float(), dim=1)
    draw = torch.Generator().manual_seed(0)
    steps_per_epoch = -(-len(texts) // BATCH_TEXTS)
    num_epochs = max(min(MAX_DISTILLATION_EPOCHS, MAX_STEPS // steps_per_epoch), 1)
    num_steps = num_epochs * steps_per_epoch

    table = table_VD.clone().requires_grad_()
    optimizer = torch.optim.AdamW([table], lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / (num_steps + 1)
    )
    for _ in range(num_epochs):
        order = torch.randperm(len(texts), generator=draw)
        for numbers in torch.split(order, BATCH_TEXTS):
            batch = [texts[number] for number in numbers.tolist()]
            # embedding_bag takes the offsets at which texts begin: the sums of the lengths before each.
            lengths = [len(text) for text in batch]
            offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0)
            means_BD = F.embedding_bag(torch.cat(batch), table, offsets, mode="mean")
            student_BD = F.normalize(means_BD, dim=1)
            teacher_BE = vectors_NE[numbers]
            loss = F.mse_loss(student_BD @ student_BD.T, teacher_BE @ teacher_BE.T)
            (table.grad,) = torch.autograd.grad(loss, table)
            optimizer.step()
            schedule.step()
    return table.detach()
