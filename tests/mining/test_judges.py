"""Judges: rerankers, decoders and endpoints, their cascade, their cache, and endpoints that misbehave."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from scipy.special import expit

from tests.mining.data import documents, run, write_data
from tests.rerank.test_rerank import answer_scores, classifier_scores
from tests.tiny import shared, tiny_qwen3_reranker, tiny_reranker
from vembed.errors import RunError, UserError
from vembed.mining.judges import answer_of, load_judge
from vembed.mining.options import Judge, MineConfig
from vembed.models.families.description import RERANK_INSTRUCTION


class Server(ThreadingHTTPServer):
    """An endpoint whose answers a function decides: text, a status, or None for a closed connection."""

    daemon_threads = True
    request_queue_size = (
        64  # a connection that finds the queue full tries again after a second
    )

    def __init__(self, decide):
        self.decide = decide
        self.asked = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    @property
    def base_url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = (
        True  # head and body are two packets, and the second would wait for an answer
    )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        with self.server.lock:
            self.server.asked.append((prompt, self.headers.get("Authorization")))
            answer = self.server.decide(prompt, len(self.server.asked))
        if answer is None:
            self.close_connection = True
            return
        status, text = answer if isinstance(answer, tuple) else (200, answer)
        if status == 200:
            text = json.dumps({"choices": [{"message": {"content": text}}]})
        self.send_response(status)
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(decide):
        servers.append(Server(decide))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def options(tmp_path, cache_home):
    return write_data(tmp_path)


def endpoint(server, **changes):
    return {
        "model": "m",
        "base_url": server.base_url,
        "retry_seconds": 0.01,
        "timeout_seconds": 5.0,
        **changes,
    }


def says_cat(prompt, _):
    document = prompt.partition("Document:")[2].split("\n")[0]
    return "Yes, it is." if is_relevant(document) else "no"


def is_relevant(text):
    return "cat" in text


def test_relevant_ones_are_left_out_relabelled_or_kept(options, serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server = serve(says_cat)
    judges = [endpoint(server, api_key_env="MY_KEY")]
    plain, _ = run(options, num_negatives=8)
    dropped, result = run(options, judges=judges)
    for row, before in zip(dropped, plain, strict=True):
        others = [text for text in before["negatives"] if not is_relevant(text)]
        assert row["negatives"] == others[:4]
    assert result.counts["judged_relevant"] > 0
    assert {key for _, key in server.asked} == {"Bearer secret"}
    num_asked = len(server.asked)
    relabelled, _ = run(options, judges=judges, false_negatives="relabel", scores=True)
    for row, before in zip(relabelled, plain, strict=True):
        actual = [text for text in before["negatives"] if is_relevant(text)]
        positives = [before["positive"], *actual]
        assert row["positive"] == (positives if actual else before["positive"])
        assert len(row["positive_scores"]) == 1 + len(actual)
        assert row["negative_judge_scores"] == [0.0] * len(row["negatives"])
    remaining, _ = run(options, judges=judges, false_negatives="keep")
    for row, before in zip(remaining, plain, strict=True):
        assert row["negatives"] == before["negatives"][:4]
    assert len(server.asked) == num_asked, "a second run asks nothing"
    for path in Path(options["output_path"]).parent.rglob("*.jsonl"):
        assert "secret" not in path.read_text()


def test_an_endpoint_that_misbehaves_now_and_then(options, serve):
    """429, 500, a closed connection and an answer that is no JSON are asked again; the result is as if nothing was."""
    expected, _ = run(options, judges=[endpoint(serve(says_cat))])

    def decide(prompt, number):
        failures = [(429, "slow down"), (500, "oops"), None, (200, None)]
        turn = number % 9
        return failures[turn] if turn < 4 else says_cat(prompt, 0)

    server = serve(decide)
    judges = [endpoint(server, max_retries=30, retry_seconds=1e-4)]
    actual, result = run(options, judges=judges)
    assert actual == expected
    assert result.counts["undecided"] == 0
    assert max(Counter(prompt for prompt, _ in server.asked).values()) > 1


def test_nonsense_is_counted_and_no_negative(options, serve):
    server = serve(lambda *_: "As a language model, I cannot say.")
    rows, result = run(options, judges=[endpoint(server)])
    assert result.counts["undecided"] > 0
    assert not any(row["negatives"] for row in rows)


def test_a_dead_endpoint_is_named_and_nothing_done_is_lost(options, serve):
    def decide(prompt, number):
        return says_cat(prompt, 0) if number < 60 else None

    server = serve(decide)
    judges = [endpoint(server, max_retries=1, concurrency=2)]
    url = f"{server.base_url}/chat/completions"
    with pytest.raises(RunError, match=f"{url} gave no answer in 2 attempts"):
        run(options, judges=judges)
    assert not Path(options["output_path"]).exists()
    server.decide = says_cat
    num_asked = len(server.asked)
    rows, _ = run(options, judges=judges)
    again = {prompt for prompt, _ in server.asked[num_asked:]}
    answered = {prompt for prompt, _ in server.asked[:59]}
    assert not again & answered
    assert rows == run(options, judges=[endpoint(serve(says_cat))])[0]


def test_a_request_that_takes_too_long(options, serve):
    def decide(prompt, number):
        if number == 1:
            time.sleep(0.5)
        return says_cat(prompt, 0)

    rows, _ = run(
        options, judges=[endpoint(serve(decide), timeout_seconds=0.2, concurrency=1)]
    )
    assert any(row["negatives"] for row in rows)


def test_a_refusal_is_the_users_mistake(options, serve):
    with pytest.raises(UserError, match=r"HTTP 401 .*; no key"):
        run(options, judges=[endpoint(serve(lambda *_: (401, "no key")))])


def test_the_second_judge_sees_what_the_first_is_unsure_of(options, serve, tmp_path):
    reranker = tiny_reranker(tmp_path / "reranker")
    server = serve(says_cat)
    run(
        options,
        judges=[{"model": str(reranker), "unsure": [0.0, 1.0]}, endpoint(server)],
    )
    assert server.asked
    server.asked.clear()
    other = endpoint(server, instruction="another one, so that nothing is known yet")
    run(options, judges=[{"model": str(reranker), "unsure": [0.5, 0.5]}, other])
    assert not server.asked
    # Every score is at least `high` and below the middle of the last judge.
    sure = {"model": str(reranker), "unsure": [0.0, 0.0]}
    _, result = run(options, judges=[sure, endpoint(server, unsure=[1.0, 1.0])])
    assert not server.asked
    assert result.counts["judged_relevant"] > 0


PAIRS = [("the cat", text) for text in documents()[:20]]


OPTIONS = MineConfig(model_name="m", data_path="d", output_path="o.jsonl")
CPU = torch.device("cpu")


def test_a_cross_encoder_scores_each_pair(tmp_path):
    folder = tiny_reranker(tmp_path)
    actual = dict(load_judge(Judge(model=str(folder)), OPTIONS, CPU)(PAIRS))
    expected = dict(enumerate(expit(classifier_scores(folder, PAIRS))))
    assert actual == pytest.approx(expected, abs=1e-5)


def test_a_reranker_truncates_a_query_that_is_too_long_and_reads_no_pickled_weights(
    tmp_path,
):
    folder = tiny_reranker(tmp_path)
    judge = load_judge(Judge(model=str(folder), max_length=16), OPTIONS, CPU)
    assert len(dict(judge([("the cat " * 30, "the dog")]))) == 1
    assert dict(judge([])) == {}
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has no \.safetensors file"):
        load_judge(Judge(model=str(folder)), OPTIONS, CPU)


@pytest.mark.parametrize(
    "options, instruction",
    [
        ({}, RERANK_INSTRUCTION),
        ({"instruction": "Do they mean the same"}, "Do they mean the same"),
    ],
)
def test_a_decoder_answers_yes_or_no(options, instruction):
    folder = shared(tiny_qwen3_reranker)
    judge = Judge(model=str(folder), max_length=400, **options)
    actual = dict(load_judge(judge, OPTIONS, CPU)(PAIRS[:4]))
    expected = expit(answer_scores(folder, PAIRS[:4], instruction))
    assert actual == pytest.approx(dict(enumerate(expected)), abs=1e-5)


@pytest.mark.parametrize(
    "text, answer",
    {
        "Yes": 1.0,
        "**No**, because yes would be wrong": 0.0,
        "Not relevant": 0.0,
        "maybe": None,
        "<think>\nIs it relevant? Yes.\n</think>\nNo": 0.0,
        "<think>\nOkay, is the document relevant": None,
    }.items(),
)
def test_answers(text, answer):
    assert answer_of(text) == answer


def test_mistakes_in_the_config_of_a_judge(options):
    for judge, message in (
        ({"kind": "endpoint"}, "kind: endpoint needs base_url"),
        ({"unsure": [0.9, 0.1]}, r"unsure: \[0.9, 0.1\] must be"),
    ):
        with pytest.raises(UserError, match=message):
            run(options, judges=[{"model": "m", **judge}])
