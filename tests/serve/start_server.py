"""Starts the server with limits of the test, and as slow: `... start_server MODEL '{"head_seconds": 1}' SECONDS`."""

import json
import sys
import time

from vembed.inference.serve import ModelEncoder, RequestLimits, open_encoder, serve


class SlowEncoder(ModelEncoder):
    """The model, which takes so many seconds longer, and says when it begins."""

    def encode(self, inputs):
        print("encoding", flush=True)
        time.sleep(float(sys.argv[3]))
        return super().encode(inputs)


if __name__ == "__main__":
    serve(
        lambda: SlowEncoder(open_encoder(sys.argv[1]).embedder),
        "tiny",
        host="127.0.0.1",
        port=0,
        limits=RequestLimits(**json.loads(sys.argv[2])),
        on_ready=lambda port, _: print(f"http://127.0.0.1:{port}:", flush=True),
    )
