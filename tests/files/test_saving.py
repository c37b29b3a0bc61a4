"""The folder of a saved model: complete or not there, plain names, safetensors alone, a card without secrets."""

from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests import tiny
from tests.built import described, model_of
from tests.files.saving import (
    assert_alike,
    config_of,
    load_in_sentence_transformers,
    ours,
    save,
)
from vembed.evaluation.report.record import RunSummary
from vembed.saving import files
from vembed.saving.card import Card, render_card
from vembed.saving.files import replaced_folder, save_model


def test_the_layout_has_the_module_paths_that_versions_3_to_6_load(tmp_path):
    folder = save(tiny.tiny_bert, tmp_path / "final", mrl_dims=[8], max_length=30)
    modules = tiny.read_json(folder / "modules.json")
    assert [(module["path"], module["type"]) for module in modules] == [
        ("", "sentence_transformers.models.Transformer"),
        ("1_Pooling", "sentence_transformers.models.Pooling"),
        ("2_Dense", "sentence_transformers.models.Dense"),
        ("3_Normalize", "sentence_transformers.models.Normalize"),
    ]
    # Versions before 5.4 hand every key of these files to the module's constructor.
    text = tiny.read_json(folder / "sentence_bert_config.json")
    assert text == {"max_seq_length": 30, "do_lower_case": False}
    assert tiny.read_json(folder / "1_Pooling" / "config.json") == {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": False,
        "include_prompt": True,
    }
    dense = tiny.read_json(folder / "2_Dense" / "config.json")
    assert set(dense) == {"in_features", "out_features", "bias", "activation_function"}
    endings = {path.suffix for path in folder.rglob("*")}
    assert endings.isdisjoint({".bin", ".pt", ".pth", ".pkl"})


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def test_an_interrupted_save_leaves_the_old_model(tmp_path, monkeypatch):
    folder = save(tiny.tiny_bert, tmp_path / "final")
    before = ours(folder, tiny.texts(2))
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr(files, "save_processors", full)
        with pytest.raises(OSError, match="No space left"):
            save(tiny.tiny_bert, folder, max_length=3)
    assert names_in(tmp_path) == ["final"]
    assert (ours(folder, tiny.texts(2)) == before).all()
    save(tiny.tiny_bert, folder, max_length=3)
    assert names_in(tmp_path) == ["final"]
    assert load_in_sentence_transformers(folder).max_seq_length == 3


def test_a_model_between_two_renames_comes_back(tmp_path):
    (tmp_path / ".final.old").mkdir()
    (tmp_path / ".final.old" / "whole.txt").touch()
    (tmp_path / ".final.new").mkdir()
    with pytest.raises(OSError, match="full"), replaced_folder(tmp_path / "final"):
        raise OSError("full")
    assert names_in(tmp_path) == ["final"]
    assert names_in(tmp_path / "final") == ["whole.txt"]


def test_weights_under_a_wrappers_names_are_saved_under_their_own(tmp_path):
    model = model_of(config_of(tiny.tiny_bert, mrl_dims=[8]))
    layer = "encoder.layer.1."
    layer_inside = "encoder._orig_mod.layer.1._checkpoint_wrapped_module."
    wrapped = {}
    for name, tensor in model.state_dict().items():
        inside = name.replace(layer, layer_inside)
        wrapped[f"module._fsdp_wrapped_module.{inside}"] = tensor + 1
    folder = save_model(tmp_path / "final", model, wrapped)
    stored = load_file(folder / "model.safetensors")
    source = load_file(tiny.shared(tiny.tiny_bert) / "model.safetensors")
    assert stored.keys() == source.keys()
    # What is saved is the state given, not what the module holds.
    for name, parameter in model.backbone.named_parameters():
        assert torch.equal(stored[name], parameter + 1)


def test_tied_weights_are_saved_once(tmp_path):
    source = tiny.shared(tiny.tiny_t5)
    model = model_of(config_of(source))
    tied = {"backbone.shared.weight", "backbone.encoder.embed_tokens.weight"}
    assert tied <= model.state_dict().keys()
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = save_model(tmp_path / "final", model, gathered)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == load_file(source / "model.safetensors").keys()
    vectors = ours(folder, tiny.texts(2))
    assert (vectors == ours(source, tiny.texts(2))).all()


def test_the_card_says_what_was_done(tmp_path):
    summary = RunSummary(
        data=[
            "data: /home/somebody/pairs.jsonl: 1,024 examples",
            "https://example.org/a/b.jsonl: 3 examples",
        ],
        num_steps=1200,
        versions={"torch": "2.13"},
    )
    card = Card(
        summary,
        settings={
            "data_path": ["/home/somebody/pairs.jsonl", "~/somebody/more/"],
            "output_dir": "/somewhere",
        },
        scores={"ndcg@10": 0.625, "dim16/ndcg@10": 0.5},
        before={"ndcg@10": 0.5},
    )
    folder = save(tiny.tiny_qwen3_st, tmp_path / "final", card=card, mrl_dims=[16, 8])
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    head = yaml.safe_load(front)
    del head["model-index"]
    assert head == {
        "library_name": "sentence-transformers",
        "tags": ["sentence-transformers", "feature-extraction", "vembed"],
        "pipeline_tag": "sentence-similarity",
    }
    for expected in (
        "| Matryoshka sizes | 16, 8 (the first coordinates are an embedding by themselves) |",
        "| Query prompt | `Instruct: find the text\\nQuery:` |",
        "| ndcg@10 | 0.5000 | 0.6250 |",
        "| dim16/ndcg@10 |  | 0.5000 |",
        "- data: pairs.jsonl: 1,024 examples",
        "- https://example.org/a/b.jsonl: 3 examples",
        "| data_path | [pairs.jsonl, more/] |",
        "| steps done | 1,200 |",
    ):
        assert expected in text
    for private in (str(tmp_path), "somebody", "somewhere"):
        assert private not in text


def test_the_saved_tokenizer_cuts_at_the_models_length_and_pads_nothing(tmp_path):
    model = tiny.tiny_bert(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(40)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(model / "tokenizer.json"))
    folder = save(model, tmp_path / "final", max_length=20)
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(saved.encode("red " * 30).ids) == 20
    assert len(saved.encode("red").ids) < 20
    settings = tiny.read_json(folder / "tokenizer_config.json")
    assert settings["model_max_length"] == 20
    assert "max_length" not in settings
    assert_alike(folder, ["red green blue " * 10])


def test_tokenizer_files_are_those_that_older_versions_know(tmp_path):
    folder = save(tiny.tiny_qwen3_vl, tmp_path / "final")
    settings = tiny.read_json(folder / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "<|image_pad|>" in settings["additional_special_tokens"]
    assert not {"extra_special_tokens", "is_local", "local_files_only"} & set(settings)


def card_of(model, settings=None, scores=None, **summary):
    """The front matter and the text of a model's card."""
    card = Card(RunSummary(**summary), settings or {}, scores or {})
    text = render_card(described(config_of(model)), card)
    return yaml.safe_load(text.split("---\n")[1]), text


@pytest.mark.parametrize(
    ("make", "example", "other"),
    [
        (
            tiny.tiny_clip,
            'encode_query(["a query"])',
            'encode([{"image": "document.jpg"}], kind="document")',
        ),
        (
            tiny.tiny_vit,
            'encode_document(["document.jpg"])',
            'encode([{"image": "query.jpg"}], kind="query")',
        ),
    ],
)
def test_the_card_shows_inputs_that_the_model_takes(make, example, other):
    _, text = card_of(make)
    assert example in text
    assert other in text


def based(folder, front):
    """A model whose card begins with this."""
    tiny.tiny_bert(folder)
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n")
    return folder


@pytest.mark.parametrize(
    "base, trained, expected",
    [
        ("en", "de", "de"),
        ("en", "", None),
        ("en", None, "en"),
        (["en", "de", "fr"], "de", ["en", "de", "fr"]),
    ],
)
def test_the_language_of_the_card_follows_the_data(tmp_path, base, trained, expected):
    folder = based(tmp_path / "base", {"language": base})
    front, _ = card_of(folder, language=trained)
    assert front.get("language") == expected


def test_the_card_never_has_secrets():
    _, text = card_of(
        tiny.tiny_bert,
        data=["https://user:hunter2@example.org/x.jsonl: 3 examples"],
        settings={
            "wandb_api_key": "0123456789abcdef",
            "hf_token": "abc",
            "model_name": "https://user:hunter2@example.org/model",
            "run_name": "with hf_abcdefghijklmnop inside",
            "column_mapping": {"password": "x-y-z", "question": "query"},
        },
    )
    for secret in ("0123456789", "hunter2", "hf_abcdefg", "hf_token", "x-y-z"):
        assert secret not in text
    assert "question: query" in text


def test_the_card_has_scores_licence_and_language_for_the_hub(tmp_path):
    base = {"license": "mit", "language": ["de", "en"], "secret_token": "x"}
    folder = based(tmp_path / "base", base)
    assert "## Training" not in card_of(folder)[1]
    front, _ = card_of(
        folder,
        scores={"ndcg@10": 0.5, "dim16/ndcg@10": 0.4},
        evaluation="40 queries over 40 documents",
    )
    assert front["license"] == "mit"
    assert front["language"] == ["de", "en"]
    assert "secret_token" not in front
    (result,) = front["model-index"][0]["results"]
    expected = {"type": "ndcg_at_10", "name": "ndcg@10", "value": 0.5}
    assert result["metrics"] == [expected]
    assert result["dataset"]["name"] == "40 queries over 40 documents"
    named = described(config_of(folder)).with_(name="BAAI/bge-small-en-v1.5")
    assert "base_model: BAAI/bge-small-en-v1.5" in render_card(named, Card())


def test_final_that_is_a_link_leaves_the_folder_that_it_names(tmp_path):
    target = tmp_path / "disk" / "models"
    link = tmp_path / "run" / "final"
    target.mkdir(parents=True)
    link.parent.mkdir()
    (target / "thesis.txt").write_text("years of work")
    link.symlink_to(target)
    with replaced_folder(link) as folder:
        (folder / "model.safetensors").write_text("new")
    assert names_in(target) == ["thesis.txt"]
    assert not link.is_symlink()
    assert (link / "model.safetensors").read_text() == "new"
    assert names_in(link.parent) == ["final"]
