"""`vembed edit` and `vembed.edit`: what tells two sets of texts apart is taken out, on one process and on shards."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vembed
from tests.harness import result_of, run_cases, run_ranks
from tests.tiny import shared, tiny_clip, tiny_distilbert, tiny_qwen3_st
from tests.weights.bilingual import bilingual_model, bilingual_texts
from vembed import Embedder, UserError
from vembed.cli.main import app
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
    for name, texts in zip(("one.txt", "two.txt"), bilingual_texts(COUNT), strict=True):
        (folder / name).write_text("\n".join(texts) + "\n")
    return str(folder / "one.txt"), str(folder / "two.txt")


# ---- arithmetic ------------------------------------------------------------------------------------------------


def test_directions_and_projection():
    draw = np.random.default_rng(0)
    step = draw.normal(size=8)
    first = draw.normal(size=(100, 8))
    second = first + 3 * step + 0.01 * draw.normal(size=(100, 8))
    unit = step / np.linalg.norm(step)
    for how in ("mean_difference", "principal"):
        ((*actual,),) = directions(first, second, how)
        assert abs(np.array(actual) @ unit) > 0.999
    matrix, offset = projection(unit[None], 0.5)
    np.testing.assert_allclose(
        first @ matrix.T + offset,
        first - 0.5 * np.outer(first @ unit, unit),
        atol=1e-12,
    )
    with pytest.raises(UserError, match="100 and 50 texts"):
        directions(first, second[:50], "principal")
    with pytest.raises(UserError, match="the same mean"):
        directions(first, first, "mean_difference")


def test_erasure_leaves_one_mean_and_nothing_to_a_linear_probe():
    draw = np.random.default_rng(1)
    mix = draw.normal(size=(8, 8))
    first = draw.normal(size=(2000, 8)) @ mix
    second = (draw.normal(size=(2000, 8)) + 1) @ mix
    assert (
        linear_probe((first[:1000], second[:1000]), (first[1000:], second[1000:])) > 0.9
    )
    matrix, offset = erasure(first, second, 1.0)
    single = first @ matrix.T + offset
    two = second @ matrix.T + offset
    np.testing.assert_allclose(single.mean(axis=0), two.mean(axis=0), atol=0.05)
    assert linear_probe((single[:1000], two[:1000]), (single[1000:], two[1000:])) < 0.55


@pytest.mark.parametrize(
    ("make", "in_a_layer"), [(tiny_distilbert, 2), (tiny_qwen3_st, 2), (tiny_clip, 2)]
)
def test_writers_of_families(make, in_a_layer):
    embedder = Embedder(shared(make), device="cpu")
    actual = residual_writers(embedder.model, embedder.backbone, embedder.description)
    layers = [entry.layer for entry in actual]
    assert layers[0] == 0
    assert all(layers.count(layer) == in_a_layer for layer in set(layers) - {0})
    names = dict(embedder.model.named_parameters())
    width = embedder.hidden_states(["a cat"]).shape[-1]
    assert all(
        names[f"{entry.name}.weight"].shape[1 if entry.by_rows else 0] == width
        for entry in actual
    )


def test_writers_named_as_in_gpt_neox_and_a_layer_of_which_only_one_is_known():
    from transformers import AlbertConfig, AlbertModel, GPTNeoXConfig, GPTNeoXModel

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    description = Embedder(shared(tiny_qwen3_st), device="cpu").description
    neox = GPTNeoXModel(GPTNeoXConfig(**sizes, num_hidden_layers=2))
    actual = [
        (entry.layer, entry.name.partition(".")[2])
        for entry in residual_writers(neox, neox, description)[1:]
    ]
    ends = ("attention.dense", "mlp.dense_4h_to_h")
    assert actual == [(layer, f"{layer - 1}.{end}") for layer in (1, 2) for end in ends]
    albert = AlbertModel(
        AlbertConfig(**sizes, embedding_size=16, num_hidden_layers=2),
        add_pooling_layer=False,
    )
    with pytest.raises(
        UserError, match="AlbertLayerGroup have names that vembed does not know"
    ):
        residual_writers(albert, albert, description)


# ---- whole edits -----------------------------------------------------------------------------------------------


@pytest.mark.promise("B18")
def test_a_language_is_removed_and_texts_find_each_other_across(
    model, files, tmp_path, capsys
):
    with pytest.raises(SystemExit) as end:
        app(
            ["edit", str(model), *files, "-o", str(tmp_path / "out"), "--where", "both"]
        )
    assert end.value.code == 0
    messages = json.loads((tmp_path / "out" / "edit.json").read_text())
    before = messages["before"]
    after = messages["after"]
    assert before["probe"] > 0.95
    assert after["probe"] < 0.6
    assert after["across"] > before["across"] + 0.3
    assert f"{after['probe']:.4f}" in capsys.readouterr().out
    single, two = bilingual_texts(COUNT)
    saved = Embedder(tmp_path / "out", device="cpu")
    first, second = (saved.encode(texts[1::2]) for texts in (single, two))
    similarities = first @ second.T
    rank = (similarities > np.diag(similarities)[:, None]).sum(axis=1)
    actual = np.where(rank < 10, 1 / np.log2(rank + 2), 0)
    assert actual.mean() == pytest.approx(after["across"], abs=0.02)
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(single[:5])
    np.testing.assert_allclose(saved.encode(single[:5]), theirs, atol=1e-5)


def test_the_weights_are_those_of_the_formula(model, files, tmp_path):
    result = vembed.edit(
        model, tmp_path / "out", *files, strength=0.7, layers=[1], trials=0
    )
    before, after = (
        load_file(entry / "model.safetensors") for entry in (model, result.model_dir)
    )
    first, two = bilingual_texts(COUNT)
    states = Embedder(model, device="cpu").hidden_states(
        [*first[0::2], *two[0::2]], [1], batch_size=1
    )[:, 0]
    difference = states[: COUNT // 2].astype(np.float64).mean(axis=0) - states[
        COUNT // 2 :
    ].mean(axis=0)
    v = torch.from_numpy(difference / np.linalg.norm(difference))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    names = [
        f"encoder.layer.0.{end}.weight"
        for end in ("attention.output.dense", "output.dense")
    ]
    assert changed == set(names)  # the biases are zeros
    for name in changed:
        whole = before[name].double()
        expected = whole - 0.7 * (
            torch.outer(v, v @ whole) if whole.ndim == 2 else v * (v @ whole)
        )
        torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)


def _edit_on_a_rank(model, files, output, version):
    options = {} if version is None else {"strategy": "fsdp", "fsdp_version": version}
    config = TrainConfig(
        model_name=model, data_path="unused", mixed_precision="no", **options
    )
    with start_session(config) as session:
        result = edit(
            model,
            output,
            *files,
            where="both",
            direction="principal",
            components=2,
            session=session,
        )
        return session.strategy, result.after


@pytest.fixture(scope="module")
def on_ranks(model, files, tmp_path_factory):
    """Output of one process and of two that hold shards of either kind, and the folder that they wrote."""
    place = tmp_path_factory.mktemp("edited")
    alone = run_ranks(
        _edit_on_a_rank,
        1,
        str(model),
        files,
        str(place / "one"),
        None,
        process_group=False,
    )
    cases = {
        str(version): (str(model), files, str(place / str(version)), version)
        for version in (1, 2)
    }
    return alone, run_cases(_edit_on_a_rank, 2, cases, process_group=False), place


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.promise("B18")
def test_shards_are_edited_to_the_same_bits(on_ranks, version):
    alone, actual, place = on_ranks
    ends = result_of(actual, version)
    assert [strategy for strategy, _ in (*alone, *ends)] == ["single", "fsdp", "fsdp"]
    written = sorted((place / "one").rglob("*.safetensors"))
    assert written
    for path in written:
        other = load_file(place / version / path.relative_to(place / "one"))
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, other[name]), name
    assert ends[0][1] == pytest.approx(alone[0][1], abs=0.02)


def test_a_search_takes_the_best_that_holds(model, files, tmp_path):
    result = vembed.edit(
        model, tmp_path / "out", *files, trials=6, max_drop=0.01, seed=1
    )
    assert len(result.trials) == 6
    messages = json.loads((tmp_path / "out" / "edit.json").read_text())
    assert [trial["scores"] for trial in messages["trials"]] == [
        trial.scores for trial in result.trials
    ]
    holding = [
        trial
        for trial in result.trials
        if trial.scores["across"] >= result.before["across"] - 0.01
    ]
    chosen = next(trial for trial in result.trials if trial.plan == result.plan)
    assert chosen.scores["probe"] == min(entry.scores["probe"] for entry in holding)
    assert result.after == pytest.approx(
        chosen.scores
    )  # every trial began at the same weights


@pytest.mark.parametrize(("count", "is_warned"), [(8, True), (100, False)])
def test_a_probe_of_few_texts_is_no_proof(model, tmp_path, caplog, count, is_warned):
    first, second = bilingual_texts(count)
    vembed.edit(model, tmp_path / "out", first, second, where="embedding")
    warned = "tested on 8 texts" in caplog.text
    assert warned == is_warned
    assert warned == ("tested on" in caplog.text)


def test_a_text_is_a_line_of_the_file(tmp_path):
    (tmp_path / "windows.txt").write_bytes(
        "\ufeffone\r\ntwo\u2028and\x0cmore\r\n\r\nthree".encode()
    )
    assert read_texts(tmp_path / "windows.txt") == (
        "one",
        "two\u2028and\x0cmore",
        "three",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "erase"}, "use it with where: embedding"),
        ({"components": 2}, "mean_difference has one"),
        ({"layers": [1], "where": "embedding"}, "the embedding has none"),
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
