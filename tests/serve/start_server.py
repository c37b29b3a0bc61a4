"""Starts the server with limits of the test: `python -m tests.serve.start_server MODEL '{"head_seconds": 1}'`."""

import json
import sys

from vembed.inference.serve import RequestLimits, open_encoder, serve

if __name__ == "__main__":
    serve(
        lambda: open_encoder(sys.argv[1]),
        "tiny",
        host="127.0.0.1",
        port=0,
        limits=RequestLimits(**json.loads(sys.argv[2])),
        on_ready=lambda port, _: print(f"http://127.0.0.1:{port}:", flush=True),
    )
