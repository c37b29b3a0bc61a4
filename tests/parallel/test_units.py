"""Which modules become units: found by class, by size, or named in an error."""

from collections import Counter

import pytest
import torch
from torch import nn

from tests.built import model_of
from tests.parallel.steps import config_of
from tests.tiny import shared, tiny_bert, tiny_clip, tiny_qwen3_vl
from vembed.config.decisions import FsdpConfig
from vembed.errors import UserError
from vembed.parallel.sharding import (
    choose_units,
    describe_units,
    embedding_units,
    layer_candidates,
    layer_units,
    size_units,
)

BERT_PATH = "transformers.models.bert.modeling_bert.BertLayer"


def model_in(folder):
    config = config_of(folder)
    return model_of(config)


def kinds(units):
    return dict(Counter(type(unit).__name__ for unit in units))


@pytest.fixture(scope="module")
def bert():
    return model_in(shared(tiny_bert, layers=3))


@pytest.mark.parametrize(
    "names", [("BertLayer",), (BERT_PATH,), ("BertLayer", BERT_PATH), None]
)
@pytest.mark.promise("B08", "D07", "E22")
def test_layer_class_by_name_path_list_or_the_models_own(bert, names):
    units = choose_units(
        bert, FsdpConfig(layer_classes=names), bert.description.layer_classes
    )
    assert kinds(units) == {"BertLayer": 3, "Embedding": 1}
    assert (
        describe_units(units)
        == "4 units (3 BertLayer, 1 Embedding) and the rest of the model"
    )


@pytest.mark.promise("B08")
def test_unknown_layer_class_names_the_candidates(bert):
    fsdp = FsdpConfig(
        layer_classes=("transformers.models.llama.modeling_llama.LlamaDecoderLayer",)
    )
    with pytest.raises(
        UserError,
        match=r"the model has no transformers\S+LlamaDecoderLayer; its layer classes: .*BertLayer",
    ):
        choose_units(bert, fsdp, ())
    # A name alone is not enough where the path says another class.
    with pytest.raises(UserError, match="has no my_code"):
        layer_units(bert, [BERT_PATH.replace("transformers", "my_code")])


def test_a_plain_module_without_layers_says_so():
    with pytest.raises(
        UserError, match="its layer classes: none found: use SIZE_BASED_WRAP"
    ):
        layer_units(nn.Linear(2, 2), ["BertLayer"])


def test_candidates_of_modules_that_declare_none():
    block = nn.Sequential(nn.Linear(2, 2))
    assert layer_candidates(nn.Sequential(nn.ModuleList([block, block]))) == [
        "Sequential"
    ]


def test_embeddings_are_a_unit_or_not(bert):
    units = choose_units(bert, FsdpConfig(), ("BertLayer",))
    assert kinds(units) == {"BertLayer": 3, "Embedding": 1}
    for policy in ("NO_WRAP", "SIZE_BASED_WRAP"):  # which know nothing of embeddings
        assert "Embedding" not in kinds(
            choose_units(bert, FsdpConfig(wrap_policy=policy), ("BertLayer",))
        )
    (embedding,) = embedding_units(bert)
    for is_trained in (False, True):
        embedding.requires_grad_(is_trained)
        assert embedding in choose_units(bert, FsdpConfig(), ("BertLayer",))
    assert (
        kinds(choose_units(bert, FsdpConfig(wrap_policy="NO_WRAP"), ("BertLayer",)))
        == {}
    )
    assert describe_units([]) == "the whole model as one unit"


@pytest.mark.promise("B32")
def test_towers_have_their_own_units():
    clip = model_in(shared(tiny_clip))
    vl = model_in(shared(tiny_qwen3_vl))
    assert kinds(choose_units(clip, FsdpConfig(), clip.description.layer_classes)) == {
        "CLIPEncoderLayer": 4,
        "Embedding": 1,
    }
    actual = kinds(choose_units(vl, FsdpConfig(), vl.description.layer_classes))
    assert set(actual) == {"Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock", "Embedding"}


@pytest.mark.promise("A13", "A24", "B07", "B09", "E11")
def test_size_threshold_changes_the_number_of_units(bert):
    count = {
        size: len(
            choose_units(
                bert, FsdpConfig(wrap_policy="SIZE_BASED_WRAP", min_num_params=size), ()
            )
        )
        for size in (1_000, 5_000, 20_000, 1_000_000)
    }
    assert count[1_000] > count[5_000] > count[20_000] >= count[1_000_000] == 0


@pytest.mark.parametrize("size", [1_000, 3_000, 9_000])
@pytest.mark.promise("E11")
def test_size_units_are_those_of_fsdp1s_own_policy(size):
    """What torch's policy wraps, asked of torch: `_recursive_wrap` with a wrapper that only takes notes."""
    from functools import partial

    from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

    class Noted(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = model_in(shared(tiny_bert, layers=3))
    ours = {
        name
        for name, module in model.named_modules()
        if module in set(size_units(model, size))
    }
    _recursive_wrap(
        model,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=size),
        wrapper_cls=Noted,
        ignored_modules=set(),
        ignored_params=set(),
    )
    theirs = {
        name.replace(".module", "")
        for name, module in model.named_modules()
        if isinstance(module, Noted)
    }
    assert ours == theirs
    assert ours


def test_units_come_inner_ones_first(bert):
    units = size_units(bert, 1_000, leaves=False)
    ordered = choose_units(
        bert,
        FsdpConfig(wrap_policy="SIZE_BASED_WRAP", min_num_params=1_000),
        (),
    )
    assert set(ordered) == set(units)
    for rank_info, unit in enumerate(ordered):
        assert not any(inner in ordered[rank_info + 1 :] for inner in unit.modules())
    assert all(
        isinstance(unit, nn.Module) and torch.is_tensor(next(unit.parameters()))
        for unit in ordered
    )
