"""Modules of the user's own: exact gradients with auxiliary losses, training in shards, files that load elsewhere."""

import numpy as np
import pytest
import torch
import yaml

import vembed
from tests import tiny
from tests.commands import command, invoke
from tests.data.files import pair, write_jsonl
from tests.data.pictures import write
from tests.harness import run_ranks
from tests.losses.reference import reference_loss
from tests.own.bag import Bag
from tests.own.classes import BAG, BOTH, CONVOLUTIONS, FREE, FREE_SIZES, PACKED
from tests.parity.engine import (
    Case,
    build,
    examples,
    full_gradients,
    plain_batch,
    step_on_rank,
    worst_error,
)
from tests.tiny_tokenizers import texts, wordpiece_tokenizer
from tests.training.test_run import log_text, metric_lines
from vembed.config.loading import load_config
from vembed.parallel.session import start_session

WEIGHTS = {"word_size": 0.7, "vector_size": 1.3}
CASES = [
    Case("cached-rows", micro="row"),
    Case("cached", {"mrl_dims": [16, 4]}),
    Case("kept-graphs", cache=False),
    Case("alone", {"loss": "none"}),
    Case("lora", {"use_lora": True, "lora_r": 2}),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tokenizer, pairs of texts and pairs of images."""
    folder = tmp_path_factory.mktemp("own")
    wordpiece_tokenizer().save_pretrained(folder / "tokenizer")
    words = texts(64, seed=1)
    rows = {"pairs": [], "images": [], "both": []}
    for row in range(32):
        text, other = words[2 * row : 2 * row + 2]
        images = []
        for number, side in enumerate("ab", start=2 * row):
            images.append({"image": f"{row}{side}.png"})
            write(folder / f"{row}{side}.png", "PNG", seed=number)
        rows["pairs"].append(pair(text, other))
        rows["images"].append(pair(images[0], images[1]))
        rows["both"].append(pair(text, images[0]))
    for name, records in rows.items():
        write_jsonl(folder / f"{name}.jsonl", records)
    return folder


def options(place, name, **more):
    """A short run."""
    return {
        "tokenizer_name": str(place / "tokenizer"),
        "data_path": str(place / "pairs.jsonl"),
        "batch_size": 4,
        "max_steps": 2,
        "report_to": [],
        "output_dir": str(place / name),
        "micro_batch_tokens": 16,
        "use_gradient_cache": True,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        **more,
    }


def saved(place, name):
    return vembed.Embedder(place / name / "final", trust_remote_code=True)


# ---- gradients -----------------------------------------------------------------------------------------------------


def config_of(case, place, **more):
    """The bag, in float64 later, with the weights of both losses."""
    return load_config(
        {
            "model_class": BAG,
            "tokenizer_name": str(place / "tokenizer"),
            "data_path": "none",
            "auxiliary_losses": WEIGHTS,
            "gradient_checkpointing": False,
            **case.options,
            **more,
        }
    )


def on_ranks(place, strategy):
    """Each case through the real step on this rank: its gradients, and what was logged by name."""
    actual = []
    with start_session(config_of(CASES[0], place, strategy=strategy)) as session:
        for case in CASES:
            config = config_of(case, place, strategy=strategy)
            gradients, result = step_on_rank(case, config, session, config.objective)
            actual.append((gradients, dict(result.auxiliary_means)))
    return actual


def wanted(case, place):
    """The formula: every occurrence encoded by itself, and each auxiliary loss a mean over all of them."""
    config = config_of(case, place)
    model, _, featuriser = build(config)
    batch = plain_batch(case, model, featuriser)
    used = torch.cat([batch.query, batch.positive, batch.negative])
    inputs = []
    for example in examples(case):
        documents = (*example.positives, *example.negatives)
        inputs.append((example.query, "query"))
        inputs += [(item, "document") for item in documents]
    features = featuriser.features(inputs)
    _, losses = model([("text", featuriser.collate(features))], with_auxiliary=True)
    assert len(features) == len(batch.embeddings)
    means = {}
    for name, (sums, counts) in losses[0].items():
        means[name] = sums[used].sum() / counts[used].sum()
    value = sum(WEIGHTS[name] * mean for name, mean in means.items())
    if config.objective.loss != "none":
        value = value + reference_loss(
            batch, config, mrl_dims=model.description.mrl_dims
        )
    value.backward()
    gradients = {**full_gradients(model), "loss": value.detach()}
    return gradients, {name: float(mean.detach()) for name, mean in means.items()}


@pytest.fixture(scope="module")
def placed_results(place):
    """Results of each rank, one start of processes for each strategy."""
    return {
        strategy: run_ranks(on_ranks, ranks, place, strategy)
        for strategy, ranks in RANKS.items()
    }


RANKS = {"single": 1, "ddp": 2, "fsdp": 2}


@pytest.mark.parametrize("strategy", RANKS)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_gradients_with_auxiliary_losses_are_those_of_the_formula(
    placed_results, place, strategy, number
):
    expected, means = wanted(CASES[number], place)
    total = 0.0
    for rank in placed_results[strategy]:
        gradients, auxiliary = rank[number]
        name, error = worst_error(gradients, expected)
        assert error < 1e-9, (name, error)
        assert auxiliary == pytest.approx(means, rel=1e-9)
        total += float(gradients["loss"])
    assert total == pytest.approx(float(expected["loss"]), rel=1e-9)


# ---- runs ----------------------------------------------------------------------------------------------------------


def train_all(place):
    """Models in shards with Gradient Cache, one after the other; two of them under FSDP1."""
    bag = {"model_class": BAG, "auxiliary_losses": WEIGHTS}
    free = {"model_class": FREE, "model_config": FREE_SIZES, "mrl_dims": [16, 8]}
    images = str(place / "images.jsonl")
    runs = {
        "bag": bag,
        "convolutions": {"model_class": CONVOLUTIONS, "data_path": images},
        "free": free,
        "packed": {"model_class": PACKED, "learning_rate": "auto"},
        "both": {"model_class": BOTH, "data_path": str(place / "both.jsonl")},
        "bag1": {**bag, "fsdp_version": 1},
        "free1": {**free, "fsdp_version": 1},
    }
    actual = {}
    for name, values in runs.items():
        vembed.train(options(place, name, strategy="fsdp", **values))
        actual[name] = metric_lines(place / name)[-1]
    return actual


@pytest.fixture(scope="module")
def trained(place):
    """The losses that were logged for each model."""
    trained, _ = run_ranks(train_all, 2, place)
    return trained


def test_models_train_in_shards_with_gradient_cache(trained, place):
    assert {"loss/word_size", "loss/vector_size"} <= trained["bag"].keys()
    assert {"loss/next_token", "loss/kl"} <= trained["free"].keys()
    for name, units in (("free", "3 DecoderBlock"), ("convolutions", "2 Block")):
        assert f"units ({units}) and the rest" in log_text(place / name)


def test_fsdp1_gives_the_losses_of_fsdp2(trained, place):
    assert "FSDP1" in log_text(place / "bag1")
    for name in ("bag", "free"):
        for term, value in trained[name].items():
            if term.startswith("loss"):
                assert trained[f"{name}1"][term] == pytest.approx(value, rel=1e-4)


def test_a_module_takes_texts_in_one_row(trained, place):
    """Its vectors are those of padded texts."""
    assert trained["packed"].keys() >= {"loss/word_size"}
    log = log_text(place / "packed")
    assert "texts: without padding" in log
    assert "learning_rate: 0.002 (auto; from scratch" in log
    model = saved(place, "packed")
    subset = tiny.texts(3, seed=4)
    one_by_one = np.concatenate([model.encode([text]) for text in subset])
    assert np.abs(model.encode(subset) - one_by_one).max() < 1e-6


def test_a_module_takes_texts_and_images(trained, place):
    del trained
    vectors = saved(place, "both").encode([place / "0a.png", "a red cat"])
    assert vectors.shape == (2, 16)


@pytest.mark.parametrize("name", ["bag", "free"])
def test_saved_models_load_elsewhere(trained, place, name):
    from sentence_transformers import SentenceTransformer

    del trained
    folder = place / name / "final"
    subset = ["a red cat", "two dogs in the snow and a very long pipeline home", "rain"]
    with pytest.raises(vembed.UserError, match="trust_remote_code is false"):
        vembed.Embedder(folder)
    loaded = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    difference = saved(place, name).encode(subset) - loaded.encode(subset)
    assert np.abs(difference).max() < 1e-5
    assert "trust_remote_code=True" in (folder / "README.md").read_text()


def test_a_saved_model_is_exported_without_a_question(place, tmp_path):
    vembed.train(options(place, "bag-alone", model_class=Bag, max_steps=1))
    folders = (place / "bag-alone" / "final", tmp_path / "onnx")
    done = invoke("export", *folders, "--format", "onnx", "--trust-remote-code")
    assert "check: 200 texts" in done.output and "custom code" not in done.output
    # The graph needs no code of the model's, which is not in the folder.
    assert "auto_map" not in tiny.read_json(tmp_path / "onnx" / "config.json")


# ---- Python --------------------------------------------------------------------------------------------------------


def test_a_module_starts_from_its_weights(place):
    """One that was given in Python: with a step of no size, the saved model has its weights."""
    torch.manual_seed(3)
    module = Bag(hidden_dim=8)
    more = {"model_config": {"hidden_dim": 8}, "learning_rate": 1e-30}
    more["weight_decay"] = 0.0
    vembed.train(options(place, "module", model_class=module, **more))
    text = tiny.texts(1, seed=4)[0]
    ids = wordpiece_tokenizer()(text, return_tensors="pt")
    with torch.no_grad():
        (expected,), _ = module.eval()(ids["input_ids"], ids["attention_mask"])
    expected = expected.numpy()
    vector = saved(place, "module").encode(text)
    assert np.abs(vector - expected / np.linalg.norm(expected)).max() < 1e-6


def test_a_later_stage_starts_from_a_saved_folder(trained, place):
    del trained
    model_name = str(place / "bag" / "final")
    values = options(place, "later", model_class=Bag, model_name=model_name)
    assert vembed.train(values).steps == 2


def test_an_import_that_no_saved_model_could_make_is_refused(place, tmp_path):
    (tmp_path / "layers.py").write_text("from torch import nn\n")
    path = tmp_path / "bag_of_layers.py"
    code = "from . import layers\n\nclass Bag(layers.nn.Module):\n"
    path.write_text(
        f"{code}    def forward(self, input_ids):\n        return input_ids\n"
    )
    with pytest.raises(vembed.UserError, match=r"`from \. import name`"):
        vembed.train(options(place, "refused", model_class=f"{path}:Bag"))


def test_a_class_without_a_file_is_refused(place):
    class Local(Bag):
        """A class inside of a function."""

    for changes, message in (
        ({"model_class": Local}, "top of a Python file"),
        ({"tokenizer_name": None}, "reads texts and needs a tokenizer"),
        ({"tokenizer_name": "./nowhere"}, "tokenizer_name: .*nowhere"),
        ({"model_class": "torch:Tensor"}, "is not a class of torch"),
    ):
        refused = {**options(place, "refused", model_class=Bag), **changes}
        with pytest.raises(vembed.UserError, match=message):
            vembed.train(refused)


def test_adapters_are_merged_and_a_run_is_planned_and_resumed(place):
    """The other ways into a run: adapters on a module without layers, `plan`, a checkpoint, `eval`."""
    more = {"model_class": BAG, "use_lora": True, "lora_r": 2, "save_steps": 1}
    values = options(place, "adapted", **more)
    vembed.train(values)
    assert (place / "adapted" / "final" / "adapter").is_dir()
    assert vembed.train(values | {"max_steps": 3, "resume": "force"}).steps == 3
    config = place / "cfg.yaml"
    config.write_text(yaml.safe_dump(options(place, "planned", **more)))
    assert "fits" in invoke("plan", config).output
    assert f"model_class: {BAG}" in invoke("train", config, "--dry-run").output


def test_stages_evaluate_an_own_class_without_a_flag(place):
    """`final/` holds its code, which runs elsewhere with trust_remote_code alone."""
    config = options(place, "stages", model_class=BAG, max_steps=1)
    scoring = {"name": "scores", "evaluate": {"data": config["data_path"]}}
    config["stages"] = [{"name": "first"}, scoring]
    (place / "stages.yaml").write_text(yaml.safe_dump(config))
    command("train", "stages.yaml", folder=place, code=0)
    assert "ndcg@10" in (place / "stages" / "scores" / "scores.json").read_text()
