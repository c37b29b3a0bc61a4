"""Metrics: what the server has done, in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)


class Metrics:
    """Counters of requests, batches, inputs and tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: Counter[float] = Counter()
        self._total_seconds = 0.0
        self._num_batches = 0
        self._num_inputs = 0
        self._num_tokens = 0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that is answered."""
        with self._lock:
            self._requests[route, status] += 1
            self._total_seconds += seconds
            for bound in SECONDS_BUCKETS:
                if seconds <= bound:
                    self._seconds[bound] += 1

    def count_batch(self, num_inputs: int, num_tokens: int) -> None:
        """Count what the model has computed at once."""
        with self._lock:
            self._num_batches += 1
            self._num_inputs += num_inputs
            self._num_tokens += num_tokens

    def text(self, num_waiting: int) -> str:
        """Return the metrics. `num_waiting`: requests that wait for the model."""
        with self._lock:
            lines = ["# TYPE vembed_requests_total counter"]
            for (route, status), count in sorted(self._requests.items()):
                labels = f'route="{route}",status="{status}"'
                lines.append(f"vembed_requests_total{{{labels}}} {count}")
            lines.append("# TYPE vembed_request_seconds histogram")
            for bound in SECONDS_BUCKETS:
                count = self._seconds[bound]
                lines.append(f'vembed_request_seconds_bucket{{le="{bound}"}} {count}')
            total = self._requests.total()
            lines.append(f'vembed_request_seconds_bucket{{le="+Inf"}} {total}')
            lines.append(f"vembed_request_seconds_sum {self._total_seconds}")
            lines.append(f"vembed_request_seconds_count {total}")
            counters = {
                "batches": self._num_batches,
                "inputs": self._num_inputs,
                "tokens": self._num_tokens,
            }
            for name, count in counters.items():
                lines.append(f"# TYPE vembed_{name}_total counter")
                lines.append(f"vembed_{name}_total {count}")
        lines.append("# TYPE vembed_waiting_requests gauge")
        lines.append(f"vembed_waiting_requests {num_waiting}")
        return "\n".join(lines) + "\n"
