"""task: rerank through the real command: trained, evaluated, saved, loaded by others, resumed, refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from sentence_transformers import CrossEncoder
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    XLMRobertaForSequenceClassification,
)

import vembed
from tests.built import described
from tests.commands import command
from tests.tiny import (
    shared,
    texts,
    tiny_bert,
    tiny_distilbert,
    tiny_modernbert,
    tiny_qwen3,
    tiny_qwen3_reranker,
    tiny_reranker,
    tiny_roberta,
    tiny_xlmr,
)
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.data.features import ANSWER_END, ANSWER_PROMPT, PairFeaturiser
from vembed.errors import UserError
from vembed.models.families.description import RERANK_INSTRUCTION
from vembed.saving.card import FOLDER_IN_CALLS


def tiny_xlmr_reranker(folder):
    """As bge-reranker is published: an XLM-R with one label."""
    torch.manual_seed(0)
    model = XLMRobertaForSequenceClassification.from_pretrained(
        shared(tiny_xlmr), num_labels=1
    )
    torch.nn.init.normal_(model.classifier.dense.weight, std=0.3)
    torch.nn.init.normal_(model.classifier.out_proj.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(shared(tiny_xlmr)).save_pretrained(folder)
    return folder


PAIRS = [("red cat", "a red cat sleeps"), ("blue dog", "a red cat sleeps")]


def written(folder, *, rows=24):
    words = texts(4 * rows, seed=5, longest=12)
    lines = []
    for row in range(rows):
        query, positive, *negatives = words[4 * row : 4 * row + 4]
        record = {"query": query, "positive": positive, "negatives": negatives}
        lines.append(json.dumps(record) + "\n")
    path = folder / "train.jsonl"
    path.write_text("".join(lines))
    return path


def trained(folder, model, **options):
    config = {
        "model_name": str(model),
        "task": "rerank",
        "data_path": str(written(folder)),
        "output_dir": str(folder / "out"),
        "loss": "infonce",
        "batch_size": 8,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "mixed_precision": "no",
        "report_to": [],
        **options,
    }
    return vembed.train(config).model_dir


@pytest.mark.parametrize(
    "make", [tiny_reranker, tiny_bert, tiny_distilbert, tiny_roberta, tiny_modernbert]
)
def test_a_trained_encoder_loads_in_cross_encoder(make, tmp_path):
    final = trained(tmp_path, shared(make))
    scores = vembed.Reranker(final).predict(PAIRS)
    other = CrossEncoder(str(final), device="cpu")
    expected = other.predict(PAIRS, activation_fn=torch.nn.Identity())
    assert np.abs(scores - expected).max() < 1e-5
    assert scores[0] != scores[1]


def answer_scores(folder, document_prompt=""):
    """Return the scores of PAIRS as Qwen3-Reranker's page computes them in Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    scores = []
    for query, document in PAIRS:
        question = f"<Instruct>: {RERANK_INSTRUCTION}\n<Query>: {query}"
        ids = []
        for part in (
            ANSWER_PROMPT,
            f"{question}\n<Document>: {document_prompt}{document}",
            ANSWER_END,
        ):
            ids += tokenizer.encode(part, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(float(logits[yes] - logits[no]))
    return scores


def test_a_trained_decoder_loads_as_it_was_published(tmp_path):
    model = shared(tiny_qwen3_reranker)
    expected = answer_scores(model)
    assert vembed.Reranker(model).predict(PAIRS) == pytest.approx(expected, abs=1e-5)
    prompts = {"document_prompt": 'a "document": '}
    final = trained(tmp_path, model, max_length=512, **prompts)
    expected = answer_scores(final, **prompts)
    assert vembed.Reranker(final).predict(PAIRS) == pytest.approx(expected, abs=1e-5)
    scores = CrossEncoder(str(final), device="cpu").predict(PAIRS)
    assert torch.logit(torch.tensor(scores)).tolist() == pytest.approx(
        expected, abs=1e-4
    )


def classifier_scores(folder):
    """Return the logits of PAIRS in Transformers, as FlagEmbedding's page computes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = tokenizer(PAIRS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits[:, 0].tolist()


def as_cross_encoder(folder):
    """Save a reranker as Sentence Transformers 6 does."""
    target = folder.with_name(folder.name + "-saved")
    CrossEncoder(str(folder), device="cpu").save_pretrained(str(target))
    return target


def as_older_cross_encoder(folder):
    """Save a reranker as Sentence Transformers 2 to 5 did: settings in config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["sbert_ce_default_activation_function"] = "torch.nn.modules.linear.Identity"
    config["sentence_transformers"] = {"version": "4.1.0"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layout", [Path, as_cross_encoder, as_older_cross_encoder])
@pytest.mark.parametrize("make", [tiny_reranker, tiny_xlmr_reranker])
def test_published_classifiers_are_read(make, layout, tmp_path):
    folder = layout(make(tmp_path / "published"))
    expected = classifier_scores(folder)
    assert vembed.Reranker(folder).predict(PAIRS) == pytest.approx(expected, abs=1e-5)
    final = trained(tmp_path, folder, learning_rate=1e-12)
    assert vembed.Reranker(final).predict(PAIRS) == pytest.approx(expected, abs=1e-5)


def test_a_published_decoder_in_the_layout_of_cross_encoder(tmp_path):
    model = tiny_qwen3_reranker(tmp_path / "published")
    expected = answer_scores(model)
    saved = as_cross_encoder(model)
    assert vembed.Reranker(saved).predict(PAIRS) == pytest.approx(expected, abs=1e-5)


def test_a_decoder_with_a_new_label(tmp_path):
    final = trained(tmp_path, shared(tiny_qwen3), reranker_head="label")
    names = json.loads((final / "config.json").read_text())["architectures"]
    assert names == ["Qwen3ForSequenceClassification"]
    scores = vembed.Reranker(final).predict(PAIRS)
    assert np.isfinite(scores).all()


def test_it_is_evaluated_on_the_first_stage(tmp_path, capfd):
    pytest.importorskip("bm25s")
    options = {"val_data_path": str(written(tmp_path)), "rerank_top_k": 5}
    config_steps = {"eval_steps": 1, "eval_metric": "mrr@10"}
    final = trained(tmp_path, shared(tiny_reranker), **options, **config_steps)
    lines = (final.parent / "metrics.jsonl").read_text().splitlines()
    scored = [json.loads(line)["eval"] for line in lines if '"eval"' in line]
    first = {line["first_stage/ndcg@10"] for line in scored}
    assert len(first) == 1, "the first stage stays the same in all evaluations"
    assert 0.0 < first.pop() <= 1.0
    printed = capfd.readouterr().out
    first_score = scored[0]["first_stage/mrr@10"]
    assert printed.count(f"first stage {first_score:.4f})") == len(scored)
    assert len({line["ndcg@10"] for line in scored}) > 1


def test_a_run_file_is_the_first_stage(tmp_path):
    """Of ids and of texts: the relevant document is the second of each query's."""
    words = texts(16, seed=8, longest=12)
    queries = words[:8]
    documents = words[8:]
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    corpus_lines = []
    query_lines = []
    qrels = ["query-id\tcorpus-id\tscore\n"]
    run_of_ids = ["other Q0 d0 1 1.0 bm25\n"]
    run_of_texts = []
    for row in range(8):
        corpus_lines.append(
            json.dumps({"_id": f"d{row}", "text": documents[row]}) + "\n"
        )
        query_lines.append(json.dumps({"_id": f"q{row}", "text": queries[row]}) + "\n")
        qrels.append(f"q{row}\td{row}\t1\n")
        wrong = (row + 1) % 8
        # By score, not by place in the file.
        run_of_ids.append(f"q{row} Q0 d{row} 2 0.5 bm25\n")
        run_of_ids.append(f"q{row} Q0 d{wrong} 1 0.9 bm25\n")
        ranking = [documents[wrong], documents[row]]
        line = json.dumps({"query": queries[row], "documents": ranking})
        run_of_texts.append(line + "\n")
    (beir / "corpus.jsonl").write_text("".join(corpus_lines))
    (beir / "queries.jsonl").write_text("".join(query_lines))
    (beir / "qrels" / "dev.tsv").write_text("".join(qrels))
    (tmp_path / "run.trec").write_text("".join(run_of_ids))
    (tmp_path / "run.jsonl").write_text("".join(run_of_texts))
    for name in ("run.trec", "run.jsonl"):
        options = {"val_data_path": str(beir), "overwrite": True}
        options["first_stage"] = str(tmp_path / name)
        final = trained(tmp_path, shared(tiny_reranker), max_steps=1, **options)
        line = (final.parent / "metrics.jsonl").read_text().splitlines()[-1]
        scores = json.loads(line)["eval"]
        assert scores["first_stage/ndcg@10"] == pytest.approx(1 / np.log2(3), abs=1e-6)
        assert scores["recall@10"] == 1.0
    (tmp_path / "run.trec").write_text("q0 Q0 d9 1 1.0 bm25\n")
    with pytest.raises(UserError, match=r"run\.trec: 'd9'"):
        options["first_stage"] = str(tmp_path / "run.trec")
        trained(tmp_path, shared(tiny_reranker), **options)


def test_a_new_layer_of_the_score_has_a_higher_learning_rate(tmp_path):
    logs = []
    for model in (tiny_bert, tiny_reranker):
        options = {"learning_rate": "auto", "max_steps": 1}
        options["output_dir"] = str(tmp_path / model.__name__)
        final = trained(tmp_path, shared(model), **options)
        logs.append((final.parent / "training_log.txt").read_text())
    assert "head_learning_rate: " in logs[0]
    assert "head_learning_rate" not in logs[1]


def test_card_and_report_are_those_of_a_reranker(tmp_path):
    data = {"val_data_path": str(written(tmp_path, rows=8))}
    final = trained(tmp_path, shared(tiny_reranker), max_steps=1, **data)
    card = (final / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["pipeline_tag"] == "text-ranking"
    assert "mbedding" not in card
    usage = card.partition("\n## Usage\n")[2].partition("\n## ")[0]
    for call in re.findall(r"```python\n(.*?)\n```", usage, re.DOTALL):
        exec(call.replace(FOLDER_IN_CALLS, str(final)), {})
    lines = (final.parent / "report.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith("| nDCG@10"))
    # First stage, before, after and the change.
    scores = [float(cell) for cell in row.strip("| ").split("|")[1:5]]
    last = (final.parent / "metrics.jsonl").read_text().splitlines()[-1]
    actual = json.loads(last)["eval"]["first_stage/ndcg@10"]
    assert scores[0] == pytest.approx(actual, abs=1e-4)
    assert "SentenceTransformer(" not in "".join(lines)


def test_it_resumes_bit_by_bit(tmp_path):
    model = shared(tiny_reranker, dropout=0.1)
    whole = trained(tmp_path, model, max_steps=4, save_steps=2)
    scores = vembed.Reranker(whole).predict(PAIRS)
    shutil.rmtree(whole)
    shutil.rmtree(whole.parent / "checkpoint-4")
    again = trained(tmp_path, model, max_steps=4, save_steps=2, resume=True)
    assert vembed.Reranker(again).predict(PAIRS).tolist() == scores.tolist()


def test_documents_are_ranked(tmp_path):
    reranker = vembed.Reranker(shared(tiny_reranker))
    documents = texts(5, seed=9)
    ranking = reranker.rank("a query", documents, top_k=3)
    scores = [row["score"] for row in ranking]
    assert scores == sorted(scores, reverse=True)
    for row in ranking:
        assert row["text"] == documents[row["index"]]
        alone = reranker.predict([("a query", row["text"])])[0]
        assert row["score"] == pytest.approx(float(alone), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "cosent"}, "cosent"),
        ({"mrl_dims": [8]}, "mrl_dims"),
        ({"similarity": "dot"}, "similarity"),
        ({"pooling": "mean"}, "pooling"),
        ({"max_pixels": 10000}, "max_pixels"),
        ({"auxiliary_losses": {"next_token": 1.0}}, "auxiliary_losses"),
        ({"quantize_embeddings": "int8"}, "quantize_embeddings"),
        ({"mine": {"every_epochs": 1}}, "mine"),
        ({"hard_negatives_scope": "own"}, "hard_negatives_scope"),
        ({"same_side_negatives": "both"}, "same_side_negatives"),
        (
            {
                "losses": [
                    {"loss": "kl", "teacher": "scores", "distill_candidates": "batch"}
                ]
            },
            "distill",
        ),
        ({"bidirectional": True}, "bidirectional"),
        ({"task": "embed", "rerank_top_k": 5}, "rerank_top_k"),
        ({"task": "embed", "in_batch_negatives": 5}, "in_batch_negatives"),
        ({"reranker_head": "answer"}, "reranker_head"),
    ],
)
def test_what_does_not_go_with_it_is_named(options, named, tmp_path):
    with pytest.raises(UserError, match=named):
        trained(tmp_path, shared(tiny_reranker), **options)


def test_an_embedding_model_is_no_reranker():
    with pytest.raises(UserError, match="no layer that gives a score"):
        vembed.Reranker(shared(tiny_bert))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_score_as_one(strategy, tmp_path):
    model = str(shared(tiny_qwen3_reranker))
    documents = texts(5, seed=2)
    lists = tmp_path / "lists.jsonl"
    records = [{"query": "red", "documents": documents[:count]} for count in (5, 1)]
    lists.write_text("".join(json.dumps(record) + "\n" for record in records))
    shares = ["--nproc", "2", "--strategy", strategy]
    result = command("rerank", model, str(lists), *shares)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 2
    reranker = vembed.Reranker(model)
    for row, record in zip(rows, records, strict=True):
        expected = reranker.rank("red", record["documents"])
        assert [entry["index"] for entry in row["results"]] == [
            entry["index"] for entry in expected
        ]
    pairs = written(tmp_path, rows=3)
    result = command("score", model, str(pairs), *shares)
    assert result.returncode == 0, result.stderr
    asked = []
    for line in pairs.read_text().splitlines():
        record = json.loads(line)
        for document in (record["positive"], *record["negatives"]):
            asked.append((record["query"], document))
    scores = [float(line) for line in result.stdout.splitlines()]
    assert scores == pytest.approx(reranker.predict(asked).tolist(), abs=1e-5)


def test_a_checkpoint_is_exported(tmp_path):
    model = shared(tiny_qwen3_reranker)
    options = {"use_lora": True, "max_length": 512, "save_steps": 2, "max_steps": 2}
    final = trained(tmp_path, model, **options)
    checkpoint = str(final.parent / "checkpoint-2")
    result = command("export", checkpoint, str(tmp_path / "model"))
    assert result.returncode == 0, result.stderr
    scores = vembed.Reranker(tmp_path / "model").predict(PAIRS)
    assert scores == pytest.approx(vembed.Reranker(final).predict(PAIRS), abs=1e-6)


def first_loss(folder, data, teacher):
    """Return the loss of the first step of an embedding model that the real command trains with this teacher."""
    config = {
        "model_name": str(shared(tiny_bert)),
        "data_path": str(data),
        "output_dir": str(folder / "out"),
        "losses": [{"loss": "kl", "teacher": teacher, "temperature": 0.1}],
        "batch_size": 8,
        "max_steps": 1,
        "logging_steps": 1,
        "mixed_precision": "no",
        "report_to": [],
    }
    folder.mkdir()
    path = folder / "cfg.yaml"
    path.write_text(yaml.safe_dump(config))
    result = command("train", str(path))
    assert result.returncode == 0, result.stderr
    assert (folder / "out" / "final" / "config.json").is_file()
    metrics = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(metrics[0])["loss"])


def test_a_reranker_takes_as_many_tokens_as_asked_for(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(shared(tiny_qwen3_reranker), model)
    path = model / "tokenizer_config.json"
    # Published decoders have no limit of their own, and the default one bounds the memory of training.
    settings = json.loads(path.read_text()) | {"model_max_length": int(1e30)}
    path.write_text(json.dumps(settings))
    default = vembed.Reranker(model)
    longer = vembed.Reranker(model, max_length=1000)
    assert default.description.max_length < longer.description.max_length == 1000
    document = "green " * 900
    score = default.predict([("red", document + "red")])
    longer_score = longer.predict([("red", document + "red")])
    assert not np.array_equal(score, longer_score)
    # More tokens than the model has positions are cut to them.
    positions = json.loads((model / "config.json").read_text())
    longest = vembed.Reranker(model, max_length=100_000).description.max_length
    assert longest == positions["max_position_embeddings"]


def test_a_decoder_teaches_an_embedding_model(tmp_path):
    teacher = shared(tiny_qwen3_reranker)
    data = written(tmp_path)
    reranker = vembed.Reranker(teacher)
    lines = []
    for line in data.read_text().splitlines():
        record = json.loads(line)
        documents = [record["positive"], *record["negatives"]]
        scores = reranker.predict([(record["query"], text) for text in documents])
        record["positive_scores"] = float(scores[0])
        record["negative_scores"] = scores[1:].tolist()
        lines.append(json.dumps(record) + "\n")
    scored = tmp_path / "scored.jsonl"
    scored.write_text("".join(lines))
    loss = first_loss(tmp_path / "model", data, str(teacher))
    # Its scores, written to the data, teach the same.
    expected = first_loss(tmp_path / "scores", scored, "scores")
    assert loss == pytest.approx(expected, rel=1e-5)
    assert loss > 1e-3


def test_data_counts_pairs(tmp_path):
    config = {
        "model_name": str(shared(tiny_qwen3_reranker)),
        "task": "rerank",
        "data_path": str(written(tmp_path)),
        "output_dir": str(tmp_path / "out"),
        "loss": "bce",
        "max_length": 512,
        "max_negatives": 1,
        "batch_size": 8,
        "max_steps": 3,
    }
    path = tmp_path / "cfg.yaml"
    path.write_text(yaml.safe_dump(config))
    featuriser = PairFeaturiser(described(TrainConfig(**config)))
    lengths = []
    for line in (tmp_path / "train.jsonl").read_text().splitlines():
        record = json.loads(line)
        for document in (record["positive"], record["negatives"][0]):
            pair = (Item(record["query"]), Item(document))
            (feature,) = featuriser.features([pair])
            lengths.append(feature.length)
    target = tmp_path / "data.json"
    result = command("data", str(path), "--json", str(target))
    assert result.returncode == 0, result.stderr
    figures = json.loads(target.read_text())["lengths"]
    assert list(figures) == ["pairs"]
    assert figures["pairs"]["measured"] == len(lengths)
    assert figures["pairs"]["longest"] == max(lengths)


def test_lists_are_sorted_by_the_command(tmp_path):
    documents = texts(4, seed=2)
    lists = tmp_path / "lists.jsonl"
    lists.write_text(json.dumps({"query": "a query", "documents": documents}) + "\n")
    target = tmp_path / "sorted.jsonl"
    model = str(shared(tiny_reranker))
    words = ["rerank", model, str(lists), "-o", str(target)]
    result = command(*words, "--top-k", "2")
    assert result.returncode == 0, result.stderr
    (row,) = map(json.loads, target.read_text().splitlines())
    expected = vembed.Reranker(model).rank("a query", documents, top_k=2)
    assert [entry["text"] for entry in row["results"]] == [
        entry["text"] for entry in expected
    ]
    lists.write_text('{"query": "a query"}\n')
    result = command(*words)
    assert result.returncode != 0
    assert "lists.jsonl, line 1" in result.stderr
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"query": "a query", "positive": documents[0]}) + "\n")
    result = command("score", model, str(pairs))
    score = vembed.Reranker(model).predict([("a query", documents[0])])[0]
    assert float(result.stdout) == pytest.approx(float(score), abs=1e-5)


def test_inputs_that_are_no_pairs_are_named():
    reranker = vembed.Reranker(shared(tiny_reranker))
    with pytest.raises(UserError, match=r"pairs\[1\] is 'ab'"):
        reranker.predict([PAIRS[0], "ab"])
    with pytest.raises(UserError, match="type int"):
        reranker.predict([("red cat", 7)])
    with pytest.raises(UserError, match="documents is one text"):
        reranker.rank("red cat", "a red cat sleeps")
