"""Several tasks in one run: sources with losses of their own, in batches of their own, on any number of ranks."""

import numpy as np
import pytest

import vembed
from tests.data.files import write_jsonl
from tests.harness import run_ranks
from tests.losses.batches import config_of
from tests.tiny import shared, texts, tiny_bert
from tests.training.test_run import metric_lines, metrics
from vembed.config.loading import resolve_run
from vembed.config.schema import DataSource, parse_sampling
from vembed.config.terms import source_batch_sizes, source_groups
from vembed.data.batching.schedule import BatchSchedule, examples_per_epoch
from vembed.data.datasets import open_sets
from vembed.losses.build import build_loss


def files(folder):
    """Retrieval rows with negatives, scored sentence pairs, rows with a teacher's scores, and labelled texts."""
    words = iter(texts(160, seed=4, longest=14))
    rows = {
        "retrieval": [],
        "sts": [],
        "scored": [],
        "topics": [],
    }
    for number in range(16):
        pair = {"query": next(words), "positive": next(words)}
        rows["retrieval"].append({**pair, "negatives": [next(words), next(words)]})
        pair = {"sentence1": next(words), "sentence2": next(words)}
        rows["sts"].append({**pair, "score": number % 5 / 5})
        pair = {"query": next(words), "positive": next(words)}
        scores = {"positive_scores": [2.0], "negative_scores": [number / 16]}
        rows["scored"].append(
            {
                **pair,
                "negatives": [next(words)],
                **scores,
            }
        )
        rows["topics"].append({"text": next(words), "label": f"class {number % 5}"})
    sources = {}
    for name, records in rows.items():
        path = folder / f"{name}.jsonl"
        write_jsonl(path, records)
        sources[name] = {"path": str(path), "name": name}
    sources["retrieval"]["max_negatives"] = 1
    sources["sts"] |= {
        "global_batch_size": 8,
        "losses": [{"loss": "cosent", "learn_temperature": True}],
        "temperature": 0.1,
    }
    sources["scored"]["losses"] = [
        {
            "loss": "kl",
            "teacher": "scores",
            "temperature": 1.0,
        },
        {"loss": "infonce", "weight": 0.1},
    ]
    return list(sources.values())


def options(folder, **more):
    return {
        "model_name": str(shared(tiny_bert)),
        "data_path": files(folder),
        "homogeneous_batches": True,
        "global_batch_size": 4,
        "max_steps": 10,
        "logging_steps": 1,
        "report_to": [],
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0.0,
        "output_dir": str(folder / "out"),
        **more,
    }


def train(settings):
    """Called on every rank: the logged steps."""
    vembed.train(settings)
    return [line for line in metric_lines(settings["output_dir"]) if "loss" in line]


def loss_names(steps):
    return {name for step in steps for name in step if name.startswith("loss/")}


def test_tasks_train_together_and_the_ranks_make_no_difference(tmp_path):
    first = train(options(tmp_path))
    tasks = {"loss/retrieval", "loss/sts", "loss/scored", "loss/topics"}
    terms = {"loss/sts/cosent", "loss/scored/kl", "loss/scored/infonce"}
    assert loss_names(first) == tasks | terms
    for step in first:
        (task,) = tasks & step.keys()
        assert step[task] == pytest.approx(step["loss"], rel=1e-6)
    scored = next(step for step in first if "loss/scored" in step)
    weighted = scored["loss/scored/kl"] + 0.1 * scored["loss/scored/infonce"]
    assert scored["loss"] == pytest.approx(weighted, rel=1e-6)
    sharded = options(tmp_path, output_dir=str(tmp_path / "two"), strategy="fsdp")
    sharded["save_steps"] = 3
    run_ranks(train, 2, {**sharded, "max_steps": 3})
    two = run_ranks(train, 2, {**sharded, "resume": True})[0]
    assert [step["step"] for step in two] == list(range(1, 11))
    losses = [[step["loss"] for step in steps] for steps in (first, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)


def test_an_anchor_is_the_start_model_as_the_run_reads_it(tmp_path):
    source = {"path": files(tmp_path)[0]["path"], "query_prompt": "blue: "}
    more = {
        "data_path": [{**source, "max_length": 4}],
        "homogeneous_batches": False,
        "loss": "anchor",
        "query_prompt": "red: ",
        "max_length": 32,
        "pooling": "max",
        "model_arguments": {"num_hidden_layers": 1},
        # On some processors both sides would round to bfloat16.
        "mixed_precision": "no",
        "max_steps": 1,
    }
    (step,) = train(options(tmp_path, **more))
    assert step["loss"] == pytest.approx(0.0, abs=1e-6)


STRONG = 20.0
"""Weight of an anchor."""


def test_an_anchor_holds_the_embeddings_near_the_start_model(tmp_path):
    source = files(tmp_path)[0]
    rows = [{"text": text} for text in texts(16, seed=9)]
    write_jsonl(tmp_path / "texts.jsonl", rows)
    anchor = {"path": str(tmp_path / "texts.jsonl"), "name": "texts"}
    anchor["losses"] = [{"loss": "anchor", "weight": STRONG}]
    last = {}
    for weight in (1e-9, STRONG):
        more = {"output_dir": str(tmp_path / str(weight)), "data_path": source["path"]}
        more["homogeneous_batches"] = False
        more["losses"] = [{"loss": "infonce"}, {"loss": "anchor", "weight": weight}]
        first = train(options(tmp_path, **more))
        assert first[0]["loss/anchor"] == pytest.approx(0.0, abs=1e-5)
        last[weight] = first[-1]["loss/anchor"]
    assert last[STRONG] < 0.5 * last[1e-9]
    both = train(options(tmp_path, data_path=[source, anchor]))
    assert loss_names(both) == {"loss/retrieval", "loss/texts", "loss/texts/anchor"}


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ({"batch_size": 4}, {}, "a batch size of its own needs batches of"),
        (
            {"batch_size": 4},
            {"homogeneous_batches": True, "global_batch_size": 8},
            "give the source global_batch_size too",
        ),
        ({}, {"sampling": "round_robin"}, "a batch of each source in turn"),
        ({"val_data_path": "v"}, {}, "a has val_data_path, and the run has none"),
    ],
)
def test_sources_that_do_not_go_together(source, change, message):
    sources = [{"path": "a", **source}, "b"]
    with pytest.raises(vembed.UserError, match=message):
        resolve_run(
            {
                "model_name": "m",
                "data_path": sources,
                **change,
            }
        )


def test_each_task_is_validated_logged_and_drawn(tmp_path):
    sources = files(tmp_path)[:2]
    sources[1]["val_data_path"] = sources[1]["path"]
    settings = options(
        tmp_path,
        data_path=sources,
        eval_steps=2,
        max_steps=4,
    )
    steps = train({**settings, "val_data_path": sources[0]["path"]})
    scores = metrics(tmp_path / "out", "eval")
    assert len(scores) == 3
    for score in scores:
        assert {"ndcg@10", "task/sts/spearman"} <= set(score)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "task sts: Spearman" in page
    for name in loss_names(steps):
        assert f"Loss, {name.removeprefix('loss/')}" in page


def test_validation_data_of_a_source_are_read_with_its_columns(tmp_path):
    path = tmp_path / "german.jsonl"
    write_jsonl(path, [{"frage": f"was {n}", "antwort": f"das {n}"} for n in range(8)])
    mapping = {"frage": "query", "antwort": "positive"}
    paths = {"path": str(path), "val_data_path": str(path)}
    source = {**paths, "column_mapping": mapping}
    english = files(tmp_path)[0]
    sets = opened(tmp_path, data_path=[english, source], val_data_path=english["path"])
    (data,) = sets.by_task.values()
    assert len(data.queries) == 8


def opened(folder, **more):
    config = resolve_run(options(folder, **more)).config
    return open_sets(
        config.data,
        config.objective,
        model_name=config.model.model_name,
        seed=config.run.seed,
        compares=False,
    )


def test_held_out_examples_are_scored_by_task(tmp_path):
    sources = files(tmp_path)[:3]
    sources[1]["query_prompt"] = "compare: "
    sets = opened(tmp_path, data_path=sources, val_split=0.3)
    assert set(sets.by_task) == {"retrieval", "sts", "scored"}
    retrieved = [sets.by_task[name].queries for name in ("retrieval", "scored")]
    assert sum(map(len, retrieved)) == len(sets.evaluation.queries)
    validated = [{**source, "val_data_path": source["path"]} for source in sources]
    path = validated[0]["path"]
    for entry in (sets, opened(tmp_path, data_path=validated, val_data_path=path)):
        assert {item.prompt for item in entry.by_task["sts"].queries} == {"compare: "}


@pytest.mark.parametrize(
    ("sampling", "weights", "expected"),
    [
        ("proportional", (1.0, 1.0), [1000, 10]),
        ("proportional", (0.5, 3.0), [500, 30]),
        ("temperature(0.5)", (1.0, 1.0), [918, 92]),
        ("temperature( 0 )", (1.0, 1.0), [505, 505]),
        ("weights", (1.0, 1.0), [505, 505]),
        ("weights", (3.0, 1.0), [2258, 752]),
        ("round_robin", (1.0, 1.0), [336, 672]),
    ],
)
def test_sources_are_drawn_as_sampling_says(sampling, weights, expected):
    drawn = examples_per_epoch(parse_sampling(sampling), (1000, 10), weights, (4, 8))
    assert drawn == expected


def test_turns_and_batch_sizes():
    sampling = parse_sampling("round_robin")
    sized = {"source_groups": [0, 1], "batch_sizes": [4, 6]}
    turns = BatchSchedule([90, 20], 4, 1, **sized, sampling=sampling)
    for epoch in range(2):
        assert sources_and_sizes(turns, epoch) == [(0, 4), (1, 6)] * 11
    assert "; of 6: source 2" in turns.summary()
    every_row = BatchSchedule([8, 12], 4, 1, **sized)
    assert sorted(sources_and_sizes(every_row, 0)) == [(0, 4), (0, 4), (1, 6), (1, 6)]
    assert every_row.num_left_out == 0


def sources_and_sizes(schedule, epoch):
    """The source of each batch's first example, and the batch's size."""
    batches = []
    for step in range(schedule.batches_per_epoch):
        batch = schedule.batch(epoch, step)
        batches.append((schedule.source_of(int(batch[0])), len(batch)))
    return batches


def test_sources_of_one_task_share_batches():
    schedule = BatchSchedule([12, 12, 12], 6, 1, source_groups=[0, 1, 0])
    for step in range(schedule.batches_per_epoch):
        batch = schedule.batch(0, step)
        sources = {schedule.source_of(int(index)) for index in batch}
        assert sources in ({0, 2}, {1})


def test_sources_with_equal_losses_and_batch_sizes_are_one_task():
    sources = [
        DataSource(path="a", temperature=0.1),
        DataSource(path="b"),
        DataSource(path="c", temperature=0.1),
        DataSource(
            path="d",
            temperature=0.1,
            batch_size=2,
        ),
    ]
    config = config_of(homogeneous_batches="task").changed(data_path=sources)
    assert source_groups(config.data) == [0, 1, 0, 3]
    assert source_batch_sizes(config.data, config.batch, 64) == [64, 64, 64, 4]
    assert len(build_loss(config).sources) == 3
