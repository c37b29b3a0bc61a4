"""final/ is stored in the dtype of the model's own files, or in the one asked for, and scores what the report says."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

import vembed
from tests.built import described
from tests.harness import run_ranks
from tests.tiny import change_json, shared, tiny_bert, tiny_clip, tiny_dinov2
from tests.training.test_run import log_text, settings
from vembed.config.schema import TrainConfig
from vembed.models.building import load_embedder
from vembed.models.precision import dtype_in_files, saved_dtype

BF16_STEP = 2**-8
"""A score may move by a few of these: two documents that are almost equally near change places."""


def in_dtype(source, folder, dtype):
    """A copy of a model whose weights are stored in this dtype, as published ones are."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    weights = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    change_json(folder / "config.json", dtype=str(dtype).removeprefix("torch."))
    return folder


def half(folder):
    return str(in_dtype(shared(tiny_bert), folder / "source", torch.bfloat16))


def stored(folder):
    dtypes = set()
    for path in folder.rglob("*.safetensors"):
        dtypes |= {tensor.dtype for tensor in load_file(path).values()}
    return dtypes


def test_a_bfloat16_model_stays_one_and_scores_what_was_reported(tmp_path):
    options = settings(
        tmp_path,
        model_name=half(tmp_path),
        mrl_dims=[16, 8],
        save_steps=3,
    )
    result = vembed.train(options)
    assert stored(result.model_dir) == {torch.bfloat16}
    loaded = load_embedder(result.model_dir).backbone
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    scores = vembed.evaluate(result.model_dir, options["val_data_path"])
    tolerance = 8 * BF16_STEP
    for name in ("ndcg@10", "dim16/ndcg@10", "dim8/ndcg@10"):
        assert scores[name] == pytest.approx(result.metrics[name], abs=tolerance), name
    theirs = SentenceTransformer(str(result.model_dir), device="cpu")
    assert theirs.encode(["red cat"]).shape == (1, 16)
    # Goes on from the checkpoint, which holds the float32 masters.
    more = {
        "resume": "force",
        "max_steps": 9,
        "torch_dtype": "float32",
    }
    exact = vembed.train({**options, **more})
    assert stored(exact.model_dir) == {torch.float32}
    scores = vembed.evaluate(exact.model_dir, options["val_data_path"])
    assert scores["ndcg@10"] == pytest.approx(exact.metrics["ndcg@10"], abs=1e-6)


def test_lora_on_a_bfloat16_model(tmp_path):
    options = settings(tmp_path, model_name=half(tmp_path), use_lora=True)
    result = vembed.train(options)
    merged = load_file(result.model_dir / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert stored(result.model_dir / "adapter") == {torch.float32}


def test_sharded_with_whole_models_in_checkpoints(tmp_path):
    options = settings(
        tmp_path,
        model_name=half(tmp_path),
        max_steps=2,
        save_steps=1,
        strategy="fsdp",
        fsdp_state_dict_type="FULL_STATE_DICT",
        mixed_precision="no",
        ema=0.5,
        quantize_weights="int8",
    )
    run_ranks(vembed.train, 2, options)
    for name in ("final", "checkpoint-1/model"):
        assert stored(tmp_path / "run" / name) == {torch.bfloat16}
    # The average, rounded to int8.
    final = load_file(tmp_path / "run/final/model.safetensors")
    whole = load_file(tmp_path / "run/checkpoint-2/model/model.safetensors")
    torch.testing.assert_close(whole, final, rtol=0, atol=0)


def test_a_float32_model_is_stored_in_float16_where_its_weights_allow(tmp_path):
    options = settings(tmp_path, max_steps=1, torch_dtype="float16")
    assert stored(vembed.train(options).model_dir) == {torch.float16}
    source = in_dtype(shared(tiny_bert), tmp_path / "source", torch.float32)
    weights = load_file(source / "model.safetensors")
    weights["embeddings.LayerNorm.bias"][0] = 1e5
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    result = vembed.train(
        {
            **options,
            "model_name": str(source),
            "overwrite": True,
        }
    )
    assert stored(result.model_dir) == {torch.float32}
    said = log_text(result.output_dir)
    assert "float16 cannot hold embeddings.LayerNorm.bias" in said


def test_the_files_decide_whatever_the_config_says(tmp_path):
    text = in_dtype(shared(tiny_bert), tmp_path / "text", torch.bfloat16)
    image = in_dtype(shared(tiny_dinov2), tmp_path / "image", torch.bfloat16)
    clip = in_dtype(shared(tiny_clip), tmp_path / "clip", torch.float16)
    change_json(text / "config.json", dtype="float32")
    assert dtype_in_files(text) == torch.bfloat16
    assert dtype_in_files(shared(tiny_bert)) == torch.float32

    def decided(model, image_model=None):
        config = TrainConfig(
            data_path=[],
            model_name=str(model),
            image_model_name=image_model and str(image_model),
        )
        return saved_dtype(config.model.torch_dtype, described(config))

    assert decided(text, image) == torch.bfloat16
    assert decided(text, shared(tiny_dinov2)) is None
    assert decided(clip) == torch.float16
