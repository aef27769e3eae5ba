"""A server in a thread, on a tiny model with words as tokens."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import httpx
import openai

from flexgen_h2o.commands.serve import open_server, parse_args
from flexgen_h2o.requests.tokenizing import RequestTokenizer

DEADLINE = 60.0  # seconds until a test gives up


def flags(model: str, data: Path | str, *extra: str) -> list[str]:
    """Return the flags of a server on a free port."""
    return ["--model", model, "--data-dir", str(data), "--port", "0", "--dtype", "float32",
            "--device", "cpu", "--max-model-len", "128", "--served-model-name", "tiny", *extra]


class Served:
    """A running server and its clients."""

    def __init__(self, url: str):
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=DEADLINE)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0,
                                    timeout=DEADLINE)

    def close(self) -> None:
        """Close the clients."""
        self.http.close()
        self.openai.close()

    def upload(self, lines: list[object]) -> str:
        """Upload a file of requests; returns its id."""
        data = "".join(line if isinstance(line, str) else json.dumps(line) + "\n"
                       for line in lines)
        return self.openai.files.create(file=("in.jsonl", data.encode()), purpose="batch").id

    def batch(self, lines: list[object], endpoint: str = "/v1/completions", **fields):
        """Upload a file and create its batch."""
        return self.openai.batches.create(
            input_file_id=self.upload(lines), endpoint=endpoint, completion_window="24h", **fields)

    def wait(self, batch_id: str, *states: str):
        """Return a batch once it has one of some states: by default, when it has ended."""
        states = states or ("completed", "failed", "expired", "cancelled")
        until = time.monotonic() + DEADLINE
        while (batch := self.openai.batches.retrieve(batch_id)).status not in states:
            assert time.monotonic() < until, batch
            time.sleep(0.01)
        return batch

    def lines(self, file_id: str | None) -> list[dict]:
        """Return the lines of a file of results."""
        assert file_id is not None
        return [json.loads(line) for line in
                self.openai.files.content(file_id).text.splitlines()]


@contextmanager
def serving(argv: list[str]) -> Iterator[Served]:
    """Run a server in a thread. The process that renders chats starts with the first chat."""
    with (mock.patch.object(RequestTokenizer, "start", lambda tokenizer: None),
          open_server(parse_args(argv)) as server):
        thread = threading.Thread(target=server.run)
        thread.start()
        served = Served(server.url)
        try:
            until = time.monotonic() + DEADLINE
            while not server.started:
                assert time.monotonic() < until
                time.sleep(0.01)
            yield served
        finally:
            server.end()
            thread.join()
            served.close()


def request(custom_id: str, url: str = "/v1/completions", **body) -> dict:
    """Return a line of a batch."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
