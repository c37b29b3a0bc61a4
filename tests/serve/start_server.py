"""Starts the server with limits of the test, and as slow: `... start_server MODEL '{"head_seconds": 1}' SECONDS`."""

import json
import sys
import time

from vembed.inference.serve import (
    ModelEncoder,
    RequestLimits,
    listen,
    open_encoder,
    server_of,
)


class SlowEncoder(ModelEncoder):
    """The model, which takes so many seconds longer, and says when it begins."""

    def encode(self, inputs):
        print("encoding", flush=True)
        time.sleep(float(sys.argv[3]))
        return super().encode(inputs)


if __name__ == "__main__":
    with listen("127.0.0.1", 0) as listener:
        encoder = SlowEncoder(open_encoder(sys.argv[1]).embedder)
        server = server_of(encoder, "tiny", RequestLimits(**json.loads(sys.argv[2])))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}:", flush=True)
        server.run(sockets=[listener])
