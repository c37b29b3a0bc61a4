"""EmbeddingModel: heads, frozen parts and their features, learned scale and bias, dtypes and kernels."""

import sys
from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from tests import tiny
from tests.models.families import (
    COMPOSED,
    built,
    loss_of,
    parts_for,
    text_inputs,
)
from vembed.data.examples import Example, Item
from vembed.data.features import build_featuriser
from vembed.errors import UserError
from vembed.inference.encoding import encode_items
from vembed.models.building import load_embedder
from vembed.models.heads import principal_components
from vembed.saving.files import save_model
from vembed.training import setup


def _frozen(model):
    return {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


# ---- heads -----------------------------------------------------------------------------------------------------


def test_the_mrl_projection_starts_as_a_cut_and_stands_behind_the_models_own_modules():
    folder = str(tiny.shared(tiny.tiny_bert_st, dense_dim=12))
    model = built(tiny.tiny_bert, model_name=folder, mrl_dims=[8, 4])
    whole = built(tiny.tiny_bert, model_name=folder)
    inputs = text_inputs(model.description)
    (cut,) = model([("text", inputs)])
    (full,) = whole([("text", inputs)])
    assert model.description.embedding_dim == 8 and torch.equal(cut, full[:, :8])
    names = [name for name, _ in model.head.named_parameters()]
    assert names == ["0.linear.weight", "0.linear.bias", "1.linear.weight"]


def test_principal_components_order_the_prefixes_by_what_they_carry():
    draw = torch.Generator().manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(16, 16, generator=draw)).Q
    latent = torch.randn(400, 16, generator=draw) * torch.logspace(0, -2, 16).flip(0)
    sample = latent @ mixing + 3.0 * mixing[5]
    directions = principal_components(sample, 8)
    torch.testing.assert_close(
        directions @ directions.T, torch.eye(8), atol=1e-5, rtol=0
    )
    queries = nn.functional.normalize(sample[:100])
    for dims in (2, 4):
        # The first directions leave less of a row than its first coordinates.
        cut = queries[:, :dims].square().sum()
        projected = (queries @ directions[:dims].T).square().sum()
        assert projected > cut


def test_a_projection_starts_from_the_components_of_documents_of_the_whole_data(
    monkeypatch,
):
    monkeypatch.setattr(setup, "NUM_PCA_DOCUMENTS", 10)
    folder = str(tiny.shared(tiny.tiny_bert_st, dense_dim=12))
    whole = built(tiny.tiny_bert, model_name=folder)
    model = built(
        tiny.tiny_bert, model_name=folder, mrl_dims=[8, 4], mrl_projection="pca"
    )
    featuriser = build_featuriser(model.description)
    for num_examples, last in ((19, 17), (4, 3)):
        store = [
            Example(Item("q"), (Item(f"{'text ' * number} {number}"),))
            for number in range(num_examples)
        ]
        setup.start_projection(model, featuriser, store, SimpleNamespace(is_main=True))
        step = num_examples / min(num_examples, 10)
        numbers = [int(number * step) for number in range(min(num_examples, 10))]
        assert numbers[-1] == last
        documents = [store[number].positives[0] for number in numbers]
        sample = encode_items(
            whole, build_featuriser(whole.description), documents, "document"
        )
        expected = principal_components(torch.from_numpy(sample), 8)
        num_known = min(8, len(documents) - 1)
        torch.testing.assert_close(
            model.mrl_projection.linear.weight[:num_known],
            expected[:num_known],
            rtol=1e-3,
            atol=1e-3,
        )


# ---- frozen parts ----------------------------------------------------------------------------------------------


def test_parameters_without_use_are_frozen_and_named(caplog):
    with caplog.at_level("INFO", logger="vembed"):
        model = built(tiny.tiny_bert)
    unused = ["pooler.dense.weight", "pooler.dense.bias"]
    assert _frozen(model) == {f"backbone.{name}" for name in unused}
    assert ", ".join(unused) in caplog.text


def bert_of_twelve_layers(folder):
    return tiny.tiny_bert(folder, layers=12)


@pytest.mark.parametrize(
    ("make", "freeze", "prefixes"),
    [
        (tiny.tiny_clip, ["vision"], ("vision_model.", "logit_scale")),
        (COMPOSED, ["text"], ("text_model.", "vision_model.embeddings.mask_token")),
        (tiny.tiny_bert, ["embeddings"], ("embeddings.", "pooler.")),
        (
            tiny.tiny_convnext,
            ["first_n_layers=2"],
            ("encoder.stages.0.layers.0.", "encoder.stages.1.layers.0."),
        ),
        (
            tiny.tiny_clip,
            ["first_n_layers=1", "visual_projection"],
            (
                "text_model.encoder.layers.0.",
                "vision_model.encoder.layers.0.",
                "visual_projection.",
                "logit_scale",
            ),
        ),
        (
            tiny.tiny_clip,
            ["vision.first_n_layers=1"],
            ("vision_model.encoder.layers.0.", "logit_scale"),
        ),
        (tiny.tiny_qwen3, ["backbone.layers.1.mlp"], ("layers.1.mlp.",)),
        (
            bert_of_twelve_layers,
            ["encoder.layer.1", "encoder.layer.2."],
            ("encoder.layer.1.", "encoder.layer.2.", "pooler."),
        ),
    ],
)
def test_freeze_freezes_what_it_names(make, freeze, prefixes):
    model = built(make, freeze=freeze)
    expected = set()
    for name, _ in model.named_parameters():
        if name.removeprefix("backbone.").startswith(prefixes):
            expected.add(name)
    assert expected and _frozen(model) == expected
    model.train()
    loss_of(model(parts_for(model.description))).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in expected), name


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (
            tiny.tiny_bert,
            {"freeze": ["vision"]},
            r"vision selects nothing of this model. .* its towers .text.",
        ),
        (
            tiny.tiny_clip,
            {"freeze": ["first_n_layers=9"]},
            r"number of layers .*text.: 2, ",
        ),
        (
            tiny.tiny_bert,
            {"freeze": ["encoder.layers.0"]},
            r"the nearest is encoder\.layer\.0",
        ),
        (tiny.tiny_bert, {"freeze": ["text"]}, "leaves nothing of .* to train"),
        (
            tiny.tiny_bert,
            {"use_lora": True, "freeze": ["text"]},
            "freeze less of it",
        ),
        (
            tiny.tiny_qwen3,
            {"use_lora": True, "lora_target_modules": ["q_porj"]},
            "q_porj is not a linear layer .* q_proj",
        ),
        (
            tiny.tiny_modernbert,
            {"padding_free": True},
            "padding_free: true .* modernbert",
        ),
        (
            tiny.tiny_bert,
            {"attn_implementation": "flash_attention_2"},
            r"flash-attn and a CUDA GPU.*use sdpa",
        ),
        (
            tiny.tiny_mpnet,
            {"attn_implementation": "sdpa"},
            "MPNetModel does not support .*scaled_dot_product",
        ),
    ],
)
def test_what_cannot_be_built_is_said(make, options, said):
    with pytest.raises(UserError, match=said):
        built(make, **options)


@pytest.mark.parametrize("make", [tiny.tiny_clip, COMPOSED])
def test_features_of_a_frozen_tower_stay_and_take_the_towers_place(make):
    options = {"freeze": ["vision"]}
    if make != COMPOSED:
        options["mrl_dims"] = [8]
    model = built(make, **options)
    assert model.frozen_modalities() == ["image"]
    assert built(make).frozen_modalities() == []
    model.train()
    assert model.training and model.backbone.text_model.training
    assert not model.backbone.vision_model.training
    _, image = parts_for(model.description)
    (features,) = model([image], stop_after="pooled")
    assert not features.requires_grad
    (direct,) = model([image])
    (through,) = model([("image", {"pooled": features})])
    assert torch.equal(direct, through)
    assert through.requires_grad, "the projection behind it is trained"


def test_a_frozen_tower_is_held_in_the_dtype_that_is_asked_for():
    model = built(tiny.tiny_clip, freeze=["vision"], torch_dtype="bfloat16")
    for name, parameter in model.named_parameters():
        is_half = parameter.dtype == torch.bfloat16
        assert is_half == (".vision_model." in name), name
    outputs = model(parts_for(model.description))
    assert {output.dtype for output in outputs} == {torch.float32}
    loss_of(outputs).backward()


# ---- use -------------------------------------------------------------------------------------------------------


OWN_CONFIG = """
from transformers import BertConfig

class OwnConfig(BertConfig):
    model_type = "a_kind_of_its_own"
"""
OWN_MODEL = """
from transformers import BertModel
from .own_config import OwnConfig

class OwnModel(BertModel):
    config_class = OwnConfig
"""


def forget_modules_of_models():
    """Modules of another folder's cache must not be found: each package remembers its own folder."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "transformers_modules":
            del sys.modules[name]


@pytest.fixture
def own_module_cache(tmp_path, monkeypatch):
    """Code of models is copied into a folder of this test's own."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    forget_modules_of_models()
    yield
    forget_modules_of_models()


@pytest.mark.usefixtures("own_module_cache")
def test_python_code_of_a_model_runs_only_when_asked(tmp_path):
    folder = tiny.tiny_bert(tmp_path / "model")
    (folder / "own_config.py").write_text(OWN_CONFIG)
    (folder / "own_model.py").write_text(OWN_MODEL)
    classes = {
        "AutoConfig": "own_config.OwnConfig",
        "AutoModel": "own_model.OwnModel",
    }
    settings = {"model_type": "a_kind_of_its_own", "auto_map": classes}
    tiny.change_json(folder / "config.json", **settings)
    with pytest.raises(UserError, match="set trust_remote_code: true if you trust"):
        built(tiny.tiny_bert, model_name=str(folder))
    from_folder = built(tiny.tiny_bert, model_name=str(folder), trust_remote_code=True)
    assert type(from_folder.backbone).__name__ == "OwnModel"
    assert from_folder.description.layer_classes == ("BertLayer",)
    plain = built(tiny.tiny_bert)
    parts = parts_for(plain.description)
    assert torch.equal(from_folder.eval()(parts)[0], plain.eval()(parts)[0])
    saved = save_model(tmp_path / "saved", from_folder, from_folder.state_dict())
    vectors = load_embedder(saved, trust_remote_code=True)(parts)[0]
    assert torch.equal(vectors, plain(parts)[0])
    theirs = SentenceTransformer(str(saved), device="cpu", trust_remote_code=True)
    assert type(theirs[0].auto_model).__name__ == "OwnModel"
    (saved / "own_model.py").unlink()
    with pytest.raises(UserError, match="gives no own_model"):
        load_embedder(saved, trust_remote_code=True)
