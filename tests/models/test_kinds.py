"""Folders that hold no embedding model, or not all of one, are refused by name."""

import logging

import numpy as np
import pytest
import transformers
from transformers import AutoTokenizer

from tests import tiny
from tests.built import described
from tests.harness import run_ranks
from tests.models.families import SENTENCES, config_for
from tests.tiny_tokenizers import llama_tokenizer
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.errors import UserError
from vembed.inference.embedder import Embedder
from vembed.inference.reranker import Reranker
from vembed.models.processors import load_tokenizer
from vembed.parallel import session as sessions
from vembed.parallel.session import start_command_session


def tokenizer_of(folder):
    return load_tokenizer(described(config_for(tiny.tiny_bert, model_name=str(folder))))


@pytest.mark.parametrize("use", [Embedder, Reranker])
def test_a_folder_without_tokenizer_files_is_refused(use, tmp_path):
    folder = tiny.tiny_bert(tmp_path / "model")
    for path in folder.iterdir():
        if path.name.startswith(("tokenizer", "vocab", "special")):
            path.unlink()
    with pytest.raises(UserError, match=r"no tokenizer files in .*model"):
        use(folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = tiny.tiny_bert(tmp_path / "larger")
    AutoTokenizer.from_pretrained(tiny.shared(tiny.tiny_gpt2)).save_pretrained(folder)
    with pytest.raises(UserError, match="vocab_size"):
        tokenizer_of(folder)
    other = tiny.tiny_gpt2(tmp_path / "special")
    special = {"bos_token_id": 11, "eos_token_id": 12, "pad_token_id": None}
    tiny.change_json(other / "config.json", **special)
    with pytest.raises(UserError, match="does not belong"):
        tokenizer_of(other)


def test_many_unknown_tokens_are_warned_of_once(caplog):
    featuriser = Featuriser(described(config_for(tiny.tiny_bert)))
    known = [(Item(text="red cat " * 20), "document") for _ in range(10)]
    with caplog.at_level(logging.WARNING, logger="vembed"):
        featuriser.features(known)
        assert not caplog.records
        for number in range(3):
            strange = Item(text=f"\u4e00\u4e01\u4e03 {number} " * 200)
            featuriser.features([(strange, "document")])
    (warning,) = caplog.records
    assert "does not know" in warning.getMessage()


def wide(folder):
    """A BERT that is wide enough for bfloat16 to pay."""
    return tiny.tiny_bert(folder, hidden=256)


def encoded(folder, **options):
    """Vectors of texts in batches of one: which texts are together changes the order of sums."""
    embedder = Embedder(folder, **options)
    vectors = np.stack([embedder.encode(text) for text in SENTENCES])
    return vectors, embedder.arithmetic


def encoded_on_rank(folder, strategy):
    sessions.bf16_instructions = lambda: "amx_bf16"
    with start_command_session(str(folder), strategy=strategy) as session:
        return encoded(folder, session=session)


def test_shards_compute_as_one_process_does():
    folder = tiny.shared(wide)
    vectors, arithmetic = encoded(folder, mixed_precision="bf16")
    assert arithmetic == "bfloat16"
    exact, arithmetic = encoded(folder, mixed_precision="no")
    assert arithmetic == "float32"
    assert np.abs(vectors - exact).max() > 1e-4, "bfloat16 rounds"
    for strategy in ("ddp", "fsdp"):
        ranks = run_ranks(encoded_on_rank, 2, folder, strategy)
        for of_rank, arithmetic in ranks:
            assert arithmetic == "bfloat16"
            np.testing.assert_allclose(of_rank, vectors, atol=2e-6)


def test_a_class_with_a_table_of_attentions_is_loaded(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {
        "vocab_size": len(llama_tokenizer()),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.FalconConfig(**sizes)
    transformers.FalconModel(config).save_pretrained(tmp_path)
    llama_tokenizer().save_pretrained(tmp_path)
    vectors, _ = encoded(tmp_path)
    assert np.isfinite(vectors).all()
