"""A model whose weights lie on two ranks is saved as one process would save it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.distributed.steps import build, config_of
from tests.files.saving import load_in_sentence_transformers, ours
from tests.files.test_text_models import TEXTS, assert_same
from tests.harness import run_ranks
from vembed.distributed.parameters import full_state_dict
from vembed.distributed.session import start_session
from vembed.saving.files import save_model


def save_sharded(source: str, directory: str, options: dict[str, Any]) -> str:
    config = config_of(source, **options)
    with start_session(config) as session:
        built, _ = build(config, dtype=torch.float32, meta=session.builds_empty)
        model = session.prepare(built, built.description.layer_classes)
        weights = full_state_dict(model)
        if session.is_main:
            save_model(directory, built.description, built.backbone, built.head, weights)
        session.barrier()
        return session.strategy


@pytest.mark.parametrize(
    ("make", "version", "options"),
    [
        (tiny.tiny_bert_st, 1, {}),
        (tiny.tiny_qwen3_st, 2, {"use_mrl": True, "mrl_dims": [16]}),
        (tiny.tiny_qwen3_st, 2, {"use_lora": True}),
    ],
)
def test_a_sharded_model_is_saved_whole(
    make: Callable[..., Path], version: int, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tiny.shared(make)
    sharded = {"use_fsdp": True, "fsdp_version": version, **options}
    strategies = run_ranks(save_sharded, 2, str(source), str(tmp_path / "final"), sharded, process_group=False)
    assert strategies == ["fsdp", "fsdp"]
    stored, before = load_file(tmp_path / "final" / "model.safetensors"), load_file(source / "model.safetensors")
    assert stored.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(stored[name], tensor)
    assert "FSDP" not in (tmp_path / "final" / "config.json").read_text()
    theirs = load_in_sentence_transformers(tmp_path / "final").encode_query(TEXTS)
    assert_same(ours(tmp_path / "final", TEXTS, "query"), theirs)
