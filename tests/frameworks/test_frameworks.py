"""The saved folder in LangChain, LlamaIndex and Haystack, through their classes for Sentence Transformers."""

import numpy as np
import pytest

import vembed
from tests.serve.test_serve import QUERY_PROMPT, TEXTS, model_folder
from vembed.cli.commands.export import copy_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model's folder, and its vectors of the texts as queries and as documents."""
    target = tmp_path_factory.mktemp("frameworks") / "saved"
    folder = copy_model(str(model_folder()), target)
    model = vembed.Embedder(folder)
    return str(folder), model.encode(TEXTS, "query"), model.encode(TEXTS, "document")


def module(name, package):
    return pytest.importorskip(
        name, reason=f"{package} is not installed (pip install {package})"
    )


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_langchain(saved):
    actual = module("langchain_huggingface", "langchain-huggingface")
    folder, queries, documents = saved
    embeddings = actual.HuggingFaceEmbeddings(
        model_name=folder,
        model_kwargs={"device": "cpu"},
        query_encode_kwargs={"prompt_name": "query"},
    )
    close(embeddings.embed_documents(TEXTS), documents)
    close(embeddings.embed_query(TEXTS[0]), queries[0])


def test_llama_index(saved):
    name = "llama_index.embeddings.huggingface"
    actual = module(name, "llama-index-embeddings-huggingface")
    folder, queries, documents = saved
    embedding = actual.HuggingFaceEmbedding(
        model_name=folder, device="cpu", query_instruction=QUERY_PROMPT
    )
    close(embedding.get_text_embedding_batch(TEXTS), documents)
    close(embedding.get_query_embedding(TEXTS[0]), queries[0])


def test_haystack(saved):
    integration = "haystack_integrations.components.embedders.sentence_transformers"
    embedders = module(integration, "sentence-transformers-haystack")
    haystack = module("haystack", "haystack-ai")
    folder, queries, documents = saved
    options = {"model": folder, "progress_bar": False}
    text = embedders.SentenceTransformersTextEmbedder(prefix=QUERY_PROMPT, **options)
    text.warm_up()
    close(text.run(TEXTS[0])["embedding"], queries[0])
    many = embedders.SentenceTransformersDocumentEmbedder(**options)
    many.warm_up()
    done = many.run([haystack.Document(content=text) for text in TEXTS])
    close([entry.embedding for entry in done["documents"]], documents)
