"""FSDP units of own models, and torch's own FSDP objects in a config."""

import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import vembed
from tests import tiny
from tests.built import model_of
from tests.own.classes import FOLDER, FREE, FREE_SIZES
from vembed.config.decisions import FsdpConfig
from vembed.config.loading import load_config, resolve_run
from vembed.models.custom.own_code import as_options, find_class
from vembed.parallel.sharding import choose_units


@pytest.fixture(scope="module")
def free():
    """The module of the example."""
    return sys.modules[find_class(FREE).__module__]


@pytest.fixture(scope="module")
def model(free):
    """Two blocks and the encoder's."""
    config = free.ModelConfig(**FREE_SIZES)
    return torch.nn.Sequential(free.FreeTransformer(config))


def fsdp_of(config):
    """The settings of a sharded run."""
    run = {"model_name": "m", "data_path": "d", "strategy": "fsdp"}
    return resolve_run({**run, **as_options(config)}, env={}).fsdp


def units(module, fsdp, names=("DecoderBlock",)):
    """Classes of the units, and how many there are of each."""
    return Counter(type(unit).__name__ for unit in choose_units(module, fsdp, names))


@pytest.mark.promise("E22")
def test_a_policy_of_torch_names_the_classes(free, model):
    fsdp = fsdp_of({"auto_wrap_policy": ModuleWrapPolicy({free.DecoderBlock})})
    assert fsdp.layer_classes == ("DecoderBlock",)
    assert units(model, fsdp, ()) == {"DecoderBlock": 3}
    by_name = fsdp_of({"fsdp_transformer_layer_cls_to_wrap": "Attention"})
    assert units(model, by_name) == {"Attention": 3}


@pytest.mark.promise("E23", "E40")
def test_the_objects_of_the_documents_script_are_options(free):
    offload = fsdp_of({"fsdp_config": {"cpu_offload": CPUOffload(offload_params=True)}})
    assert offload.offload and offload.layer_classes is None
    config = {
        "auto_wrap_policy": ModuleWrapPolicy({free.DecoderBlock}),
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
        "mixed_precision": MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.float32,
        ),
        "device_id": 0,
    }
    fsdp = fsdp_of({"fsdp": config})
    assert fsdp.sharding_strategy == "FULL_SHARD"
    assert fsdp.layer_classes == ("DecoderBlock",)
    assert fsdp.reduce_dtype == "float32"


def test_a_function_of_a_file_chooses(model):
    fsdp = fsdp_of({"wrap_policy": f"{FOLDER}/policies.py:linear"})
    linears = [
        module for module in model.modules() if isinstance(module, torch.nn.Linear)
    ]
    assert units(model, fsdp) == {"Linear": len(linears)}
    missing = fsdp_of({"wrap_policy": f"{FOLDER}/policies.py:tree"})
    with pytest.raises(vembed.UserError, match=r"wrap_policy: .*policies\.py .*tree"):
        units(model, missing)


@pytest.mark.promise("E11")
def test_layers_below_the_size_are_no_units(model):
    first = sum(parameter.numel() for parameter in model[0].blocks[0].parameters())
    expected = {
        FsdpConfig(): 3,
        fsdp_of({"fsdp_min_num_params": first}): 3,
        fsdp_of({"fsdp_min_num_params": first + 1}): 0,
        replace(FsdpConfig(), wrap_policy="NO_WRAP"): 0,
    }
    for fsdp, num_units in expected.items():
        assert units(model, fsdp)["DecoderBlock"] == num_units


def test_from_scratch_draws_weights_by_the_seed():
    folder = str(tiny.shared(tiny.tiny_bert))

    def weights(**options):
        config = load_config({"model_name": folder, "data_path": "d", **options})
        weight = "backbone.encoder.layer.0.output.dense.weight"
        return model_of(config).state_dict()[weight]

    new = weights(from_scratch=True)
    assert torch.equal(new, weights(from_scratch=True))
    assert not torch.equal(new, weights())
    assert not torch.equal(new, weights(from_scratch=True, seed=7))


def test_a_class_is_found_beside_the_config(tmp_path):
    shutil.copy(FOLDER / "bag.py", tmp_path / "mine.py")
    (tmp_path / "cfg.yaml").write_text("model_class: mine.py:Bag\ndata_path: d\n")
    config = load_config(tmp_path / "cfg.yaml").model
    assert config.model_class == config.model_name == f"{tmp_path}/mine.py:Bag"
    assert find_class(config.model_class).__name__ == "Bag"
    mistakes = {
        "mine.py": "must be path/to/file.py:Name",
        "none.py:Bag": "is not a file here",
        "no.such:Bag": "cannot be imported",
    }
    for name, message in mistakes.items():
        with pytest.raises(vembed.UserError, match=message):
            find_class(name)
