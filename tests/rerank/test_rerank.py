"""task: rerank through the real command: trained, evaluated, saved, loaded by others, resumed, refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from sentence_transformers import CrossEncoder
from tokenizers.processors import TemplateProcessing
from transformers import (
    AlbertForSequenceClassification,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CanineForSequenceClassification,
    Gemma2ForCausalLM,
    GraniteForCausalLM,
    LongformerForSequenceClassification,
    PhiForCausalLM,
    Qwen3Model,
    Qwen3MoeForCausalLM,
    XLMRobertaForSequenceClassification,
)

import vembed
from tests.built import described
from tests.commands import command, invoke
from tests.data.files import read_jsonl, text_records, write_beir, write_jsonl
from tests.tiny import (
    change_json,
    read_json,
    shared,
    texts,
    tiny_answering,
    tiny_bert,
    tiny_bert_st,
    tiny_distilbert,
    tiny_llama,
    tiny_modernbert,
    tiny_qwen3,
    tiny_qwen3_reranker,
    tiny_reranker,
    tiny_roberta,
    tiny_xlmr,
    write_json,
)
from tests.tiny_tokenizers import llama_tokenizer
from tests.training.test_run import log_text, metrics
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.data.features import ANSWER_END, ANSWER_PROMPT, PairFeaturiser
from vembed.errors import UserError
from vembed.models.families.description import RERANK_INSTRUCTION
from vembed.models.families.model_files import ANSWER_SETTINGS
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


def written(folder, rows=24):
    path = folder / "train.jsonl"
    write_jsonl(path, text_records(rows, num_negatives=2))
    return path


def run_config(folder, model, **options):
    """A run of a few steps, on texts unless `data_path` names other data."""
    if "data_path" not in options:
        options["data_path"] = str(written(folder))
    return {
        "model_name": str(model),
        "task": "rerank",
        "output_dir": str(folder / "out"),
        "loss": "infonce",
        "batch_size": 8,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "mixed_precision": "no",
        "report_to": [],
        **options,
    }


def trained(folder, model, **options):
    """Train such a run; return the model's folder."""
    return vembed.train(run_config(folder, model, **options)).model_dir


def evaluations(final):
    return metrics(final.parent, "eval")


def succeeds(*words):
    """Run a command; return its standard output."""
    return command(*map(str, words), code=0).stdout


def scores_of(model):
    return vembed.Reranker(model).predict(PAIRS)


def tiny_llama_ending_in_padding(folder):
    """As gte-Qwen2: the tokenizer ends pairs with its padding token."""
    tiny_llama(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A $B </s>",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    tokenizer.save_pretrained(folder)
    return folder


def tiny_albert(folder):
    """Its pooler is a linear layer, whose activation the model has."""
    return tiny_reranker(folder, AlbertForSequenceClassification, embedding_size=8)


LABELLED = [
    (tiny_reranker, {}),
    (tiny_albert, {}),
    (tiny_bert, {}),
    (tiny_distilbert, {}),
    (tiny_roberta, {}),
    (tiny_modernbert, {}),
    # Without a padding token in its config.
    (tiny_llama, {"reranker_head": "label", "use_lora": True}),
    (tiny_llama_ending_in_padding, {"reranker_head": "label"}),
]


@pytest.mark.parametrize(("make", "options"), LABELLED)
def test_a_trained_label_loads_in_cross_encoder(make, options, tmp_path):
    final = trained(tmp_path, shared(make), **options)
    scores = scores_of(final)
    other = CrossEncoder(str(final), device="cpu")
    expected = other.predict(PAIRS, activation_fn=torch.nn.Identity())
    assert np.abs(scores - expected).max() < 1e-5
    assert scores[0] != scores[1]


def answer_scores(
    folder, pairs=PAIRS, instruction=RERANK_INSTRUCTION, document_prompt=""
):
    """Return the scores of pairs as Qwen3-Reranker's page computes them in Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    scores = []
    for query, document in pairs:
        question = f"<Instruct>: {instruction}\n<Query>: {query}"
        question += f"\n<Document>: {document_prompt}{document}"
        ids = []
        for part in (ANSWER_PROMPT, question, ANSWER_END):
            ids += tokenizer.encode(part, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(float(logits[yes] - logits[no]))
    return scores


def test_a_trained_decoder_loads_as_it_was_published(tmp_path):
    prompts = {"document_prompt": 'a "document": '}
    model = shared(tiny_qwen3_reranker)
    final = trained(tmp_path, model, max_length=512, **prompts)
    expected = answer_scores(final, **prompts)
    assert scores_of(final) == pytest.approx(expected, abs=1e-5)
    scores = CrossEncoder(str(final), device="cpu").predict(PAIRS)
    logits = torch.logit(torch.tensor(scores)).tolist()
    assert logits == pytest.approx(expected, abs=1e-4)
    # The lower limit holds: that of the call, or that of the training.
    for asked, limit in ((256, 256), (1000, 512)):
        reranker = vembed.Reranker(final, max_length=asked)
        assert reranker.description.max_length == limit


def classifier_scores(folder, pairs=PAIRS):
    """Return the logits of pairs in Transformers, as FlagEmbedding's page computes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = tokenizer(pairs, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits[:, 0].tolist()


def as_cross_encoder(folder):
    """Save a reranker as Sentence Transformers 6 does."""
    target = folder.with_name(folder.name + "-saved")
    CrossEncoder(str(folder), device="cpu").save_pretrained(str(target))
    return target


def as_older_cross_encoder(folder):
    """Save a reranker as Sentence Transformers 2 to 5 did: settings in config.json."""
    activation = "torch.nn.modules.linear.Identity"
    change_json(
        folder / "config.json",
        sbert_ce_default_activation_function=activation,
        sentence_transformers={"version": "4.1.0"},
    )
    return folder


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (tiny_xlmr_reranker, Path),
        (tiny_reranker, as_cross_encoder),
        (tiny_reranker, as_older_cross_encoder),
    ],
)
def test_published_classifiers_are_read(make, layout, tmp_path):
    folder = layout(make(tmp_path / "published"))
    expected = classifier_scores(folder)
    assert scores_of(folder) == pytest.approx(expected, abs=1e-5)
    final = trained(tmp_path, folder, learning_rate=1e-12)
    assert scores_of(final) == pytest.approx(expected, abs=1e-5)
    # With or without the logistic function, as it was published.
    scores = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    saved = CrossEncoder(str(final), device="cpu").predict(PAIRS)
    assert saved == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("layout", [Path, as_cross_encoder])
def test_published_decoders_are_read(layout, tmp_path):
    model = tiny_qwen3_reranker(tmp_path / "published")
    expected = answer_scores(model)
    assert scores_of(layout(model)) == pytest.approx(expected, abs=1e-5)


def test_questions_of_published_decoders(tmp_path):
    """The tokens of the answers are read. A question that differs from vembed's is refused."""
    folder = tmp_path / "published"
    shutil.copytree(trained(tmp_path, shared(tiny_qwen3_reranker)), folder)
    (folder / "vembed.json").unlink()
    change_json(folder / ANSWER_SETTINGS, true_token_id=20, false_token_id=21)
    identity = torch.nn.Identity()
    expected = CrossEncoder(str(folder), device="cpu").predict(
        PAIRS, activation_fn=identity
    )
    assert scores_of(folder) == pytest.approx(expected, abs=1e-5)
    prompts = {"prompts": {"ask": "Is it red?"}, "default_prompt_name": "ask"}
    change_json(folder / "config_sentence_transformers.json", **prompts)
    asked = CrossEncoder(str(folder), device="cpu").predict(
        PAIRS, activation_fn=identity
    )
    assert scores_of(folder) == pytest.approx(asked, abs=1e-5)
    assert np.abs(asked - expected).max() > 1e-3
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("Judge", "Say"))
    with pytest.raises(UserError, match=r"chat template asks '.*Say"):
        vembed.Reranker(folder)
    # Without files of CrossEncoder, the tokenizer tells that it is of another kind.
    other = tiny_qwen3_reranker(tmp_path / "other")
    tokenizer = llama_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match=r"no token <\|im_start\|>"):
        vembed.Reranker(other)


def test_what_a_published_decoder_is_asked_is_said(tmp_path, caplog):
    """Its chat template tells a model of Qwen2. Without one nothing is known."""
    folder = tiny_qwen3_reranker(tmp_path / "published")
    vembed.Reranker(folder, query_prompt="Is it red?")
    (warning,) = [record for record in caplog.records if "question" in record.msg]
    assert warning.levelname == "WARNING" and "Is it red?" in warning.getMessage()
    template = folder / "chat_template.jinja"
    template.write_text("<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n")
    with pytest.raises(UserError, match="chat template has no <think>"):
        vembed.Reranker(folder)
    template.write_text(template.read_text() + "<think>\n\n</think>\n\n")
    vembed.Reranker(folder)


def test_the_prompt_of_a_published_classifier_is_read(tmp_path):
    prompts = {"prompts": {"ask": "red green "}, "default_prompt_name": "ask"}
    model = CrossEncoder(str(shared(tiny_reranker)), device="cpu", **prompts)
    model.save_pretrained(str(tmp_path / "published"))
    expected = model.predict(PAIRS, activation_fn=torch.nn.Identity())
    assert scores_of(tmp_path / "published") == pytest.approx(expected, abs=1e-5)
    succeeds("export", tmp_path / "published", tmp_path / "copy")
    copy = CrossEncoder(str(tmp_path / "copy"), device="cpu")
    scores = copy.predict(PAIRS, activation_fn=torch.nn.Identity())
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_decoder_with_a_new_label(tmp_path):
    final = trained(tmp_path, shared(tiny_qwen3), reranker_head="label")
    names = read_json(final / "config.json")["architectures"]
    assert names == ["Qwen3ForSequenceClassification"]
    assert np.isfinite(scores_of(final)).all()


def test_it_is_evaluated_on_the_first_stage(tmp_path, capfd):
    pytest.importorskip("bm25s")
    final = trained(
        tmp_path,
        shared(tiny_reranker),
        val_data_path=str(written(tmp_path)),
        rerank_top_k=5,
        eval_steps=1,
        eval_metric="mrr@10",
    )
    scored = evaluations(final)
    (first,) = {scores["first_stage/ndcg@10"] for scores in scored}
    assert 0.0 < first <= 1.0
    printed = capfd.readouterr().out
    first = scored[0]["first_stage/mrr@10"]
    assert printed.count(f"first stage {first:.4f})") == len(scored)
    assert len({scores["ndcg@10"] for scores in scored}) > 1


def test_a_run_file_is_the_first_stage(tmp_path):
    """Of ids and of texts: the relevant document is the second of each query's, behind a wrong one. The document that
    equals the query does not count."""
    beir = tmp_path / "beir"
    records = text_records(8)
    corpus = {}
    queries = {}
    relevant = {}
    rankings = []
    run = "other Q0 d0 1 1.0 bm25\n"
    for row, record in enumerate(records):
        wrong = (row + 1) % 8
        corpus[f"d{row}"] = record["positive"]
        corpus[f"same{row}"] = record["query"]
        queries[f"q{row}"] = record["query"]
        relevant[f"q{row}"] = [f"d{row}"]
        # By score, not by place in the file.
        run += f"q{row} Q0 d{row} 2 0.5 bm25\nq{row} Q0 d{wrong} 1 0.9 bm25\n"
        run += f"q{row} Q0 same{row} 0 1.0 bm25\n"
        ranking = [record["query"], records[wrong]["positive"], record["positive"]]
        rankings.append({"query": record["query"], "documents": ranking})
    write_beir(beir, corpus, queries, relevant)
    (tmp_path / "run.trec").write_text(run)
    (tmp_path / "bad.trec").write_text("q0 Q0 d9 1 1.0 bm25\n")
    write_jsonl(tmp_path / "run.jsonl", rankings)

    def scores_with(name):
        options = {"val_data_path": str(beir), "first_stage": str(tmp_path / name)}
        model = shared(tiny_reranker)
        final = trained(tmp_path, model, max_steps=1, overwrite=True, **options)
        return evaluations(final)[-1]

    for name in ("run.trec", "run.jsonl"):
        scores = scores_with(name)
        assert scores["first_stage/ndcg@10"] == pytest.approx(1 / np.log2(3), abs=1e-6)
        assert scores["recall@10"] == 1.0
    with pytest.raises(UserError, match=r"bad\.trec: 'd9'"):
        scores_with("bad.trec")


def test_an_embedder_as_first_stage_keeps_as_many_dimensions_as_its_folder_says(
    tmp_path,
):
    folder = tiny_bert_st(tmp_path / "embedder")
    change_json(folder / "config_sentence_transformers.json", truncate_dim=2)
    records = text_records(20)
    queries = [record["query"] for record in records]
    documents = [record["positive"] for record in records]
    write_beir(
        tmp_path / "beir",
        {f"d{row}": document for row, document in enumerate(documents)},
        {f"q{row}": query for row, query in enumerate(queries)},
        {f"q{row}": [f"d{row}"] for row in range(20)},
    )
    final = trained(
        tmp_path,
        shared(tiny_reranker),
        max_steps=1,
        val_data_path=str(tmp_path / "beir"),
        first_stage=str(folder),
    )
    embedder = vembed.Embedder(folder)
    options = {"truncate_dim": 2, "normalize": True}
    similarities = (
        embedder.encode_query(queries, **options)
        @ embedder.encode_document(documents, **options).T
    )
    is_better = similarities > similarities.diagonal()[:, None]
    ranks = is_better.sum(1)
    expected = np.where(ranks < 10, 1 / (1 + ranks), 0).mean()
    scores = evaluations(final)[-1]
    assert scores["first_stage/mrr@10"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("make", "is_new"), [(tiny_bert, True), (tiny_reranker, False)]
)
def test_a_new_layer_of_the_score_has_a_higher_learning_rate(make, is_new, tmp_path):
    final = trained(tmp_path, shared(make), learning_rate="auto", max_steps=1)
    log = log_text(final.parent)
    assert ("head_learning_rate" in log) == is_new


def test_card_and_report_are_those_of_a_reranker(tmp_path):
    data = str(written(tmp_path, rows=8))
    final = trained(tmp_path, shared(tiny_reranker), max_steps=1, val_data_path=data)
    card = (final / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["pipeline_tag"] == "text-ranking"
    assert "mbedding" not in card
    usage = card.partition("\n## Usage\n")[2].partition("\n## ")[0]
    for call in re.findall(r"```python\n(.*?)\n```", usage, re.DOTALL):
        exec(call.replace(FOLDER_IN_CALLS, str(final)), {})
    report = (final.parent / "report.md").read_text()
    (first_stage,) = re.findall(r"^\| nDCG@10 +\| +([\d.]+) ", report, re.MULTILINE)
    expected = evaluations(final)[-1]["first_stage/ndcg@10"]
    assert float(first_stage) == pytest.approx(expected, abs=1e-4)
    assert "SentenceTransformer(" not in report


def test_it_resumes_bit_by_bit(tmp_path):
    model = shared(tiny_reranker, dropout=0.1)
    whole = trained(tmp_path, model, max_steps=4, save_steps=2)
    scores = scores_of(whole)
    shutil.rmtree(whole)
    shutil.rmtree(whole.parent / "checkpoint-4")
    again = trained(tmp_path, model, max_steps=4, save_steps=2, resume=True)
    assert scores_of(again).tolist() == scores.tolist()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "cosent"}, "cosent"),
        ({"mrl_dims": [8]}, "mrl_dims"),
        ({"auxiliary_losses": {"next_token": 1.0}}, "auxiliary_losses"),
        ({"mine": {"every_epochs": 1}}, "mine"),
        ({"task": "embed", "rerank_top_k": 5}, "rerank_top_k"),
        ({"reranker_head": "answer"}, "reranker_head"),
        ({"document_prompt": "a: "}, 'set document_prompt: ""'),
    ],
)
def test_what_does_not_go_with_it_is_named(options, named, tmp_path):
    with pytest.raises(UserError, match=named):
        trained(tmp_path, shared(tiny_reranker), **options)


def test_an_embedding_model_is_no_reranker():
    with pytest.raises(UserError, match="no layer that gives a score"):
        vembed.Reranker(shared(tiny_bert))


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_commands_score_as_the_class_does(strategy, tmp_path):
    model = tiny_qwen3_reranker(tmp_path / "model")
    # Published by Sentence Transformers: only a reranker, and no encoder to train on.
    write_json(
        model / "config_sentence_transformers.json", {"model_type": "CrossEncoder"}
    )
    reranker = vembed.Reranker(model)
    options = []
    if strategy != "single":
        options = ["--nproc", 2, "--strategy", strategy]
    documents = texts(5, seed=2)
    lists = tmp_path / "lists.jsonl"
    records = [{"query": "red", "documents": documents[:count]} for count in (5, 1)]
    write_jsonl(lists, records)
    rows = succeeds("rerank", model, lists, "--top-k", 3, *options).splitlines()
    for row, record in zip(rows, records, strict=True):
        count = len(record["documents"])
        scores = reranker.predict([("red", text) for text in record["documents"]])
        best = sorted(range(count), key=lambda index: -scores[index])[:3]
        results = json.loads(row)["results"]
        assert [entry["index"] for entry in results] == best
        for entry in results:
            assert entry["text"] == documents[entry["index"]]
            assert entry["score"] == pytest.approx(scores[entry["index"]], abs=1e-5)
    pairs = written(tmp_path, rows=3)
    scores = succeeds("score", model, pairs, *options).splitlines()
    asked = []
    for record in read_jsonl(pairs):
        for document in (record["positive"], *record["negatives"]):
            asked.append((record["query"], document))
    expected = reranker.predict(asked).tolist()
    assert list(map(float, scores)) == pytest.approx(expected, abs=1e-5)


def test_lists_are_read_as_other_records_are(tmp_path):
    lists = tmp_path / "lists.jsonl"
    row = b'{"query": "red", "documents": ["a", "b"]}\n'
    lists.write_bytes(b'{"query": "red", "documents": []}\n')
    model = shared(tiny_reranker)
    assert json.loads(succeeds("rerank", model, lists))["results"] == []
    lists.write_bytes(b"\xef\xbb\xbf" + row + b"\n" + row)
    first, second = succeeds("rerank", model, lists).splitlines()
    assert first == second
    output = tmp_path / "sorted.jsonl"
    assert f"{output}: 2 lists" in invoke("rerank", model, lists, "-o", output).stderr
    for bad_line, message in (
        (b'{"query": "\xe9", "documents": ["a"]}', f"{lists}:3 is not JSON"),
        (b"query,documents", 'as {"query": "...", "documents": ["...", "..."]}'),
        (b'{"query": "a query"}', f"{lists}:3"),
        (b'{"query": "a", "documents": [{"image": 1}]}', f"{lists}:3: documents"),
    ):
        lists.write_bytes(row + b"\n" + bad_line)
        assert message in invoke("rerank", model, lists, code=2).stderr


@pytest.mark.parametrize(
    ("loss", "scores", "message"),
    [
        ("bce", {"negative_scores": [0.2]}, "the negatives alone have some"),
        ("lambda", {"negative_scores": [0.2]}, "the negatives alone have some"),
        ("listwise", {"positive_scores": [0.9]}, "0 of 8 negatives have one"),
    ],
)
def test_scores_that_would_not_be_read_are_refused(tmp_path, loss, scores, message):
    rows = tmp_path / "rows.jsonl"
    row = {"query": "red", "positive": "a", "negatives": ["b"]}
    write_jsonl(rows, [row | scores] * 8)
    options = (f"model_name={shared(tiny_reranker)}", "task=rerank", f"loss={loss}")
    words = (*options, f"data_path={rows}", f"output_dir={tmp_path / 'run'}")
    assert message in invoke("train", *words, "--dry-run", code=2).stderr


def test_a_checkpoint_is_exported(tmp_path):
    options = {"use_lora": True, "max_length": 512, "save_steps": 2, "max_steps": 2}
    final = trained(tmp_path, shared(tiny_qwen3_reranker), **options)
    succeeds("export", final.parent / "checkpoint-2", tmp_path / "model")
    assert scores_of(tmp_path / "model") == pytest.approx(scores_of(final), abs=1e-6)


def test_a_reranker_takes_as_many_tokens_as_asked_for(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(shared(tiny_qwen3_reranker), model)
    # Published decoders have no limit of their own, and the default one bounds the memory of training.
    change_json(model / "tokenizer_config.json", model_max_length=int(1e30))
    default = vembed.Reranker(model)
    longer = vembed.Reranker(model, max_length=1000)
    assert default.description.max_length < longer.description.max_length == 1000
    pair = ("red", "green " * 900 + "red")
    assert default.predict([pair]) != longer.predict([pair])
    # More tokens than the model has positions are cut to them.
    positions = read_json(model / "config.json")
    longest = vembed.Reranker(model, max_length=100_000).description.max_length
    assert longest == positions["max_position_embeddings"]


@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        (GraniteForCausalLM, {"logits_scaling": 4.0}),
        (Gemma2ForCausalLM, {"final_logit_softcapping": 30.0}),
        (PhiForCausalLM, {}),
    ],
)
def test_a_head_that_changes_its_logits_is_refused(model_class, options):
    """Logits that are scaled, capped, or have a bias."""
    model = shared(tiny_answering, model_class, **options)
    with pytest.raises(UserError, match=rf"reranker_head: .*{model_class.__name__}"):
        vembed.Reranker(model)


@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        (LongformerForSequenceClassification, {"attention_window": 4}),
        (CanineForSequenceClassification, {}),
    ],
)
def test_a_classifier_of_more_than_one_state_is_refused(model_class, options):
    """Attention from the first token to all, and a first state that the base model makes of several."""
    model = shared(tiny_reranker, model_class, **options)
    with pytest.raises(UserError, match=rf"reranker here: .*{model_class.__name__}"):
        vembed.Reranker(model)


def test_files_without_a_language_model_head_do_not_answer():
    model = shared(tiny_answering, Qwen3Model, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"reranker_head: answer needs .* head"):
        vembed.Reranker(model, head="answer")


def test_a_mixture_of_experts_answers(tmp_path):
    model = tiny_answering(tmp_path, Qwen3MoeForCausalLM, moe_intermediate_size=16)
    assert scores_of(model) == pytest.approx(answer_scores(model), abs=1e-5)


def test_a_question_that_leaves_no_room_for_texts_is_refused():
    model = shared(tiny_qwen3_reranker)
    description = vembed.Reranker(model).description
    empty = replace(description, max_length=1000)
    (row,) = PairFeaturiser(empty).features([(Item(""), Item(""))])
    with pytest.raises(UserError, match=rf"max_length: {row.length} .* {row.length} "):
        vembed.Reranker(model, max_length=row.length)
    longer = vembed.Reranker(model, max_length=row.length + 4)
    assert longer.predict([("red", "")]) != longer.predict([("big", "")])


def test_a_decoder_teaches_an_embedding_model(tmp_path):
    """Its scores, written to the data, teach the same."""
    teacher = shared(tiny_qwen3_reranker)
    data = written(tmp_path)
    reranker = vembed.Reranker(teacher)
    records = []
    for record in read_jsonl(data):
        documents = [record["positive"], *record["negatives"]]
        scores = reranker.predict([(record["query"], text) for text in documents])
        record["positive_scores"] = float(scores[0])
        record["negative_scores"] = scores[1:].tolist()
        records.append(record)
    scored = tmp_path / "scored.jsonl"
    write_jsonl(scored, records)
    losses = []
    for name, path in ((str(teacher), data), ("scores", scored)):
        term = {"loss": "kl", "teacher": name, "temperature": 0.1}
        final = trained(
            tmp_path,
            shared(tiny_bert),
            task="embed",
            losses=[term],
            loss="infonce",
            data_path=str(path),
            max_steps=1,
            logging_steps=1,
            overwrite=True,
        )
        losses += metrics(final.parent)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 1e-3


@pytest.mark.parametrize("name", ["query_prompt", "document_prompt", "max_length"])
def test_settings_of_a_source_are_refused(tmp_path, name):
    source = {"path": str(written(tmp_path)), name: 8 if name == "max_length" else "a:"}
    with pytest.raises(UserError, match=rf"train.jsonl has {name}, .*task: rerank"):
        trained(tmp_path, shared(tiny_reranker), data_path=[source])


def test_prompts_of_records_are_refused(tmp_path):
    model = shared(tiny_reranker)
    records = text_records(24, num_negatives=2)
    records[1]["query_prompt"] = "a: "
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, records)
    refusal = "query_prompt for 1 of its queries"
    with pytest.raises(UserError, match=f"data_path has a {refusal}"):
        trained(tmp_path, model, data_path=str(path))
    good = str(written(tmp_path))
    source = {"path": good, "val_data_path": str(path)}
    for data, validation in ((good, str(path)), ([source], good)):
        options = {"data_path": data, "val_data_path": validation}
        with pytest.raises(UserError, match=f"prompts.jsonl has a {refusal}"):
            trained(tmp_path, model, eval_before=False, **options)
    for name in ("eval", "score"):
        assert refusal in invoke(name, model, path, code=2).stderr


def test_data_counts_pairs(tmp_path):
    options = {"max_length": 512, "max_negatives": 1}
    config = run_config(tmp_path, shared(tiny_qwen3_reranker), **options)
    write_json(tmp_path / "cfg.yaml", config)
    target = tmp_path / "data.json"
    succeeds("data", tmp_path / "cfg.yaml", "--json", target)
    figures = read_json(target)["lengths"]["pairs"]
    pairs = []
    for record in read_jsonl(config["data_path"]):
        for document in (record["positive"], record["negatives"][0]):
            pairs.append((Item(record["query"]), Item(document)))
    features = PairFeaturiser(described(TrainConfig(**config))).features(pairs)
    assert figures["measured"] == len(pairs)
    assert figures["longest"] == max(feature.length for feature in features)


@pytest.mark.parametrize(
    ("method", "inputs", "named"),
    [
        ("predict", ([PAIRS[0], "ab"],), r"pairs\[1\] is 'ab'"),
        ("predict", ([("red cat", 7)],), "type int"),
        ("rank", ("red cat", "a red cat sleeps"), "documents is one text"),
    ],
)
def test_inputs_that_are_no_pairs_are_named(method, inputs, named):
    reranker = vembed.Reranker(shared(tiny_reranker))
    with pytest.raises(UserError, match=named):
        getattr(reranker, method)(*inputs)
