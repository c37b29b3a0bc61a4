"""A frozen image tower inside a vision-language model sees each image once per step, and no digit changes by it."""

import numpy as np
import pytest
import torch

from tests import tiny
from tests.families.pictures import mixed_rows
from tests.harness import STRATEGIES, result_of, run_cases
from tests.models.families import VISION_LANGUAGE, built, parts_for
from tests.training import test_frozen
from tests.training.test_run import final_weights
from tests.training.tiny_run import assert_same
from vembed.training import frozen

LORA = {
    "use_lora": True,
    "lora_r": 4,
    "lora_dropout": 0.2,
}


def options(folder, output, **more):
    data = folder / "mixed.jsonl"
    if not data.exists():
        mixed_rows(folder, 12)
    return {
        **test_frozen.FROZEN,
        "model_name": str(tiny.shared(tiny.tiny_qwen3_vl)),
        "data_path": str(data),
        "output_dir": str(folder / output),
        "global_batch_size": 6,
        "max_steps": 3,
        "micro_batch_tokens": 60,
        **more,
    }


def train(settings, keeps=True):
    """One run; `keeps`: whether a step keeps what the image tower gave."""
    with pytest.MonkeyPatch.context() as patch:
        if not keeps:
            patch.setattr(frozen, "IMAGES_SHARE", 0.0)
        return test_frozen.train(settings)


@pytest.mark.parametrize("make", VISION_LANGUAGE)
def test_what_the_image_tower_gave_can_take_the_place_of_pixels(
    make,
):
    model = built(make, freeze=["vision"]).train()
    inputs = dict(parts_for(model.description))["multimodal"]
    (direct,) = model([("multimodal", inputs)])
    (features,) = model([("multimodal", inputs)], stop_after="images")
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
        {},
        {**LORA, "mixed_precision": "bf16", "gradient_checkpointing": True},
    ],
    ids=["frozen", "lora-bf16-checkpointing"],
)
def test_each_image_passes_once_and_the_run_is_the_same(tmp_path, more):
    twice = train(options(tmp_path, "twice", **more), keeps=False)
    once = train(options(tmp_path, "once", **more))
    assert once["losses"] == twice["losses"]
    assert 0 < once["passed"] == twice["passed"] / 2
    assert_same(final_weights(tmp_path / "once"), final_weights(tmp_path / "twice"))


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """A run on one process without kept images, and runs with them on two ranks of each strategy."""
    folder = tmp_path_factory.mktemp("ranks")
    more = {
        **LORA,
        "lora_dropout": 0.0,
        "mixed_precision": "no",
    }
    first = train(options(folder, "one", **more), keeps=False)
    cases = {}
    for name, strategy in STRATEGIES.items():
        cases[name] = (options(folder, name, **more, **strategy),)
    return first, run_cases(train, 2, cases)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_two_ranks(on_two_ranks, strategy):
    first, actual = on_two_ranks
    ranks = result_of(actual, strategy)
    # Once a rank without an image passes a dummy, to stay in step.
    assert sum(rank["passed"] for rank in ranks) == first["passed"] / 2 + 1
    np.testing.assert_allclose(ranks[0]["losses"], first["losses"], rtol=1e-4)
