"""A frozen image tower inside a vision-language model sees each image once per step, and no digit changes by it."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vembed
from tests import tiny
from tests.families.pictures import mixed_rows
from tests.harness import STRATEGIES, result_of, run_cases
from tests.models.families import built, parts_for
from tests.training.test_run import metrics
from vembed.models import embedding_model
from vembed.models.embedding_model import EmbeddingModel
from vembed.training import frozen

FAMILIES = [tiny.tiny_qwen3_vl, tiny.tiny_qwen2_vl, tiny.tiny_qwen2_5_vl]
FROZEN = {"freeze": ["vision"]}
LORA = {"use_lora": True, "lora_r": 4, "freeze": ["vision"], "lora_dropout": 0.2}


def options(folder, output, **more):
    data = folder / "mixed.jsonl"
    if not data.exists():
        mixed_rows(folder, 12)
    return {
        "model_name": str(tiny.shared(tiny.tiny_qwen3_vl)),
        "data_path": str(data),
        "output_dir": str(folder / output),
        "global_batch_size": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "use_gradient_cache": True,
        "micro_batch_tokens": 60,
        "logging_steps": 1,
        "report_to": [],
        **more,
    }


def train(settings, keeps=True):
    """One run: its losses, and how many images' patches passed the image tower; `keeps`: whether a step keeps what it
    gave."""
    passed = []
    original = embedding_model.image_states
    forward = EmbeddingModel.tower_output

    def seen(backbone, inputs):
        passed.append(len(inputs["image_grid_thw"]))
        return original(backbone, inputs)

    def counted(model, modality, inputs):
        if "pixel_values" in inputs:
            passed.append(len(inputs["image_grid_thw"]))
        return forward(model, modality, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_model, "image_states", seen)
        patch.setattr(EmbeddingModel, "tower_output", counted)
        if not keeps:
            patch.setattr(frozen, "IMAGES_SHARE", 0.0)
        vembed.train(settings)
    output = settings["output_dir"]
    losses = list(zip(metrics(output), metrics(output, "grad_norm"), strict=True))
    return {"losses": losses, "passed": sum(passed)}


@pytest.mark.parametrize("make", FAMILIES)
def test_what_the_image_tower_gave_can_take_the_place_of_pixels(
    make,
):
    model = built(make, freeze=["vision"]).train()
    inputs = dict(parts_for(model.description))["multimodal"]
    (direct,) = model([("multimodal", inputs)])
    (features,) = model([("multimodal", inputs)], until="images")
    assert not features.requires_grad
    num_bytes = features.shape[0] * features.shape[2] * 4
    assert num_bytes == model.frozen_image_token_bytes()
    inputs = {**inputs, "image_states": features}
    del inputs["pixel_values"]
    (through,) = model([("multimodal", inputs)])
    assert torch.equal(through, direct) and through.requires_grad
    assert built(make).frozen_image_token_bytes() is None


@pytest.mark.parametrize(
    "more",
    [
        FROZEN,
        LORA,
        {**FROZEN, "gradient_checkpointing": True},
        {**LORA, "mixed_precision": "bf16"},
    ],
    ids=["frozen", "lora", "checkpointing", "bf16"],
)
def test_each_image_passes_once_and_the_run_is_the_same(tmp_path, more):
    twice = train(options(tmp_path, "twice", **more), keeps=False)
    once = train(options(tmp_path, "once", **more))
    assert once["losses"] == twice["losses"]
    assert 0 < once["passed"] == twice["passed"] / 2
    others = load_file(tmp_path / "twice" / "final" / "model.safetensors")
    for name, value in load_file(
        tmp_path / "once" / "final" / "model.safetensors"
    ).items():
        assert torch.equal(value, others[name]), name


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """A run on one process, and runs on two ranks of each strategy, with kept images and without."""
    folder = tmp_path_factory.mktemp("ranks")
    more = {**LORA, "lora_dropout": 0.0, "mixed_precision": "no"}
    first = train(options(folder, "one", **more), keeps=False)
    cases = {}
    for name, strategy in STRATEGIES.items():
        for keeps in (True, False):
            case = f"{name}-{keeps}"
            cases[case] = (options(folder, case, **more, **strategy), keeps)
    return first, run_cases(train, 2, cases, process_group=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_two_ranks(on_two_ranks, strategy):
    first, actual = on_two_ranks
    once = result_of(actual, f"{strategy}-True")
    twice = result_of(actual, f"{strategy}-False")
    for rank, other in zip(once, twice, strict=True):
        assert rank["losses"] == other["losses"]
        assert 0 < rank["passed"] == other["passed"] / 2
    np.testing.assert_allclose(once[0]["losses"], first["losses"], rtol=1e-4)
