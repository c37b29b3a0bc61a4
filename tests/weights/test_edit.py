"""`vembed edit` and `vembed.edit`: what tells two sets of texts apart is taken out, on one process and on shards."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AlbertConfig, AlbertModel, GPTNeoXConfig, GPTNeoXModel

import vembed
from tests.commands import invoke
from tests.harness import result_of, run_cases
from tests.tiny import (
    change_json,
    read_json,
    shared,
    tiny_clip,
    tiny_distilbert,
    tiny_qwen3_st,
)
from tests.weights.bilingual import bilingual_model, bilingual_texts
from vembed import Embedder, UserError
from vembed.config.schema import TrainConfig
from vembed.parallel.session import start_session
from vembed.weights.edit import (
    directions,
    edit,
    erasure,
    linear_probe,
    projection,
    read_texts,
    residual_writers,
)

COUNT = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return bilingual_model(tmp_path_factory.mktemp("bilingual") / "model")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    paths = []
    for name, texts in zip(("one", "two"), bilingual_texts(COUNT), strict=True):
        path = folder / f"{name}.txt"
        path.write_text("\n".join(texts) + "\n")
        paths.append(str(path))
    return paths


# ---- arithmetic ------------------------------------------------------------------------------------------------


def test_directions_and_projection():
    draw = np.random.default_rng(0)
    step = draw.normal(size=8)
    first = draw.normal(size=(100, 8))
    second = first + 3 * step + 0.01 * draw.normal(size=(100, 8))
    unit = step / np.linalg.norm(step)
    for how in ("mean_difference", "principal"):
        (actual,) = directions(first, second, how)
        assert abs(actual @ unit) > 0.999
    matrix, offset = projection(unit[None], 0.5)
    expected = first - 0.5 * np.outer(first @ unit, unit)
    np.testing.assert_allclose(first @ matrix.T + offset, expected, atol=1e-12)
    with pytest.raises(UserError, match="100 and 50 texts"):
        directions(first, second[:50], "principal")
    with pytest.raises(UserError, match="the same mean"):
        directions(first, first, "mean_difference")


def test_erasure_leaves_one_mean_and_nothing_to_a_linear_probe():
    draw = np.random.default_rng(1)
    mix = draw.normal(size=(8, 8))
    first = draw.normal(size=(2000, 8)) @ mix
    second = (draw.normal(size=(2000, 8)) + 1) @ mix

    def probed(one, two):
        return linear_probe((one[:1000], two[:1000]), (one[1000:], two[1000:]))

    assert probed(first, second) > 0.9
    matrix, offset = erasure(first, second, 1.0)
    erased = [rows @ matrix.T + offset for rows in (first, second)]
    np.testing.assert_allclose(
        erased[0].mean(axis=0), erased[1].mean(axis=0), atol=0.05
    )
    assert probed(*erased) < 0.55


@pytest.mark.parametrize("make", [tiny_distilbert, tiny_qwen3_st, tiny_clip])
def test_writers_of_families(make):
    embedder = Embedder(shared(make), device="cpu")
    writers = residual_writers(embedder.model, embedder.backbone, embedder.description)
    layers = [writer.layer for writer in writers]
    assert layers[0] == 0
    for layer in set(layers) - {0}:
        assert layers.count(layer) == 2
    width = embedder.hidden_states(["a cat"]).shape[-1]
    for writer in writers:
        weight = embedder.model.get_parameter(f"{writer.name}.weight")
        assert weight.shape[1 if writer.by_rows else 0] == width


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32,
}


def test_writers_named_as_in_gpt_neox_and_a_layer_of_which_only_one_is_known():
    description = Embedder(shared(tiny_qwen3_st), device="cpu").description
    neox = GPTNeoXModel(GPTNeoXConfig(**SIZES))
    names = [
        writer.name.partition(".")[2]
        for writer in residual_writers(neox, neox, description)[1:]
    ]
    ends = ("attention.dense", "mlp.dense_4h_to_h")
    assert names == [f"{layer}.{end}" for layer in (0, 1) for end in ends]
    config = AlbertConfig(**SIZES, embedding_size=16)
    albert = AlbertModel(config, add_pooling_layer=False)
    with pytest.raises(UserError, match="AlbertLayerGroup have names that"):
        residual_writers(albert, albert, description)


# ---- whole edits -----------------------------------------------------------------------------------------------


@pytest.mark.promise("B18")
def test_a_language_is_removed_and_texts_find_each_other_across(model, files, tmp_path):
    out = tmp_path / "out"
    printed = invoke("edit", model, *files, "-o", out, "--where", "both").stdout
    report = read_json(out / "edit.json")
    before = report["before"]
    after = report["after"]
    assert before["probe"] > 0.95
    assert after["probe"] < 0.6
    assert after["across"] > before["across"] + 0.3
    assert f"{after['probe']:.4f}" in printed
    first_texts, second_texts = bilingual_texts(COUNT)
    saved = Embedder(out, device="cpu")
    first = saved.encode(first_texts[1::2])
    similarities = first @ saved.encode(second_texts[1::2]).T
    rank = (similarities > np.diag(similarities)[:, None]).sum(axis=1)
    gains = np.where(rank < 10, 1 / np.log2(rank + 2), 0)
    assert gains.mean() == pytest.approx(after["across"], abs=0.02)
    theirs = SentenceTransformer(str(out), device="cpu").encode(first_texts[:5])
    np.testing.assert_allclose(saved.encode(first_texts[:5]), theirs, atol=1e-5)


def test_the_weights_are_those_of_the_formula(model, files, tmp_path):
    options = {"strength": 0.7, "layers": [1], "trials": 0}
    result = vembed.edit(model, tmp_path / "out", *files, **options)
    before = load_file(model / "model.safetensors")
    after = load_file(result.model_dir / "model.safetensors")
    embedder = Embedder(model, device="cpu")
    means = []
    for texts in bilingual_texts(COUNT):
        states = embedder.hidden_states(texts[0::2], [1], batch_size=1)[:, 0]
        means.append(states.astype(np.float64).mean(axis=0))
    difference = means[0] - means[1]
    v = torch.from_numpy(difference / np.linalg.norm(difference))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # The biases are zeros.
    assert changed == {
        "encoder.layer.0.attention.output.dense.weight",
        "encoder.layer.0.output.dense.weight",
    }
    for name in changed:
        whole = before[name].double()
        expected = whole - 0.7 * torch.outer(v, v @ whole)
        torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)


PLAN = {"where": "both", "direction": "principal", "components": 2}


def _edit_on_a_rank(model, files, output, version):
    config = TrainConfig(
        model_name=model,
        data_path="unused",
        mixed_precision="no",
        strategy="fsdp",
        fsdp_version=version,
    )
    with start_session(config) as session:
        result = edit(model, output, *files, **PLAN, session=session)
        return session.strategy, result.after


@pytest.mark.promise("B18")
def test_shards_are_edited_to_the_same_bits(model, files, tmp_path):
    alone = vembed.edit(model, tmp_path / "one", *files, **PLAN)
    expected = load_file(tmp_path / "one" / "model.safetensors")
    cases = {}
    for version in (1, 2):
        cases[version] = (str(model), files, str(tmp_path / f"{version}"), version)
    results = run_cases(_edit_on_a_rank, 2, cases)
    for version in cases:
        for strategy, of_rank in result_of(results, version):
            assert strategy == "fsdp"
            assert of_rank == pytest.approx(alone.after, abs=0.02)
        actual = load_file(tmp_path / f"{version}" / "model.safetensors")
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_search_takes_the_best_that_holds(model, files, tmp_path):
    out = tmp_path / "out"
    result = vembed.edit(model, out, *files, trials=6, max_drop=0.01, seed=1)
    assert len(result.trials) == 6
    trials = read_json(out / "edit.json")["trials"]
    scores = [trial.scores for trial in result.trials]
    assert [trial["scores"] for trial in trials] == scores
    lowest = result.before["across"] - 0.01
    probes = [score["probe"] for score in scores if score["across"] >= lowest]
    chosen = next(trial for trial in result.trials if trial.plan == result.plan)
    assert chosen.scores["probe"] == min(probes)
    # Every trial began at the same weights.
    assert result.after == pytest.approx(chosen.scores)


@pytest.mark.parametrize(("count", "is_warned"), [(8, True), (100, False)])
def test_a_probe_of_few_texts_is_no_proof(model, tmp_path, caplog, count, is_warned):
    vembed.edit(model, tmp_path / "out", *bilingual_texts(count), where="embedding")
    assert ("tested on 8 texts" in caplog.text) == is_warned


def test_the_embedding_is_edited_before_it_is_cut(model, tmp_path):
    cut = shutil.copytree(model, tmp_path / "cut")
    change_json(cut / "config_sentence_transformers.json", truncate_dim=16)
    texts = bilingual_texts(8)
    vectors = []
    for folder in (model, cut):
        out = tmp_path / f"{folder.name}-edited"
        vembed.edit(folder, out, *texts, where="embedding")
        vectors.append(Embedder(out).encode(texts[0], normalize=False))
    whole, short = vectors
    assert short.shape[1] == 16
    np.testing.assert_allclose(short, whole[:, :16], atol=1e-5)


def test_a_text_is_a_line_of_the_file(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes("\ufeffone\ntwo\u2028and\x0cmore\nthree\n\n".encode())
    assert read_texts(path) == ("one", "two\u2028and\x0cmore", "three")
    path.write_text("one\n\nthree")
    with pytest.raises(UserError, match=r"windows\.txt:2 is blank"):
        read_texts(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "erase"}, "use it with where: embedding"),
        ({"components": 2}, "mean_difference has one"),
        ({"layers": [1], "where": "embedding"}, "the embedding has none"),
        ({"layers": [1], "trials": 2}, r"layers: \(1,\) has no effect with trials"),
        ({"strength": 0.5, "trials": 2}, "strength: 0.5 has no effect with trials"),
        ({"first": ["a", "b"]}, "at least 8"),
        ({"first": "nowhere.txt"}, "cannot be read"),
    ],
)
def test_mistakes(model, files, tmp_path, options, message):
    values = {"first": files[0], "second": files[1], **options}
    with pytest.raises(UserError, match=message):
        vembed.edit(model, tmp_path / "out", **values)
    with pytest.raises(UserError, match="exists already"):
        vembed.edit(model, tmp_path, *files)
