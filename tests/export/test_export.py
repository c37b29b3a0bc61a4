"""`vembed export --format`: the graph holds everything, the check refuses what differs, other runtimes are named."""

import json
import shutil
from typing import ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest

import vembed
from tests.commands import invoke
from tests.data.files import pair, write_jsonl
from tests.serve import test_serve
from tests.serve.test_serve import QUERY_PROMPT, started
from tests.tiny import (
    change_json,
    read_json,
    shared,
    texts,
    tiny_bert_st,
    tiny_qwen3_vl,
    tiny_siglip,
    tiny_siglip2,
    tiny_vit,
)
from tests.training.test_run import settings
from tests.weights.variants import pairs
from vembed.data.examples import Item
from vembed.errors import RunError, UserError
from vembed.evaluation.dataset import RetrievalData
from vembed.export import formats, onnx_format
from vembed.export.exporting import (
    MAX_STUDENT_EXAMPLES,
    NUM_TEXTS,
    bounded,
    distances,
    student_texts,
    texts_to_compare,
)
from vembed.export.formats import SafetensorsFormat
from vembed.export.onnx_format import OnnxFormat
from vembed.inference.serve import ServedInput, open_encoder


def model_folder():
    """One layer, as in the model of images: tracing takes seconds for each."""
    return test_serve.model_folder(layers=1)


def siglip_folder():
    return shared(tiny_siglip, layers=1)


def export(*words):
    """Return the output of an export that ends well."""
    return invoke("export", *words).output


def refused(*words):
    """Return the message of a command that refuses."""
    return invoke(*words, code=2).stderr


def check_of(folder):
    return read_json(folder / "export.json")["check"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The model in ONNX with evaluation data, by the command; traced once, because that takes seconds."""
    place = tmp_path_factory.mktemp("export")
    words = ["--format", "onnx", "--data", pairs(place / "val.jsonl", 24)]
    output = export(model_folder(), place / "onnx", *words)
    (place / "said.txt").write_text(output)
    return place / "onnx"


def test_everything_is_inside_the_graph(exported):
    """Pooling, Dense, normalisation: the output of onnxruntime alone is what Embedder gives."""
    import onnxruntime
    from tokenizers import Tokenizer

    model = vembed.Embedder(model_folder())
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    for text in ("red", "a small bird in the garden"):
        ids = np.array([tokenizer.encode(QUERY_PROMPT + text).ids])
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        (actual,) = session.run(["sentence_embedding"], inputs)
        assert actual.shape == (1, 24)
        np.testing.assert_allclose(actual, model.encode([text], "query"), atol=1e-6)


def test_the_check_is_printed_and_in_the_card(exported):
    card = (exported / "README.md").read_text()
    for text in ((exported.parent / "said.txt").read_text(), card):
        assert "largest cosine distance" in text and "nDCG@10 of the model" in text
    check = check_of(exported)
    assert check["num_texts"] == 200 and check["largest_distance"] < 1e-6
    assert check["ndcg_export"] == pytest.approx(check["ndcg_model"], abs=1e-6)


def test_an_export_is_no_model_for_other_verbs(exported, tmp_path):
    message = refused("encode", exported, "-", tmp_path / "a.npy")
    assert "is an export in onnx" in message


def test_a_check_alone_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output = export(model_folder(), "--check", "--json", tmp_path / "said.json")
    assert "nothing was kept" in output
    said = read_json(tmp_path / "said.json")
    assert said["path"] is None and said["check"]["largest_distance"] < 1e-6
    for words in ([], ["--for", "tei", "--check"]):
        assert "give OUTPUT" in refused("export", model_folder(), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["said.json"]


def as_traced(folder, monkeypatch):
    """Let an export take the graphs that are there."""

    def take(graph, _example, _shapes, target, _):
        is_of_images = isinstance(graph, onnx_format.ImageGraph)
        name = "image_model.onnx" if is_of_images else "model.onnx"
        shutil.copyfile(folder / name, target)

    monkeypatch.setattr(onnx_format, "trace", take)


@pytest.mark.parametrize("precision", ["int8", "float16"])
def test_smaller_precisions(precision, exported, tmp_path, monkeypatch):
    as_traced(exported, monkeypatch)
    small = tmp_path / "small"
    words = ["--format", "onnx", "--precision", precision]
    export(model_folder(), small, *words)
    size = (small / "model.onnx").stat().st_size
    assert size < (exported / "model.onnx").stat().st_size
    check = check_of(small)
    assert 1e-9 < check["largest_distance"] < check["tolerance"]


def broken(write, breaks):
    def broken_write(self, job, folder):
        write(self, job, folder)
        breaks(folder)

    return broken_write


def without_prompt(folder):
    prompts = {"query": "", "document": ""}
    change_json(folder / "config_sentence_transformers.json", prompts=prompts)


def with_other_pooling(folder):
    flags = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    change_json(folder / "1_Pooling" / "config.json", **flags)


def without_normalisation(folder):
    path = folder / "modules.json"
    modules = read_json(path)
    path.write_text(json.dumps(modules[:-1]))


@pytest.mark.parametrize(
    ("kind", "breaks", "said"),
    [
        (OnnxFormat, without_prompt, "its query tokens"),
        (SafetensorsFormat, with_other_pooling, "its pooling, arithmetic or weights"),
        (SafetensorsFormat, without_normalisation, "(normalisation)"),
    ],
)
def test_a_broken_export_is_refused(
    kind, breaks, said, exported, tmp_path, monkeypatch
):
    as_traced(exported, monkeypatch)
    monkeypatch.setattr(kind, "write", broken(kind.write, breaks))
    form = "onnx" if kind is OnnxFormat else "safetensors"
    message = refused("export", model_folder(), tmp_path / "out", "--format", form)
    assert said in message.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    """A model with texts of fixed length and images, in ONNX."""
    folder = tmp_path_factory.mktemp("siglip") / "onnx"
    output = export(siglip_folder(), folder, "--format", "onnx")
    assert "check: 200 texts through" in output
    assert "check: 40 images through" in output
    return folder


def test_siglip_is_saved_so_that_its_texts_get_no_mask(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(siglip_folder(), model)
    # Without them Transformers makes a mask, and Sentence Transformers passes it.
    change_json(model / "tokenizer_config.json", model_input_names=None)
    export(model, "--check")


def test_a_check_of_images_alone_says_how_to_copy():
    assert "without --check" in refused("export", shared(tiny_vit), "--check")


def test_images_have_a_graph_of_their_own(siglip, tmp_path, monkeypatch):
    model = vembed.Embedder(siglip_folder(), device="cpu")
    images = onnx_format.made_images(11)
    actual = onnx_format.OnnxImages(siglip).encode(images)
    np.testing.assert_allclose(actual, model.encode(images), atol=1e-5)
    shapes = onnx_format.OnnxReader(siglip).graph.shapes
    assert shapes["input_ids"][1] == 16, "texts of fixed length"
    as_traced(siglip, monkeypatch)
    words = ("--format", "onnx", "--precision", "int8", "--tolerance", "0.2")
    export(siglip_folder(), tmp_path / "small", *words)
    distance = check_of(tmp_path / "small")["images"]["largest_distance"]
    assert 1e-9 < distance < 0.2, "it is not the float32 graph"


def test_a_broken_export_of_images_is_refused(siglip, tmp_path, monkeypatch):
    def with_other_pixels(folder):
        change_json(folder / "preprocessor_config.json", image_mean=[0.1, 0.9, 0.5])

    as_traced(siglip, monkeypatch)
    broken_write = broken(OnnxFormat.write, with_other_pixels)
    monkeypatch.setattr(OnnxFormat, "write", broken_write)
    words = (siglip_folder(), tmp_path / "out", "--format", "onnx")
    assert "in its images (image processor" in refused("export", *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "why"),
    [(tiny_siglip2, "in any shape"), (tiny_qwen3_vl, "reads them together")],
)
def test_images_that_have_no_graph(make, why, tmp_path):
    message = refused("export", shared(make), tmp_path / "out", "--format", "onnx")
    assert why in message and message.count("\n") == 1


def test_a_runtime_that_is_not_there_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda _: None)
    monkeypatch.setattr(formats.shutil, "which", lambda _: None)
    for form, way in (("openvino", "pip install openvino"), ("gguf", "git clone")):
        message = refused("export", model_folder(), tmp_path / "out", "--format", form)
        assert way in message and message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("server", ["tei", "vllm", "llama.cpp"])
@pytest.mark.parametrize("pooling", ["max", "weighted_mean"])
def test_a_server_that_cannot_pool_as_the_model_is_refused(server, pooling, tmp_path):
    model = tiny_bert_st(tmp_path / "model", layers=1, pooling=pooling)
    words = (model, tmp_path / "out", "--for", server, "--no-check")
    message = refused("export", *words)
    assert not (tmp_path / "out").exists()
    if server != "llama.cpp":  # whose converter may be missing
        assert pooling in message and f"--for {server}" in message


def test_for_a_server(tmp_path):
    target = tmp_path / "served"
    words = ["--for", "vllm", "--precision", "bfloat16"]
    output = export(model_folder(), target, *words)
    assert f"start: vllm serve {target} --runner pooling" in output
    assert f"send {QUERY_PROMPT!r} before queries" in output
    words = ["--for", "tei", "--format", "onnx"]
    message = refused("export", model_folder(), tmp_path / "other", *words)
    assert "--format safetensors" in message


def test_a_static_student(tmp_path):
    """It loads in Sentence Transformers and in vembed with the same vectors, the mean of its tokens', and can be
    trained and saved again; a student that does not follow the model is refused."""
    from sentence_transformers import SentenceTransformer

    rows = []
    for text, other in zip(texts(160), texts(160, seed=5), strict=True):
        rows.append(pair(text, f"found {text} {other}"))
    data = tmp_path / "val.jsonl"
    write_jsonl(data, rows)
    out = tmp_path / "student"
    # Random attention mixes the tokens.
    words = ["--format", "static", "--data", data, "--tolerance", "0.7"]
    facts = tmp_path / "facts.json"
    export(model_folder(), out, *words, "--json", facts)
    facts = read_json(facts)
    assert facts["check"]["rank_correlation"] > 0.35, "0.14 without training"
    assert facts["num_training_texts"] == 60
    student = SentenceTransformer(str(out), device="cpu")
    inputs = ["red", "green", "red green"]
    first, other, both = vectors = student.encode(inputs)
    assert first.shape == (24,) and not np.allclose(first, other)
    np.testing.assert_allclose(np.linalg.norm(both), 1, rtol=1e-5)
    table = student[0].embedding.weight.detach().numpy()
    ids = student[0].tokenizer.encode("red green", add_special_tokens=False).ids
    mean = table[ids].mean(axis=0)
    np.testing.assert_allclose(both, mean / np.linalg.norm(mean), atol=1e-5)
    np.testing.assert_allclose(vembed.Embedder(out).encode(inputs), vectors, atol=1e-6)

    options = {"loss": "relational", "teacher": str(model_folder()), "max_steps": 2}
    trained = vembed.train(settings(tmp_path, model_name=str(out), **options))
    again = SentenceTransformer(str(trained.model_dir), device="cpu").encode(inputs)
    mine = vembed.Embedder(trained.model_dir).encode(inputs)
    np.testing.assert_allclose(mine, again, atol=1e-6)
    assert not np.allclose(again, vectors)

    words = ["--format", "static", "--tolerance", "1e-6"]
    message = refused("export", model_folder(), tmp_path / "bad", *words)
    assert "does not follow the model" in message
    assert not (tmp_path / "bad").exists()


def test_an_export_is_served_in_its_runtime(exported):
    encoder = open_encoder(str(exported))
    model = vembed.Embedder(model_folder())
    expected = [model.encode("red", "query"), model.encode("a bird", prompt="")]
    inputs = [ServedInput("red", "query"), ServedInput("a bird")]
    vectors, _ = encoder.encode(inputs)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert encoder.max_length == model.description.max_length
    (ids,) = encoder.reader.texts.token_ids(["red"], "query")
    by_ids, _ = encoder.encode([ServedInput(ids)])
    np.testing.assert_allclose(by_ids, expected[:1], atol=1e-6)
    assert encoder.gives_unit_vectors
    with pytest.raises(UserError, match="runs on the CPU at its own size"):
        open_encoder(str(exported), truncate_dim=8)


def test_an_export_of_vectors_of_any_length_does_not_claim_unit_vectors(
    exported, tmp_path
):
    shutil.copytree(exported, tmp_path / "other")
    change_json(tmp_path / "other" / "export.json", normalized=False)
    assert not open_encoder(str(tmp_path / "other")).gives_unit_vectors


def test_distances_of_broken_vectors_are_infinite():
    good = np.ones((2, 3), np.float32)
    broken = np.array([[1, 1, 1], [np.nan, 0, 0]], np.float32)
    assert distances(good, broken).tolist() == [0.0, np.inf]


class LargeCorpus(list[Item]):
    """A million documents, and how many of them were read."""

    num_read = 0

    def __len__(self):
        return 1_000_000

    def __getitem__(self, place):
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        self.num_read += 1
        return Item(text=f"document {place}")

    def __iter__(self):
        return (self[place] for place in range(len(self)))


def large_data():
    queries = tuple(Item(text=f"query {number}") for number in range(600))
    relevance = tuple({number: 1} for number in range(600))
    return RetrievalData("large", queries, LargeCorpus(), relevance)


def test_a_student_reads_a_sample_of_a_corpus(tmp_path):
    data = large_data()
    rows = student_texts(str(tmp_path), data)
    assert data.documents.num_read <= len(rows) <= MAX_STUDENT_EXAMPLES
    assert rows[-1][0] > "document 990000"


def test_a_student_reads_every_source_of_the_run(tmp_path):
    write_jsonl(tmp_path / "first.jsonl", [pair("red", "a red bird")])
    write_jsonl(tmp_path / "second.jsonl", [pair("blue", "the blue sea")])
    second = {"path": str(tmp_path / "second.jsonl"), "val_data_path": "gone.jsonl"}
    config = {"data_path": [str(tmp_path / "first.jsonl"), second]}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    texts_read = dict(student_texts(str(tmp_path), None))
    assert {"red", "a red bird", "blue", "the blue sea"} == set(texts_read)


def test_the_check_reads_no_more_of_a_corpus_than_it_compares():
    data = large_data()
    rows = texts_to_compare(data, 32)
    assert len(rows) == NUM_TEXTS
    assert rows[-1] == (f"document {NUM_TEXTS // 2 - 1}", "document")
    part = bounded(data)
    assert (len(part.queries), len(part.documents)) == (500, 2_000)
    assert data.documents.num_read < 5_000


class LlamaServer:
    """Stands in for xllamacpp's server, which is not installed."""

    inputs: ClassVar[list] = []

    def __init__(self, settings):
        assert settings.embedding and settings.model.path.endswith("model.gguf")

    def handle_embeddings(self, values):
        self.inputs.append(values["input"])
        if values["input"] == "":
            return {"error": "empty"}
        return {"data": [{"embedding": [3.0, 4.0]}]}


def test_gguf_in_the_server_of_llama_cpp(exported, monkeypatch):
    """A text longer than the model's limit is cut before it is sent."""
    module = MagicMock(__version__="1", Server=LlamaServer)
    monkeypatch.setattr(formats, "import_module", lambda _: module)
    reader = formats.GgufServer(exported)
    long = "red " * 600
    vectors = reader.encode(["red", long], "query")
    np.testing.assert_array_equal(vectors, [[3, 4], [3, 4]])
    (cut,) = reader.texts.token_ids([long], "query")
    assert LlamaServer.inputs == [QUERY_PROMPT + "red", cut]
    assert len(cut) == reader.texts.max_length
    with pytest.raises(RunError, match="no embedding of a text of 2 tokens"):
        reader.encode([""], "document")


def test_check_server_names_what_differs(tmp_path, monkeypatch):
    model = tiny_bert_st(tmp_path / "model", layers=1, pooling="cls", dense_dim=24)
    with started(model, VEMBED_API_KEY="secret") as server:
        assert "401" in refused("check-server", server.address, model)
        monkeypatch.setenv("VEMBED_API_KEY", "secret")
        for route in ("", "/v1", "/v1/embeddings"):
            words = ("check-server", server.address + route)
            invoke(*words, model)
            done = invoke(*words, model_folder(), code=1)
            assert "largest cosine distance" in done.stderr
        done = invoke("check-server", server.address, shared(tiny_bert_st), code=1)
        assert "24 dimensions for 32" in done.stderr
    assert "does not answer" in refused("check-server", server.address, model)
