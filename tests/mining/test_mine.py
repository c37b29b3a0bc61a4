"""`vembed mine`: what becomes a negative and what never does, for every kind of input and output."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import write_beir
from tests.mining.data import (
    MARGIN,
    NUM_ROWS,
    assert_same_rows,
    assert_scores_are_the_models,
    corpus_of,
    documents,
    model,
    pair,
    pairs_of,
    read_jsonl,
    rows_in,
    run,
    score_matrix,
    small,
    training_examples,
    write_data,
    write_jsonl,
)
from tests.tiny import texts
from vembed import UserError, mine
from vembed.mining.inputs import read_mining_inputs
from vembed.mining.options import MineConfig
from vembed.parallel import placement, session


@pytest.fixture
def options(tmp_path):
    return write_data(tmp_path)


def expected(options, highest, num_negatives=4):
    """The best documents below each query's limit, without its positive."""
    names = documents()
    scores = score_matrix([row["query"] for row in rows_in(options)], names)
    chosen = []
    for positive, row_scores in enumerate(scores):
        order = np.argsort(-row_scores, kind="stable")
        candidates = order[order != positive][:50]
        limit = highest(row_scores[positive])
        allowed = candidates[row_scores[candidates] <= limit]
        chosen.append([names[number] for number in allowed[:num_negatives]])
    return chosen


LIMITS = [
    ({}, lambda positive: positive - MARGIN * abs(positive)),
    ({"relative_margin": None, "margin": 0.015}, lambda positive: positive - 0.015),
    ({"relative_margin": None, "max_score": 0.97}, lambda positive: 0.97),
    (
        {"relative_margin": 0.02, "margin": 0.01},
        lambda positive: positive - 0.02 * abs(positive),
    ),
]


@pytest.mark.parametrize("changes, highest", LIMITS)
def test_the_best_below_the_limit(options, changes, highest):
    rows, result = run(options, scores=True, **changes)
    assert [row["negatives"] for row in rows] == expected(options, highest)
    assert_scores_are_the_models(rows)
    names = documents()
    for before, row in zip(rows_in(options), rows, strict=True):
        assert before.items() <= row.items()
        identities = [f"d{names.index(text)}" for text in row["negatives"]]
        assert row["negative_ids"] == identities
    assert result.num_rows == 40
    assert result.num_negatives == sum(len(row["negatives"]) for row in rows)
    assert result.num_encoded == 340


def test_first_ones_are_skipped_and_low_ones_left_out(options):
    options["relative_margin"] = None
    plain, _ = run(options, num_negatives=6, scores=True)
    skipped, _ = run(options, num_negatives=4, skip_first=2)
    lowest = float(np.median([row["negative_scores"][3] for row in plain]))
    remaining, result = run(options, num_negatives=6, min_score=lowest)
    for all_of_them, late, high in zip(plain, skipped, remaining, strict=True):
        assert late["negatives"] == all_of_them["negatives"][2:]
        # Scores descend: those that stay are the first.
        num_high = int((np.array(all_of_them["negative_scores"]) >= lowest).sum())
        assert high["negatives"] == all_of_them["negatives"][:num_high]
    assert result.counts["too_low"] > 0
    assert result.num_short > 0


def test_few_negatives_are_warned_of(tmp_path):
    options = small(tmp_path, pairs_of(documents()[:3]), num_negatives=4)
    lines = []
    assert mine(options, log=lines.append).num_short == 3
    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert "3 of 3 rows got fewer than 4 negatives" in warning
    assert "corpus_path" in warning and "top_k" in warning


@pytest.mark.parametrize("sampling", ["random", "softmax"])
def test_sampling_is_drawn_from_the_candidates_and_repeats(options, sampling):
    rows, _ = run(options, sampling=sampling, seed=1)
    again, _ = run(options, sampling=sampling, seed=1)
    other, _ = run(options, sampling=sampling, seed=2)
    assert rows == again
    assert rows != other
    limits, _ = run(options, num_negatives=50)
    for row, allowed in zip(rows, limits, strict=True):
        assert set(row["negatives"]) <= set(allowed["negatives"])
        assert len(set(row["negatives"])) == min(4, len(allowed["negatives"]))


def test_known_positives_are_never_negatives(tmp_path):
    """By content in other case and spaces, across rows of one query, by id, by qrels, and the query itself."""
    actual = documents()
    query = actual[0]
    marked = {"positive_ids": ["d3", "d4"], "query_id": "q"}
    rows = [
        pair(query, actual[1]),
        pair(f"  {query.upper()} ", actual[2].upper()),
        pair(query, "something else", **marked),
    ]
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\nq\td5\t1\nq\td6\t0\n")
    options = small(tmp_path, rows, corpus_of(actual), near_duplicate=None)
    every = {"num_negatives": 299, "top_k": 300}
    built, result = run(options, qrels_path=str(qrels), **every)
    for row in built:
        assert set(row["negatives"]) == set(actual) - set(actual[:6])
    assert result.counts["candidates"] == 294


def test_near_duplicates_of_a_positive_are_no_negatives(tmp_path):
    positive = (
        "the quick way to sort a list of numbers in place without a copy of the list"
    )
    near = f"Note: {positive}, really!"
    far = (
        "a slow way to read a file of letters into a string with a loop over all lines"
    )
    rows = [pair("sort a list", positive)]
    options = small(tmp_path, rows, [positive, near, far])
    rows, result = run(options)
    assert rows[0]["negatives"] == [far]
    assert result.counts["near_duplicates"] == 1
    rows, _ = run(options, near_duplicate=None)
    assert set(rows[0]["negatives"]) == {near, far}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["mapped", "conversations"])
def test_training_reads_all_negatives_that_stay(tmp_path, kind, keep):
    actual = documents()[:30]
    extra_negative = "an own negative"
    rows = []
    for text in actual:
        sides = (f"find {text}", text, extra_negative)
        if kind == "conversations":
            names = ("messages", "positive_messages", "negative_messages")
            sides = [[{"role": "user", "content": side}] for side in sides]
        else:
            names = ("query", "positive", "bad")
        rows.append(dict(zip(names, sides, strict=True)))
    mapping = {"bad": "negative"} if kind == "mapped" else None
    options = small(tmp_path, rows, actual, num_negatives=2, column_mapping=mapping)
    for scores in (False, True):
        run(options, keep_negatives=keep, scores=scores)
        for example in training_examples(
            tmp_path / "mined.jsonl", column_mapping=mapping
        ):
            negatives = [item.text for item in example.negatives]
            assert len(negatives) == len(set(negatives)) == 2 + keep
            assert (extra_negative in negatives) == keep


def test_an_entry_of_data_path_is_read_by_its_own_mapping_and_prompts(tmp_path):
    rows = [
        {"question": f"find {text}", "solution": text, "wrong": "replaced"}
        for text in documents()[:5]
    ]
    options = small(tmp_path, rows, num_negatives=1, keep_negatives=False)
    mapping = {"question": "query", "solution": "positive", "wrong": "negative"}
    entry = {"path": options["data_path"], "column_mapping": mapping}
    mined, result = run(options, data_path=[entry])
    texts = {row["solution"] for row in rows}
    for row, source in zip(mined, rows, strict=True):
        (negative,) = row["wrong"]
        assert negative in texts - {source["solution"]}
        assert row == {**source, "wrong": [negative]}
    # Five queries and documents, and the negative that they share.
    assert result.num_encoded == 11
    _, result = run(options, data_path=[{**entry, "query_prompt": "ask: "}])
    assert result.num_encoded == 5
    _, result = run(options, data_path=[{**entry, "max_length": 4}])
    assert result.num_encoded == 11


def test_a_corpus_at_an_address(tmp_path):
    corpus = [{"_id": "d", "text": "find"}]
    options = small(tmp_path, [pair("find it", "it")], corpus, num_negatives=1)
    address = f"file://{options['corpus_path']}"
    rows, _ = run(options, model_name="bm25", corpus_path=address)
    assert rows[0]["negative_ids"] == ["d"]


def test_rows_of_one_query_take_turns(tmp_path):
    actual = documents()
    rows = [pair("the cat", actual[number]) for number in range(3)]
    options = small(tmp_path, rows, actual, num_negatives=2)
    same, _ = run(options)
    assert len({tuple(row["negatives"]) for row in same}) == 1
    turns, _ = run(options, per_query_budget=6)
    assert len({negative for row in turns for negative in row["negatives"]}) == 6


def test_a_beir_folder_is_data_and_corpus(tmp_path):
    actual = documents()[:60]
    corpus = [{**row, "title": "t"} for row in corpus_of(actual)]
    write_jsonl(tmp_path / "corpus.jsonl", corpus)
    write_jsonl(tmp_path / "queries.jsonl", corpus_of(texts(8, seed=5)))
    (tmp_path / "qrels").mkdir()
    lines = ["query-id\tcorpus-id\tscore"]
    lines += [f"d{number // 2}\td{number}\t1" for number in range(16)]
    (tmp_path / "qrels" / "train.tsv").write_text("\n".join(lines) + "\n")
    options = small(tmp_path, [], top_k=58, num_negatives=58, near_duplicate=None)
    rows, _ = run(options, data_path=str(tmp_path))
    for number, row in enumerate(rows):
        positives = [f"t {text}" for text in actual[2 * number : 2 * number + 2]]
        assert row["positive"] == positives
        assert row["query_id"] == f"d{number}"
        assert set(row["negatives"]) == {f"t {text}" for text in actual} - {*positives}
    entry = {"path": str(tmp_path), "document_prompt": "blue: "}
    _, result = run(options, data_path=[entry])
    assert result.num_encoded == len(actual)


CATS = ({"d1": "a red cat", "d2": "a blue dog"}, {"q1": "red cat"}, {"q1": ["d1"]})
TREES = (
    {"d1": "a stone", "d2": "a green tree"},
    {"q1": "green tree"},
    {"q1": ["d2"]},
)


def test_ids_that_two_folders_share(tmp_path):
    folders = []
    for name, (corpus, queries, relevant) in {"cats": CATS, "trees": TREES}.items():
        write_beir(tmp_path / name, corpus, queries, relevant)
        folders.append(str(tmp_path / name))
    files = {"output_path": "x.jsonl", "retrievers": ["bm25"]}
    inputs = read_mining_inputs(MineConfig(data_path=folders, **files))
    positives = inputs.known.positives
    known = []
    for query, document in zip(positives.queries, positives.documents, strict=True):
        text = inputs.documents.item(int(document)).text
        known.append((inputs.known.item(int(query)).text, text))
    assert known == [("red cat", "a red cat"), ("green tree", "a green tree")]
    # The qrels of both corpora name queries of either folder.
    files["corpus_path"] = folders
    with pytest.raises(UserError, match="id q1 stands for different queries"):
        read_mining_inputs(MineConfig(data_path=folders, **files))
    row = {**pair("red cat", "a red cat"), "positive_id": "d1"}
    rows = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(UserError, match="id d1 of a positive stands for different"):
        read_mining_inputs(MineConfig(data_path=rows, **files))


def test_parquet_in_and_out_keeps_every_column(options, tmp_path):
    lines, _ = run(options)
    rows = [{**row, "extra": [1, 2]} for row in rows_in(options)]
    source = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    target = tmp_path / "mined.parquet"
    run(options, data_path=str(source), output_path=str(target))
    actual = pq.read_table(target).to_pylist()
    assert [{**row, "extra": [1, 2]} for row in lines] == actual
    assert len(training_examples(tmp_path / "mined.parquet")) == 40


def test_bm25_alone_and_fused(options):
    options["relative_margin"] = None
    rows, result = run(options, model_name="bm25", scores=True)
    for row in rows[:10]:
        for negative in row["negatives"]:
            assert set(row["query"].split()) & set(negative.split())
        assert row["negative_scores"] == sorted(row["negative_scores"], reverse=True)
    assert result.num_encoded == 0
    dense, _ = run(options, scores=True)
    del options["model_name"]
    retrievers = ["bm25", {"model": model(), "weight": 2.0}]
    for fusion in ("rrf", "scores"):
        both, _ = run(options, retrievers=retrievers, fusion=fusion, scores=True)
        assert both != dense
        assert_scores_are_the_models(both)  # whoever found the document


def test_documents_that_no_tokenizer_takes_are_named(options):
    corpus = corpus_of([*documents(), "half an emoji \ud83d"])
    write_jsonl(Path(options["corpus_path"]), corpus)
    with pytest.raises(UserError, match=r"corpus.jsonl:301: .* a lone surrogate"):
        run(options)


def test_vowel_signs_are_part_of_the_words_of_bm25_and_of_near_duplicates(tmp_path):
    positive = "दिन में पानी मिला फिर काम किया और सब लोग घर गए"
    other = "दान में पानी मिला फिर काम किया और सब लोग घर गए"
    unlike = "दानी मेला पुन फूर कोम कूया ओर सूब लूग घूर गूए"  # the consonants of the positive
    rows = [pair("दिन में मेला", positive)]
    corpus = [{"text": text} for text in (positive, other, unlike, "दा न")]
    options = small(tmp_path, rows, corpus, model_name="bm25", near_duplicate=0.8)
    rows, _ = run(options)
    assert rows[0]["negatives"] == [unlike], (
        "one copy but for a word, one other text, one without a word in common"
    )


def test_vectors_are_kept_for_other_choices_and_made_again_for_other_texts(
    options, tmp_path
):
    _, result = run(options)
    assert result.num_encoded == 340
    _, result = run(options, num_negatives=2)
    assert result.num_encoded == 0
    corpus = corpus_of(documents())
    corpus[99]["text"] += " changed"
    write_jsonl(tmp_path / "corpus.jsonl", corpus)
    changed, result = run(options)
    assert result.num_encoded == 1
    for path in tmp_path.rglob("document/*/*.vectors"):
        path.unlink()
    again, result = run(options)
    assert result.num_encoded == 300
    assert again == changed
    _, result = run(options, keep_work=False)
    assert not (tmp_path / "mined.jsonl.work").exists()


@pytest.mark.parametrize(
    ("asked", "has_instructions", "named", "is_half"),
    [
        ("auto", True, "bfloat16 (auto: the CPU has amx_bf16", True),
        ("auto", False, "float32 (auto", False),
        ("float32", True, "float32 (torch_dtype: float32)", False),
        ("bfloat16", False, "bfloat16 (torch_dtype: bfloat16)", True),
    ],
)
def test_the_precision_of_the_vectors_is_said(
    asked, has_instructions, named, is_half, options, monkeypatch
):
    queries = [row["query"] for row in rows_in(options)]
    expected_scores = np.diag(score_matrix(queries, documents()))
    instructions = "amx_bf16" if has_instructions else None
    monkeypatch.setattr(session, "bf16_instructions", lambda: instructions)
    monkeypatch.setattr(placement, "MIN_BF16_HIDDEN_DIM", 1)
    lines = []
    mine({**options, "torch_dtype": asked, "scores": True}, log=lines.append)
    (line,) = [line for line in lines if "vectors are computed in" in line]
    assert f"computed in {named}" in line and "stored as float32" in line
    rows = read_jsonl(Path(options["output_path"]))
    actual = np.concatenate([row["positive_scores"] for row in rows])
    error = np.abs(actual - expected_scores).max()
    assert error < (2e-2 if is_half else 1e-5)
    assert (error > 1e-4) == is_half


def test_short_vectors(options):
    rows, _ = run(options, scores=True)
    short, _ = run(options, vector_dtype="float16", scores=True)
    num_equal = 0
    for row, other in zip(rows, short, strict=True):
        scores = pytest.approx(other["positive_scores"], abs=2e-3)
        assert row["positive_scores"] == scores
        num_equal += row["negatives"] == other["negatives"]
    assert num_equal > 5


def test_the_threshold_is_calibrated(tmp_path):
    """Queries with two positives of nearly equal score: without a threshold the hidden one would be mined."""
    rows = [pair(text, [f"{text} red", f"{text} blue"]) for text in documents()[:60]]
    options = small(
        tmp_path, rows, num_negatives=4, threshold="auto", max_false_negative_rate=0.02
    )
    _, result = run(options)
    assert result.calibration.rate_without > 0.1
    assert result.calibration.rate <= 0.02
    assert result.limits.relative_margin > 0.0
    single = [pair(row["query"], row["positive"][0]) for row in rows]
    write_jsonl(tmp_path / "rows.jsonl", single)
    _, result = run(options)
    assert result.limits.max_score is not None
    write_jsonl(tmp_path / "rows.jsonl", single[:5])
    with pytest.raises(UserError, match="5 are too few"):
        run(options)


@pytest.mark.parametrize(
    "changes, option",
    [
        ({"sampling": "tops"}, "sampling .* 'tops', did you mean 'top'"),
        ({"top_k": 3}, "top_k: 3 .*skip_first . num_negatives: 0 . 4"),
        ({"output_path": "x.csv"}, "output_path: x.csv must end in .jsonl or"),
        ({"query_id_field": "nope"}, "query_id_field: nope"),
        ({"corpus_path": None, "qrels_path": "q.tsv"}, "qrels_path: q.tsv .* has none"),
    ],
)
def test_mistakes_name_the_option(options, changes, option):
    with pytest.raises(UserError, match=option):
        mine({**options, **changes})


def test_scores_are_read_by_training(options, tmp_path):
    """Negatives of several columns keep their scores in the order in which they are read."""
    before = {"neg": ["first"], "negative_1": "second", "neg_scores": [0.5, 0.5]}
    rows = [row | before for row in rows_in(options)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    built, _ = run(options, scores=True)
    examples = training_examples(tmp_path / "mined.jsonl")
    for example, row in zip(examples, built, strict=True):
        texts_before = [item.text for item in example.negatives[:2]]
        assert texts_before == ["first", "second"]
        num_negatives = len(row["negatives"])
        assert len(example.negative_scores) == len(example.negatives) == num_negatives
        assert len(example.scores) == 1
    run(options)
    assert len(training_examples(tmp_path / "mined.jsonl")) == 40


def test_an_index_of_the_same_documents_in_another_order_is_not_used(options, tmp_path):
    options = {**options, "model_name": "bm25", "relative_margin": None}
    run(options)
    other_order = corpus_of(documents())[::-1]
    write_jsonl(Path(options["corpus_path"]), other_order)
    again, _ = run(options)
    afresh, _ = run(options, output_path=str(tmp_path / "afresh.jsonl"))
    assert again == afresh


def test_other_queries_with_the_same_positives_are_searched_for_anew(tmp_path):
    options = {**write_data(tmp_path), "work_dir": str(tmp_path / "work")}
    run(options)
    rows = pairs_of(documents()[:NUM_ROWS])
    for row in rows:
        row["query"] = row["positive"].partition(" ")[2]
    write_jsonl(tmp_path / "train.jsonl", rows)
    assert_same_rows(run(options)[0], run(options, work_dir=str(tmp_path / "empty"))[0])


@pytest.mark.parametrize("value", ["lone \ud800", 2**70])
def test_columns_that_parquet_cannot_hold(options, tmp_path, value):
    rows = rows_in(options)
    rows[3]["note"] = value
    write_jsonl(tmp_path / "train.jsonl", rows)
    assert run(options)[0][3]["note"] == value
    with pytest.raises(UserError, match=r"Parquet cannot hold .*: write \.jsonl"):
        run(options, output_path=str(tmp_path / "mined.parquet"))
