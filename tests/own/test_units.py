"""FSDP units of own models, and torch's own FSDP objects in a config."""

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
from tests.docs.pages import ROOT
from vembed.config.decisions import FsdpConfig
from vembed.config.loading import load_config, resolve_run
from vembed.config.schema import TrainConfig
from vembed.models.custom.own_code import as_options, find_class
from vembed.parallel.sharding import choose_units

SIZES = {
    "vocab_size": 400,
    "hidden_dim": 16,
    "num_layers": 4,
    "num_heads": 2,
    "latent_dim": 8,
}


@pytest.fixture(scope="module")
def free():
    """The module of the example."""
    path = ROOT / "examples/own_model/free_transformer/model.py"
    return sys.modules[find_class(f"{path}:FreeTransformer").__module__]


def fsdp_of(config):
    """The settings of a sharded run."""
    actual = resolve_run(
        {"model_name": "m", "data_path": "d", "strategy": "fsdp", **as_options(config)},
        env={},
    ).fsdp
    assert actual is not None
    return actual


def units(module, fsdp, names=("DecoderBlock",)):
    """Classes of the units, and how many there are of each."""
    return dict(
        Counter(type(unit).__name__ for unit in choose_units(module, fsdp, names))
    )


@pytest.mark.promise("E22")
def test_a_policy_of_torch_names_the_classes(free):
    model = torch.nn.Sequential(free.FreeTransformer(free.ModelConfig(**SIZES)))
    fsdp = fsdp_of({"auto_wrap_policy": ModuleWrapPolicy({free.DecoderBlock})})
    assert fsdp.layer_classes == ("DecoderBlock",) and units(model, fsdp, ()) == {
        "DecoderBlock": 5
    }
    by_name = fsdp_of({"fsdp_transformer_layer_cls_to_wrap": "Attention"})
    assert units(model, by_name) == {"Attention": 5}


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
    assert (fsdp.sharding_strategy, fsdp.layer_classes, fsdp.reduce_dtype) == (
        "FULL_SHARD",
        ("DecoderBlock",),
        "float32",
    )


def test_a_function_of_a_file_chooses(free):
    model = torch.nn.Sequential(free.FreeTransformer(free.ModelConfig(**SIZES)))
    fsdp = fsdp_of({"wrap_policy": f"{ROOT / 'tests/own/policies.py'}:linear"})
    assert units(model, fsdp) == {"Linear": 32}
    with pytest.raises(
        vembed.UserError,
        match=r"fsdp_auto_wrap_policy: .*policies\.py has no tree",
    ):
        units(model, fsdp_of({"wrap_policy": f"{ROOT / 'tests/own/policies.py'}:tree"}))


@pytest.mark.promise("E11")
def test_layers_below_the_size_are_no_units(free):
    model = torch.nn.Sequential(free.FreeTransformer(free.ModelConfig(**SIZES)))
    first = sum(parameter.numel() for parameter in model[0].blocks[0].parameters())
    assert units(model, FsdpConfig()) == {"DecoderBlock": 5}
    assert units(model, fsdp_of({"fsdp_min_num_params": first})) == {"DecoderBlock": 5}
    assert units(model, fsdp_of({"fsdp_min_num_params": first + 1})) == {}
    assert units(model, replace(FsdpConfig(), wrap_policy="NO_WRAP")) == {}


def test_from_scratch_draws_weights_by_the_seed():
    folder = str(tiny.shared(tiny.tiny_bert))

    def weights(**options):
        config = load_config({"model_name": folder, "data_path": "d", **options})
        return model_of(config).state_dict()[
            "backbone.encoder.layer.0.output.dense.weight"
        ]

    saved = weights()
    new = weights(from_scratch=True)
    assert not torch.equal(saved, new) and torch.equal(new, weights(from_scratch=True))
    assert not torch.equal(new, weights(from_scratch=True, seed=7))
    assert TrainConfig(model_name=folder, data_path="d").model.from_scratch is False


def test_a_class_is_found_beside_the_config(tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "tests/own/bag.py").read_text())
    (tmp_path / "cfg.yaml").write_text("model_class: mine.py:Bag\ndata_path: d\n")
    config = load_config(tmp_path / "cfg.yaml")
    assert (
        config.model.model_class
        == config.model.model_name
        == f"{tmp_path / 'mine.py'}:Bag"
    )
    assert find_class(config.model.model_class).__name__ == "Bag"
    for wrong, said in {
        "mine.py": "must be path/to/file.py:Name",
        "none.py:Bag": "is not a file here",
        "no.such:Bag": "cannot be imported",
    }.items():
        with pytest.raises(vembed.UserError, match=said):
            find_class(wrong)
