"""Requests to an OpenAI-compatible endpoint: retried where that helps, several at once, and never silently lost."""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from vembed.errors import RunError, UserError
from vembed.mining.options import Judge, Writer

LONGEST_WAIT = 60.0
# Timeouts, limits and overload; 529 is how some providers say that they are overloaded.
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


def without_thoughts(text: str) -> str:
    """Return what a model that thinks says after it. Empty where the thinking has no end."""
    _, end, answer = text.partition("</think>")
    if end:
        return answer
    return "" if "<think>" in text else text


class ChatClient:
    """Chat completions of one model."""

    def __init__(self, endpoint: Judge | Writer) -> None:
        assert endpoint.base_url is not None, "the config asks for it"
        self.url = endpoint.base_url.rstrip("/") + "/chat/completions"
        self._endpoint = endpoint
        self._has_failed = threading.Event()

    def complete(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> Iterator[tuple[int, str]]:
        """The number of each prompt and its answer, as answers come in.

        Where a request fails for good no further one is sent, those in flight are waited for, and then the error is
        raised, which names the endpoint: what was yielded before is the caller's to keep.
        """
        with ThreadPoolExecutor(
            self._endpoint.concurrency, thread_name_prefix="vembed-endpoint"
        ) as pool:
            number_of = {
                pool.submit(
                    self._ask,
                    prompt,
                    max_tokens,
                    temperature,
                ): number
                for number, prompt in enumerate(prompts)
            }
            failure = None
            for future in as_completed(number_of):
                error = future.exception()
                if error is not None:
                    failure = failure or error
                    self._has_failed.set()
                elif (answer := future.result()) is not None:
                    yield number_of[future], answer
            if failure is not None:
                raise failure

    def _ask(
        self,
        prompt: str,
        max_tokens: int,
        temperature: float,
    ) -> str | None:
        """Return the answer; None where it is not asked for, because another request has failed for good."""
        endpoint = self._endpoint
        body = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        # A key in a config would be written to files.
        key = os.environ.get(endpoint.api_key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        content = json.dumps(body).encode()
        request = urllib.request.Request(self.url, content, headers)
        reason = ""
        for attempt in range(endpoint.max_retries + 1):
            if self._has_failed.is_set():
                return None
            wait = endpoint.retry_seconds * 2**attempt
            try:
                with urllib.request.urlopen(
                    request, timeout=endpoint.timeout_seconds
                ) as response:
                    answer = json.loads(response.read())
                content = answer["choices"][0]["message"]["content"]
                if isinstance(content, str):
                    return content
                reason = "the answer has no text"
            except urllib.error.HTTPError as error:
                with error:  # it holds the connection
                    reason = f"HTTP {error.code} {error.reason}"
                    if error.code not in RETRIED:
                        detail = error.read(300).decode("utf-8", "replace").strip()
                        raise UserError(
                            f"{self.url} refuses the request: {reason}; {detail}"
                        ) from error
                    seconds = error.headers.get("Retry-After", "")
                    if seconds.replace(".", "", 1).isdecimal():
                        wait = max(wait, float(seconds))
            # A connection that ends, or an answer that is no chat completion: both may be better next time.
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt < endpoint.max_retries:
                # As sleep, but it ends when another request has failed for good.
                self._has_failed.wait(min(wait, LONGEST_WAIT))
        raise RunError(
            f"{self.url} gave no answer in {endpoint.max_retries + 1} attempts ({reason}). What was answered is kept: "
            "start again when the endpoint is up, and only the rest is asked"
        )
