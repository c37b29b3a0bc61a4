"""A model whose weights lie on two ranks is saved as one process would save it."""

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.files.saving import assert_alike
from tests.files.test_text_models import TEXTS
from tests.harness import result_of, run_cases
from tests.parallel.steps import build, config_of
from vembed.parallel.parameters import full_state_dict
from vembed.parallel.session import start_session
from vembed.saving.files import save_model


def save_sharded(source, directory, version, options):
    config = config_of(source, strategy="fsdp", fsdp_version=version, **options)
    with start_session(config) as session:
        built, _ = build(config, dtype=torch.float32, meta=session.builds_empty)
        model = session.prepare(built, built.description.layer_classes)
        weights = full_state_dict(model)
        if session.is_main:
            save_model(directory, built, weights)
        session.barrier()
        return session.strategy


CASES = {
    "fsdp1": (tiny.tiny_bert_st, 1, {}),
    "fsdp2": (tiny.tiny_qwen3_st, 2, {"mrl_dims": [16]}),
    "lora": (tiny.tiny_qwen3_st, 2, {"use_lora": True}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder that holds one model for each case, and what the ranks said of it."""
    place = tmp_path_factory.mktemp("sharded")
    cases = {}
    for name, (make, version, options) in CASES.items():
        cases[name] = (str(tiny.shared(make)), place / name, version, options)
    return place, run_cases(save_sharded, 2, cases)


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_model_is_saved_whole(case, saved):
    place, actual = saved
    assert result_of(actual, case) == ["fsdp", "fsdp"]
    final = place / case
    source = tiny.shared(CASES[case][0])
    stored = load_file(final / "model.safetensors")
    before = load_file(source / "model.safetensors")
    assert stored.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(stored[name], tensor)
    assert "FSDP" not in (final / "config.json").read_text()
    assert_alike(final, TEXTS)
