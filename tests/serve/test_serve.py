"""`vembed serve`: vectors over HTTP equal the model's; mistakes of clients are answers, not ends."""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import vembed
from tests.tiny import shared, tiny_bert_st, tiny_vit
from vembed.cli.commands.serve import run_serve
from vembed.cli.main import app
from vembed.errors import UserError
from vembed.inference.serve.encoder import ModelEncoder, TextEncoder, open_encoder
from vembed.inference.serve.server import EmbeddingServer

TEXTS = ["red", "a small bird in the garden"]


def _model(folder: Path) -> Path:
    return tiny_bert_st(
        folder, prompts={"query": "red green: ", "document": ""}, dense_dim=24
    )


def model_folder() -> Path:
    return shared(_model)


@contextmanager
def running(encoder: TextEncoder) -> Iterator[str]:
    with EmbeddingServer(lambda: encoder, "tiny", "127.0.0.1", 0) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(open_encoder(str(model_folder()))) as found:
        yield found


def post(url: str, values: Any) -> Any:
    request = urllib.request.Request(
        url, json.dumps(values).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def refused(url: str, values: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as found:
        post(url, values)
    with found.value as error:
        return error.code, json.load(error)["error"]["message"]


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Threads of a server may split a product in another way."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_the_vectors_are_those_of_the_model(url: str) -> None:
    model = vembed.Embedder(model_folder())
    answer = post(f"{url}/v1/embeddings", {"model": "tiny", "input": TEXTS})
    served = np.array([row["embedding"] for row in answer["data"]], np.float32)
    assert_close(served, model.encode(TEXTS, prompt=""))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 8
    asked = {
        "model": "tiny",
        "input": TEXTS[0],
        "input_type": "query",
        "encoding_format": "base64",
    }
    (row,) = post(f"{url}/v1/embeddings", asked)["data"]
    assert_close(
        np.frombuffer(base64.b64decode(row["embedding"]), "<f4"),
        model.encode(TEXTS[0], "query"),
    )
    (short,) = post(f"{url}/v1/embeddings", {"input": TEXTS[:1], "dimensions": 8})[
        "data"
    ]
    assert len(short["embedding"]) == 8 and np.linalg.norm(
        short["embedding"]
    ) == pytest.approx(1)
    answer = post(f"{url}/embed", {"inputs": TEXTS, "prompt_name": "query"})
    assert_close(np.array(answer, np.float32), model.encode(TEXTS, "query"))


def test_many_connections_at_once_are_all_answered(url: str) -> None:
    with ThreadPoolExecutor(64) as pool:
        found = list(
            pool.map(lambda _: len(post(f"{url}/embed", {"inputs": TEXTS})), range(128))
        )
    assert found == [2] * 128


def test_an_answer_leaves_as_one_packet(url: str) -> None:
    """On a connection that stays open, the second of two would wait until the first is acknowledged."""
    head = b"GET /health HTTP/1.1\r\nHost: tiny\r\n\r\n"
    with socket.create_connection(
        ("127.0.0.1", int(url.rpartition(":")[2])), timeout=60
    ) as connection:
        for _ in range(2):
            connection.sendall(head)
            assert connection.recv(65536).endswith(b'{"status": "ok"}')


def test_check_server_passes(url: str) -> None:
    done = CliRunner().invoke(app, ["check-server", url, str(model_folder())])
    assert done.exit_code == 0 and "equals" in done.output, done.output


def test_requests_at_the_same_time(url: str) -> None:
    wanted = vembed.Embedder(model_folder()).encode(TEXTS, prompt="")
    found: list[Any] = []

    def ask() -> None:
        found.append(post(f"{url}/embed", {"inputs": TEXTS}))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for one in found:
        assert_close(np.array(one, np.float32), wanted)


@pytest.mark.parametrize(
    ("route", "values", "code", "said"),
    [
        ("/v1/embeddings", {}, 400, "input must be a text"),
        ("/v1/embeddings", {"input": [1, 2]}, 400, "token ids are not read"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "at most 2,048"),
        ("/v1/embeddings", {"input": "a", "dimensions": 99}, 400, "gives 1 to 24"),
        (
            "/v1/embeddings",
            {"input": "a", "encoding_format": "int4"},
            400,
            "float or base64",
        ),
        (
            "/v1/embeddings",
            {"input": "a", "input_type": "passage"},
            400,
            "give query or document",
        ),
        ("/embed", [], 400, "must be a JSON object"),
        ("/nowhere", {}, 404, "there is no /nowhere"),
        (
            "/embed",
            {"inputs": ["a", "half an emoji \ud83d"]},
            400,
            "inputs[1] has a lone surrogate in it, which is no character",
        ),
    ],
)
def test_what_clients_get_wrong(
    url: str, route: str, values: Any, code: int, said: str
) -> None:
    found = refused(url + route, values)
    assert found[0] == code and said in found[1]


def test_a_client_that_leaves_is_no_traceback(
    url: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="vembed")
    with socket.create_connection(
        ("127.0.0.1", int(url.rpartition(":")[2])), timeout=60
    ) as connection:
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # closed by a reset
        connection.sendall(
            b"POST /embed HTTP/1.1\r\nHost: tiny\r\nContent-Length: 100\r\n\r\n"
        )
    end = time.monotonic() + 60
    while "has closed the connection" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    assert "has closed the connection" in caplog.text and capfd.readouterr().err == ""


def test_a_failure_of_the_server_is_an_answer(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ModelEncoder, "encode", lambda *_: 1 / 0)
        found = refused(f"{url}/embed", {"inputs": "a"})
    assert found == (500, "the server could not compute this; its log has the reason")
    assert len(post(f"{url}/embed", {"inputs": "a"})) == 1


def test_what_is_known_about_the_server(url: str) -> None:
    for route, key in (
        ("/health", "status"),
        ("/v1/models", "data"),
        ("/info", "max_input_length"),
    ):
        with urllib.request.urlopen(url + route, timeout=120) as answer:
            assert key in json.load(answer)


def test_what_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="embeds images only"):
        open_encoder(str(shared(tiny_vit)))
    encoder = ModelEncoder(
        str(model_folder()), device=None, truncate_dim=None, trust_remote_code=False
    )
    with (
        running(encoder) as url,
        pytest.raises(UserError, match="cannot be listened on"),
    ):
        # Before a model is loaded, which may take minutes: this one is not even there.
        run_serve("nowhere/at/all", host="127.0.0.1", port=int(url.rpartition(":")[2]))
    with pytest.raises(UserError, match="not a folder"):
        run_serve("nowhere/at/all", host="127.0.0.1", port=0)
