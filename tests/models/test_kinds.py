"""Folders that hold no embedding model, or not all of one, are refused by name."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests import tiny
from tests.harness import run_ranks
from tests.models.families import SENTENCES
from vembed.config.schema import ModelSection
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.errors import UserError
from vembed.inference.embedder import Embedder
from vembed.inference.reranker import Reranker
from vembed.models.families.description import describe
from vembed.models.families.model_files import check_model_config
from vembed.models.processors import load_tokenizer
from vembed.parallel import session as sessions
from vembed.parallel.session import start_command_session


def copied(make, folder):
    return Path(shutil.copytree(tiny.shared(make), folder))


def changed(path, **values):
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**settings, **values}))


ST_CONFIG = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        (ST_CONFIG, {"model_type": "CrossEncoder"}, "holds a reranker"),
        (ST_CONFIG, {"model_type": "SparseEncoder"}, "holds a sparse encoder"),
        (ST_CONFIG, {"model_type": "Oracle"}, "Oracle"),
        # Up to version 5 a CrossEncoder has these settings alone.
        ("config.json", {"sentence_transformers": {}}, "holds a reranker"),
    ],
)
def test_another_kind_of_model_is_no_embedder(name, values, named, tmp_path):
    folder = copied(tiny.tiny_bert_st, tmp_path / "model")
    changed(folder / name, **values)
    with pytest.raises(UserError, match=named):
        Embedder(folder)


def tokenizer_of(folder):
    return load_tokenizer(describe(ModelSection(model_name=str(folder))))


def reranker_of(folder):
    return Reranker(folder, role="judges: it", device=torch.device("cpu"))


@pytest.mark.parametrize("use", [Embedder, tokenizer_of, reranker_of])
def test_a_folder_without_tokenizer_files_is_refused(use, tmp_path):
    folder = copied(tiny.tiny_bert, tmp_path / "model")
    for path in folder.iterdir():
        if path.name.startswith(("tokenizer", "vocab", "special")):
            path.unlink()
    with pytest.raises(UserError, match=r"no tokenizer files in .*model"):
        use(folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = copied(tiny.tiny_bert, tmp_path / "larger")
    AutoTokenizer.from_pretrained(tiny.shared(tiny.tiny_gpt2)).save_pretrained(folder)
    with pytest.raises(UserError, match="vocab_size"):
        tokenizer_of(folder)
    other = copied(tiny.tiny_gpt2, tmp_path / "special")
    changed(other / "config.json", bos_token_id=11, eos_token_id=12, pad_token_id=None)
    with pytest.raises(UserError, match="does not belong"):
        tokenizer_of(other)


def test_many_unknown_tokens_are_warned_of_once(caplog):
    featuriser = Featuriser(
        describe(ModelSection(model_name=str(tiny.shared(tiny.tiny_bert))))
    )
    known = [(Item(text="red cat " * 20), "document") for _ in range(10)]
    with caplog.at_level(logging.WARNING, logger="vembed"):
        featuriser.features(known)
        assert not caplog.records
        for number in range(3):
            strange = Item(text=f"\u4e00\u4e01\u4e03 {number} " * 200)
            featuriser.features([(strange, "document")])
    (warning,) = caplog.records
    assert "does not know" in warning.getMessage()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_an_attention_kernel_of_a_repository_is_refused(key, tmp_path):
    folder = copied(tiny.tiny_bert, tmp_path / "model")
    changed(folder / "config.json", **{key: "somebody/fast-attention"})
    with pytest.raises(UserError, match=f'"{key}": "somebody/fast-attention"'):
        Embedder(folder)
    check_model_config(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A BERT that is wide enough for bfloat16 to pay."""
    return tiny.tiny_bert(tmp_path_factory.mktemp("wide"), hidden=256)


def encoded(folder, strategy):
    sessions.bf16_instructions = lambda: "amx_bf16"
    with start_command_session(str(folder), strategy=strategy) as session:
        embedder = Embedder(folder, session=session)
        return one_by_one(embedder), embedder.arithmetic


def one_by_one(embedder):
    """Vectors of texts in batches of one: which texts are together changes the order of sums."""
    return np.stack([embedder.encode(text) for text in SENTENCES])


def test_shards_compute_as_one_process_does(wide):
    one_process = Embedder(wide, mixed_precision="bf16")
    assert one_process.arithmetic == "bfloat16"
    assert Embedder(wide, mixed_precision="no").arithmetic == "float32"
    vectors = one_by_one(one_process)
    exact = one_by_one(Embedder(wide, mixed_precision="no"))
    assert np.abs(vectors - exact).max() > 1e-4, "bfloat16 rounds"
    for strategy in ("ddp", "fsdp"):
        ranks = run_ranks(encoded, 2, str(wide), strategy, process_group=False)
        for of_rank, arithmetic in ranks:
            assert arithmetic == "bfloat16"
            np.testing.assert_allclose(of_rank, vectors, atol=2e-6)
