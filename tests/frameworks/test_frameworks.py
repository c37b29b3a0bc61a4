"""The saved folder in LangChain, LlamaIndex and Haystack, through their classes for Sentence Transformers."""

import numpy as np
import pytest

import vembed
from tests.tiny import tiny_bert_st
from vembed.cli.commands.export import copy_model

TEXTS = ["red", "a small bird in the garden"]
PROMPT = "red green: "


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model's folder, and its vectors of the texts as queries and as documents."""
    place = tmp_path_factory.mktemp("frameworks")
    tiny_bert_st(
        place / "model", prompts={"query": PROMPT, "document": ""}, dense_dim=24
    )
    folder = copy_model(str(place / "model"), place / "saved")
    model = vembed.Embedder(folder)
    return str(folder), model.encode(TEXTS, "query"), model.encode(TEXTS, "document")


def module(name, package):
    return pytest.importorskip(
        name, reason=f"{package} is not installed (pip install {package})"
    )


@pytest.mark.filterwarnings("ignore")
def test_langchain(saved):
    actual = module("langchain_huggingface", "langchain-huggingface")
    folder, queries, documents = saved
    embeddings = actual.HuggingFaceEmbeddings(
        model_name=folder,
        model_kwargs={"device": "cpu"},
        query_encode_kwargs={"prompt_name": "query"},
    )
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), documents, atol=1e-5)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), queries[0], atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_llama_index(saved):
    actual = module(
        "llama_index.embeddings.huggingface", "llama-index-embeddings-huggingface"
    )
    folder, queries, documents = saved
    embedding = actual.HuggingFaceEmbedding(
        model_name=folder, device="cpu", query_instruction=PROMPT
    )
    np.testing.assert_allclose(
        embedding.get_text_embedding_batch(TEXTS), documents, atol=1e-5
    )
    np.testing.assert_allclose(
        embedding.get_query_embedding(TEXTS[0]), queries[0], atol=1e-5
    )


@pytest.mark.filterwarnings("ignore")
def test_haystack(saved):
    integration = "haystack_integrations.components.embedders.sentence_transformers"
    embedders = module(integration, "sentence-transformers-haystack")
    haystack = module("haystack", "haystack-ai")
    folder, queries, documents = saved
    text = embedders.SentenceTransformersTextEmbedder(
        model=folder, prefix=PROMPT, progress_bar=False
    )
    text.warm_up()
    np.testing.assert_allclose(text.run(TEXTS[0])["embedding"], queries[0], atol=1e-5)
    many = embedders.SentenceTransformersDocumentEmbedder(
        model=folder, progress_bar=False
    )
    many.warm_up()
    done = many.run([haystack.Document(content=text) for text in TEXTS])["documents"]
    np.testing.assert_allclose(
        [entry.embedding for entry in done], documents, atol=1e-5
    )
