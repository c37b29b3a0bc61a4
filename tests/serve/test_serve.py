"""`vembed serve`: vectors over HTTP equal the model's; what clients do wrong ends with an answer of 4xx."""

import asyncio
import base64
import http.client
import json
import re
import select
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from scipy.special import expit

import vembed
from tests.commands import start
from tests.tiny import shared, tiny_bert_st, tiny_reranker, tiny_vit
from vembed.cli.commands.serve import serve as run_serve
from vembed.data.examples import Item
from vembed.errors import UserError
from vembed.inference.serve import Batcher, ServedInput, cut_vectors, open_encoder
from vembed.models.processors import load_tokenizer

TEXTS = ["red", "a small bird in the garden"]
KEY = "a secret"
SMALL_LIMITS = {
    "connections": 20,
    "body_bytes": 1_000_000,
    "held_bytes": 3_000_000,
    "text_characters": 500_000,
    "head_seconds": 2,
    "body_seconds": 2,
}


QUERY_PROMPT = "red green: "


def _model(folder, layers=2):
    prompts = {"query": QUERY_PROMPT, "document": ""}
    return tiny_bert_st(folder, layers=layers, prompts=prompts, dense_dim=24)


def model_folder(**options):
    """A model with a prompt for queries and a Dense module."""
    return shared(_model, **options)


class Server:
    """A server in a process of its own."""

    def __init__(self, process, output):
        """Wait until it says where it listens."""
        self.process = process
        self.output = output
        address = None
        while address is None:
            assert process.poll() is None, output.read_text()
            time.sleep(0.05)
            if output.exists():
                address = re.search(r"http://127\.0\.0\.1:(\d+)", output.read_text())
        self.address = address[0]
        self.port = int(address[1])

    def send(self, route, values=None, *, body=None, key=KEY):
        """POST values as JSON, or a body as it is; without both, GET. Return the status and the answer."""
        if values is not None:
            body = json.dumps(values).encode()
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.address + route, body, headers)
        try:
            answer = urllib.request.urlopen(request, timeout=120)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            content = answer.read()
        is_json = "json" in answer.headers["Content-Type"]
        return answer.status, json.loads(content) if is_json else content.decode()

    def wait_for(self, words):
        """Wait until its output has these words."""
        while words not in self.output.read_text():
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.05)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def exchange(self, request):
        """Send bytes; return all that comes back until the server closes the connection."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection)

    def statistics(self):
        """Counts that the system has of the process."""
        return psutil.Process(self.process.pid).as_dict(["num_threads", "memory_info"])


@contextmanager
def started(model, limits=None, delay=0.0, **environment):
    """Run the command, or start_server with limits of its own, whose model takes `delay` seconds longer."""
    module = "vembed"
    words = ["serve", str(model), "--port", "0"]
    if limits is not None:
        module = "tests.serve.start_server"
        words = [str(model), json.dumps(limits), str(delay)]
    with tempfile.TemporaryDirectory(prefix="vembed-serve-") as folder:
        output = Path(folder, "output")
        process = start(
            *words, module=module, stdout=output, stderr=output, env=environment
        )
        try:
            yield Server(process, output)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def server():
    with started(model_folder(), VEMBED_API_KEY=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def limited():
    """A server whose limits a test reaches quickly. It has no key."""
    with started(model_folder(), SMALL_LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def reranking():
    """A server of a reranker."""
    with started(shared(tiny_reranker)) as running:
        yield running


def assert_alive(server):
    status, answer = server.send("/embed", {"inputs": TEXTS})
    assert status == 200 and len(answer) == 2


def assert_refused(answer, words, status=400):
    assert answer[0] == status and words in answer[1]["error"]["message"]


def assert_close(served, expected):
    """Threads of a server may split a product in another way."""
    np.testing.assert_allclose(
        np.array(served, np.float32), expected, rtol=0, atol=1e-6
    )


def read_all(connection):
    """Return what the server sends until it closes the connection."""
    content = b""
    with suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            content += chunk
    return content


# ---- answers -------------------------------------------------------------------------------------------------------


def test_the_vectors_are_those_of_the_model(server):
    model = vembed.Embedder(model_folder())
    _, answer = server.send("/v1/embeddings", {"model": "gpt-9", "input": TEXTS})
    assert answer["model"] == model_folder().name
    served = [row["embedding"] for row in answer["data"]]
    assert_close(served, model.encode(TEXTS, prompt=""))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 8

    values = {"input": TEXTS[0], "input_type": "query", "encoding_format": "base64"}
    _, answer = server.send("/v1/embeddings", values)
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert_close(vector, model.encode(TEXTS[0], "query"))

    _, answer = server.send("/v1/embeddings", {"input": TEXTS[:1], "dimensions": 8})
    short = answer["data"][0]["embedding"]
    assert len(short) == 8 and np.linalg.norm(short) == pytest.approx(1)
    _, answer = server.send("/embed", {"inputs": TEXTS[:1], "dimensions": 8})
    assert_close(answer[0], short)

    values = {"inputs": TEXTS, "prompt_name": "query", "normalize": True}
    _, answer = server.send("/embed", values)
    assert_close(answer, model.encode(TEXTS, "query"))


def token_ids(model, *texts):
    """The ids that a model reads of texts."""
    inputs = [(Item(text=text), "document") for text in texts]
    features = model.featuriser.features(inputs)
    return [row.token_ids.tolist() for row in features]


def test_vectors_are_cut_as_the_request_says():
    vectors = np.array([[3.0, 4.0, 12.0]])
    assert_close(cut_vectors(vectors, {"dimensions": 2}), [[0.6, 0.8]])
    values = {"dimensions": 2, "normalize": False}
    assert_close(cut_vectors(vectors, values), [[3.0, 4.0]])


def test_token_ids_are_taken_as_they_are(server):
    model = vembed.Embedder(model_folder())
    ids = token_ids(model, *TEXTS)
    expected = model.encode(TEXTS, prompt="")
    _, answer = server.send("/v1/embeddings", {"input": ids})
    assert_close([row["embedding"] for row in answer["data"]], expected)
    assert answer["usage"]["total_tokens"] == sum(map(len, ids))
    _, answer = server.send("/v1/embeddings", {"input": ids[0]})
    assert_close(answer["data"][0]["embedding"], expected[0])


def test_many_connections_at_once_are_all_answered(server):
    def ask(number):
        _, answer = server.send("/embed", {"inputs": ["red " * number, *TEXTS]})
        return len(answer)

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, range(1, 129))) == [3] * 128


def test_a_connection_stays_open_between_requests(server):
    request = b"GET /health HTTP/1.1\r\nHost: tiny\r\n\r\n"
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                part = connection.recv(65536)
                assert part, "the server has closed the connection"
                answer += part


def test_what_is_known_about_the_server(server):
    assert server.send("/health") == (200, {"status": "ok"})
    assert server.send("/v1/models")[1]["data"][0]["owned_by"] == "vembed"
    assert server.send("/info")[1]["max_input_length"] > 0
    server.send("/embed", {"inputs": "a"})
    status, text = server.send("/metrics")
    assert status == 200
    metrics = dict(line.rsplit(" ", 1) for line in text.splitlines())
    answered = 'vembed_requests_total{route="/embed",status="200"}'
    assert float(metrics[answered]) >= 1
    assert float(metrics["vembed_tokens_total"]) >= 3
    assert float(metrics["vembed_waiting_requests"]) == 0
    assert float(metrics["vembed_request_seconds_count"]) >= 1


@pytest.mark.parametrize("route", ["/v1/models", "/info", "/metrics", "/embed"])
def test_a_key_is_needed(server, route):
    values = {"inputs": "a"} if route == "/embed" else None
    for key in ("", "another", "a secret with more", "\xe4"):
        assert_refused(server.send(route, values, key=key), "Authorization", 401)
    assert server.send("/health", key="")[0] == 200


# ---- rerankers -----------------------------------------------------------------------------------------------------


QUERY = "a bird"
DOCUMENTS = ["red", "a small bird in the garden", "blue"]


def reranker_logits():
    reranker = vembed.Reranker(shared(tiny_reranker))
    return reranker.predict([(QUERY, document) for document in DOCUMENTS])


def test_tei_reranks(reranking):
    logits = reranker_logits()
    values = {"query": QUERY, "texts": DOCUMENTS}
    status, rows = reranking.send("/rerank", values)
    assert status == 200
    order = [row["index"] for row in rows]
    assert order == np.argsort(-logits).tolist()
    assert_close([row["score"] for row in rows], expit(logits)[order])
    assert all("text" not in row for row in rows)

    options = {"raw_scores": True, "return_text": True}
    _, rows = reranking.send("/rerank", values | options)
    assert_close([row["score"] for row in rows], logits[order])
    assert [row["text"] for row in rows] == [DOCUMENTS[index] for index in order]


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_cohere_reranks(reranking, route):
    logits = reranker_logits()
    values = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    status, answer = reranking.send(route, values | {"return_documents": True})
    assert status == 200 and answer["usage"]["total_tokens"] > 9
    best = np.argsort(-logits)[:2].tolist()
    rows = answer["results"]
    assert [row["index"] for row in rows] == best
    assert_close([row["relevance_score"] for row in rows], expit(logits)[best])
    documents = [{"text": DOCUMENTS[index]} for index in best]
    assert [row["document"] for row in rows] == documents
    _, answer = reranking.send(route, values | {"documents": documents})
    assert [row["index"] for row in answer["results"]] == [0, 1]


@pytest.mark.parametrize(
    ("route", "values", "words"),
    [
        (
            "/rerank",
            {"queries": QUERY, "texts": DOCUMENTS},
            "query in place of queries",
        ),
        ("/rerank", {"query": 7, "texts": ["a"]}, "query must be one text"),
        ("/rerank", {"query": QUERY, "texts": [7]}, "texts must be a text or a list"),
        ("/rerank", {"query": QUERY, "texts": ["a"], "documents": ["b"]}, "not both"),
        ("/rerank", {"query": QUERY, "texts": ["a"], "truncate": False}, "truncate"),
        ("/rerank", {"query": ["a", "b"], "texts": DOCUMENTS}, "2 queries"),
        ("/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 0}, "top_n"),
        ("/embed", {"inputs": TEXTS}, "/rerank"),
    ],
)
def test_what_clients_of_a_reranker_get_wrong(reranking, route, values, words):
    assert_refused(reranking.send(route, values), words)


# ---- mistakes of clients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "values", "status", "words"),
    [
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"inputs": ["a"]}, 400, "input in place of inputs"),
        ("/v1/embeddings", {"input": [[1], [2] * 9000]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": [1], "input_type": "query"}, 400, "input_type"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "2,048"),
        ("/v1/embeddings", {"input": "a", "dimensions": 99}, 400, "1 to 24"),
        ("/embed", {"inputs": "a", "normalize": False}, 400, "normalize"),
        ("/v1/embeddings", {"input": "a", "input_type": "passage"}, 400, "passage"),
        ("/embed", {"inputs": float("nan")}, 400, "NaN"),
        ("/embed", {"inputs": ["a", "half an emoji \ud83d"]}, 400, "inputs[1]"),
        ("/embed", {"inputs": ["a", "b" * 1_000_001]}, 413, "inputs[1]"),
        ("/nowhere", {}, 404, "/nowhere"),
        ("/health", {}, 405, "POST /health"),
        ("/rerank", {"query": QUERY, "texts": DOCUMENTS}, 400, "/embed"),
        ("/v2/rerank", {"query": QUERY, "texts": DOCUMENTS}, 400, "/embed"),
    ],
)
def test_what_clients_get_wrong(server, route, values, status, words):
    assert_refused(server.send(route, values), words, status)
    assert_alive(server)


@pytest.mark.parametrize("body", [b"[" * 5_000_000, b"\xff", b'{"inputs": '])
def test_a_body_that_is_no_json(server, body):
    assert_refused(server.send("/embed", body=body), "body")
    assert_alive(server)


def test_a_body_that_is_too_large(limited):
    answer = limited.send("/embed", body=b" " * 1_000_001)
    assert_refused(answer, "1,000,000", 413)
    head = b"POST /embed HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert b" 413 " in limited.exchange(head + chunk * 20)
    assert_alive(limited)


HIDDEN = b'POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{"input":"a"}'


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nContent-Length: 0\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: +%d\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity, chunked\r\n"
        b"Content-Length: %d\r\n\r\n0\r\n\r\n",
    ],
)
def test_no_second_request_is_hidden_in_a_body(limited, request_head):
    answers = limited.exchange(request_head % len(HIDDEN) + HIDDEN)
    assert answers.count(b"HTTP/1.1 ") == 1 and b'embedding"' not in answers
    assert_alive(limited)


# ---- attacks -------------------------------------------------------------------------------------------------------


def test_idle_and_slow_connections_lock_nobody_out(limited):
    num_threads = limited.statistics()["num_threads"]
    with ExitStack() as stack:
        connections = [stack.enter_context(limited.connect()) for _ in range(60)]
        for connection in connections[::2]:
            with suppress(ConnectionError):  # closed to make room
                connection.sendall(b"POST /embed HTTP/1.1\r\nHos")
        assert_alive(limited)
        assert limited.statistics()["num_threads"] < num_threads + 40
        # What has never become a request is closed.
        start = time.monotonic()
        assert b"200" not in read_all(connections[-1])
        assert time.monotonic() - start < 30


def test_slow_bodies_are_given_up(limited):
    request = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
    answer = limited.exchange(request)
    assert b" 408 " in answer and b"2 s" in answer
    assert_alive(limited)


def test_unfinished_bodies_are_bounded_together(limited):
    before = limited.statistics()["memory_info"].rss
    head = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n\r\n"
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(limited.exchange, [head + b" " * 900_000] * 12)
        statuses = [answer[9:12] for answer in answers]
    assert statuses.count(b"429") >= 8 and set(statuses) <= {b"429", b"408"}
    assert limited.statistics()["memory_info"].rss - before < 60_000_000
    assert_alive(limited)


def test_a_client_that_takes_no_answer_is_closed(limited):
    # Answers of a megabyte fill the buffers soon.
    body = json.dumps({"inputs": ["a"] * 2_000}).encode()
    head = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    request = head % len(body) + body
    with limited.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1)
        with pytest.raises((ConnectionError, TimeoutError)):
            for _ in range(100_000):
                connection.sendall(request * 100)
        # Nothing is read here, so that only a close of the server can end the wait.
        poll = select.poll()
        poll.register(connection, 0)
        assert poll.poll(60_000), "the connection is still open"
    assert_alive(limited)


def test_one_long_word_does_not_hold_the_model(limited):
    start = time.monotonic()
    assert limited.send("/embed", {"inputs": "a" * 499_999})[0] == 200
    assert limited.send("/embed", {"inputs": ["ab" * 200_000, "a"]})[0] == 200
    assert time.monotonic() - start < 10


# ---- batches, faults and the end -----------------------------------------------------------------------------------


class CountingEncoder:
    """An encoder that waits for the test, and fails on some texts."""

    max_length = 9
    vocab_size = None

    def __init__(self):
        self.batches = []
        self.may_go = threading.Event()

    def encode(self, inputs):
        self.batches.append([served.content for served in inputs])
        assert self.may_go.wait(60)
        if any(served.content == "bad" for served in inputs):
            raise UserError("a bad text")
        lengths = [len(served.content) for served in inputs]
        return np.array(lengths, np.float32)[:, None], lengths


def test_requests_that_wait_are_encoded_together():
    encoder = CountingEncoder()

    async def submit():
        batcher = Batcher(encoder)
        first = batcher.submit([ServedInput("first")])
        while not encoder.batches:
            await asyncio.sleep(0.01)
        jobs = {
            text: batcher.submit([ServedInput(text), ServedInput(text + "+")])
            for text in ("a", "bad", "ccc", "gone")
        }
        assert len(batcher.waiting) == 4
        batcher.waiting.remove(jobs["gone"])
        encoder.may_go.set()
        assert (await first.result)[0].tolist() == [[5]]
        assert (await jobs["a"].result)[0].tolist() == [[1], [2]]
        assert (await jobs["ccc"].result)[1] == 7
        with pytest.raises(UserError):
            await jobs["bad"].result

    asyncio.run(submit())
    # Together first; one by one after the failure, so that one bad request does not spoil the others.
    assert encoder.batches[1] == ["a", "a+", "bad", "bad+", "ccc", "ccc+"]
    assert len(encoder.batches) == 5


def test_sigterm_answers_what_has_arrived():
    with (
        started(model_folder(), {}, delay=2) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        idle = server.connect()
        answer = pool.submit(server.send, "/embed", {"inputs": TEXTS})
        server.wait_for("encoding")
        server.process.send_signal(signal.SIGTERM)
        status, vectors = answer.result(120)
        assert status == 200 and len(vectors) == len(TEXTS)
        assert server.process.wait(60) == 0
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        idle.close()


def test_a_request_that_is_not_computed_in_time_gets_503_when_the_server_stops():
    with (
        started(model_folder(), {"drain_seconds": 1}, delay=5) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        running = pool.submit(server.send, "/embed", {"inputs": TEXTS})
        server.wait_for("encoding")
        waiting = pool.submit(server.send, "/embed", {"inputs": ["a"]})
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        for answer in (running, waiting):
            assert_refused(answer.result(60), "1 s", 503)
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.output.read_text()


def test_a_second_signal_ends_the_server_at_once():
    with (
        started(model_folder(), {}, delay=60) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(server.send, "/embed", {"inputs": TEXTS})
        server.wait_for("encoding")
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None, "the request is being computed"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(1) == 128 + signal.SIGTERM
        with pytest.raises((OSError, http.client.HTTPException)):
            answer.result(60)


def test_the_command_stops_at_ctrl_c():
    with started(model_folder()) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert "stopped" in server.output.read_text()


def test_what_cannot_be_served():
    with pytest.raises(UserError, match="images only"):
        open_encoder(str(shared(tiny_vit)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}"):
            # Before a model is loaded, which may take minutes: this one does not exist.
            run_serve("nowhere/at/all", host="127.0.0.1", port=port)
    with pytest.raises(UserError, match="not a folder"):
        run_serve("nowhere/at/all", host="127.0.0.1", port=0)


@pytest.mark.parametrize(
    "text", ["a" * 300_000 + " red", "red " + "ab" * 200_000 + " a"]
)
def test_a_cut_word_has_the_tokens_of_the_whole(text):
    model = vembed.Embedder(model_folder())
    tokenizer = load_tokenizer(model.description)
    whole = tokenizer(text, truncation=True, max_length=model.description.max_length)
    assert token_ids(model, text) == [whole["input_ids"]]
