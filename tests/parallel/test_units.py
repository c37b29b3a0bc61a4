"""Which modules become units: found by class, by size, or named in an error."""

from collections import Counter
from functools import partial

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from tests.built import model_of
from tests.parallel.steps import config_of
from tests.tiny import shared, tiny_bert, tiny_clip, tiny_qwen3_vl
from vembed.config.decisions import FsdpConfig
from vembed.errors import UserError
from vembed.parallel.sharding import choose_units, embedding_units, size_units

BERT_PATH = "transformers.models.bert.modeling_bert.BertLayer"


def model_in(folder):
    return model_of(config_of(folder))


def units_of(model, classes=("BertLayer",), **options):
    """The number of units of each class."""
    units = choose_units(model, FsdpConfig(**options), classes)
    return dict(Counter(type(unit).__name__ for unit in units))


@pytest.fixture(scope="module")
def bert():
    return model_in(shared(tiny_bert, layers=3))


@pytest.mark.parametrize("names", [("BertLayer",), ("BertLayer", BERT_PATH), None])
@pytest.mark.promise("B08", "D07", "E22")
def test_layer_class_by_name_path_list_or_the_models_own(bert, names):
    classes = bert.description.layer_classes
    assert units_of(bert, classes, layer_classes=names) == {
        "BertLayer": 3,
        "Embedding": 1,
    }


@pytest.mark.promise("B08")
@pytest.mark.parametrize(
    "name",
    [
        "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        # A name alone is not enough where the path says another class.
        BERT_PATH.replace("transformers", "my_code"),
    ],
)
def test_unknown_layer_class_names_the_candidates(bert, name):
    with pytest.raises(UserError, match=rf"{name}; .*BertLayer"):
        units_of(bert, layer_classes=(name,))


def test_embeddings_are_a_unit_or_not(bert):
    # These policies know nothing of embeddings.
    assert units_of(bert, wrap_policy="NO_WRAP") == {}
    assert "Embedding" not in units_of(bert, wrap_policy="SIZE_BASED_WRAP")
    (embedding,) = embedding_units(bert)
    for is_trained in (False, True):
        embedding.requires_grad_(is_trained)
        assert units_of(bert) == {"BertLayer": 3, "Embedding": 1}


@pytest.mark.promise("B32")
def test_towers_have_their_own_units():
    clip = model_in(shared(tiny_clip))
    vl = model_in(shared(tiny_qwen3_vl))
    assert units_of(clip, clip.description.layer_classes) == {
        "CLIPEncoderLayer": 4,
        "Embedding": 1,
    }
    actual = units_of(vl, vl.description.layer_classes)
    assert set(actual) == {"Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock", "Embedding"}


class Noted(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("size", [1_000, 3_000, 9_000])
@pytest.mark.promise("A13", "A24", "B07", "B09", "E11")
def test_size_units_are_those_of_fsdp1s_own_policy(size):
    """What torch's policy wraps, asked of torch: `_recursive_wrap` with a wrapper that only takes notes."""
    model = model_in(shared(tiny_bert, layers=3))
    units = set(size_units(model, size))
    ours = {name for name, module in model.named_modules() if module in units}
    _recursive_wrap(
        model,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=size),
        wrapper_cls=Noted,
        ignored_modules=set(),
        ignored_params=set(),
    )
    theirs = set()
    for name, module in model.named_modules():
        if isinstance(module, Noted):
            theirs.add(name.replace(".module", ""))
    assert ours and ours == theirs
