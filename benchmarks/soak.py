"""Jobs and live requests for hours, with kills, memory pressure, a disk that fills, clock jumps.

    make soak HOURS=2

A server answers live requests and batches, and batch jobs run beside it, all in float32 and partly
on disk. Meanwhile

- jobs are killed at random moments and started again, in the first half the server, too,
- a neighbour process takes gigabytes of memory and frees them,
- the disk of the server's data and of all offload files fills up and is freed, and its rate is
  bounded by the cgroup controller of I/O. Only root can mount this disk and bound its rate; for
  other users the disk stays as it is,
- the wall clock of all processes jumps by hours, if Debian's package libfaketime is installed.

Every text must equal the same text of an undisturbed run. In the second half the server's memory
must not grow, and at the end it must have about as many descriptors as a fresh one. A row is
appended to results/reliability_soak.csv. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from disturbances import clock_jumps, full_disk, kills, pressure, slow_disk, small_disk

from flexgen_h2o.files.rows import append_row
from flexgen_h2o.metrics.provenance import cpu_model, origin

RESULTS = Path(__file__).parent / "results" / "reliability_soak.csv"
COMMON = ["--dtype", "float32", "--device", "cpu"]
SERVER = ["--percent", "0", "60", "50", "0", "--gpu-batch-size", "4", "--max-model-len", "160",
          "--max-block-seconds", "5"]
KINDS = {"full": [], "h2o": ["--hh-ratio", "0.2"]}
"""Flags of each kind of batch job. The server generates the texts of the first kind."""
ON_DISK = ["--percent", "0", "30", "0", "0", "--gpu-batch-size", "3", "--num-gpu-batches", "2"]
MOST_GROWTH = 1.0
"""MB an hour by which the server's memory may grow. A trial of minutes says nothing about it."""
MOST_DESCRIPTORS = 8
"""Descriptors by which a used server may exceed a fresh one, both idle: files of tiers on disk are
opened when they are first used."""
SHORTEST_TREND = 900.0  # seconds that the growth is computed from
FULL_DISK = ("No space left", "is full", "has only", "free some", "does not fit. disk space")


def requests() -> list[dict[str, Any]]:
    """Return the requests, each with its own prompt and parameters."""
    words = ["the", "sea", "a", "red", "old", "house", "of", "time", "no", "light", "stones", "we"]
    draw, lines = random.Random(0), []
    for number in range(40):
        body: dict[str, Any] = {"max_tokens": draw.randrange(4, 24), "seed": number, "temperature":
                                draw.choice((0, 0.8)), "ignore_eos": number % 3 == 0}
        text = " ".join(draw.choices(words, k=draw.randrange(1, 40)))
        chat = number % 4 == 0
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        url = "/v1/chat/completions" if chat else "/v1/completions"
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})
    return lines


def text_of(body: Mapping[str, Any]) -> str:
    """Return the text of a response."""
    (choice,) = body["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def texts_of(path: Path) -> dict[str, str]:
    """Return the texts of a file of results by id. AssertionError if one is there twice."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    texts = {line["custom_id"]: text_of(line["response"]["body"]) for line in lines}
    assert len(texts) == len(lines), "a request was answered twice"
    return texts


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


class Server:
    """A server in a process, which may be killed and started again on the same port."""

    def __init__(self, model: str, disk: Path, log: Path, environment: Mapping[str, str]):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._argv = [sys.executable, "-m", "flexgen_h2o", "serve", "--model", model, *COMMON,
                      *SERVER, "--port", str(self.port), "--data-dir", str(disk / "data"),
                      "--offload-dir", str(disk / "offload"), "--max-queue", "64"]
        self._log, self._environment = log, environment
        self.process: subprocess.Popen | None = None

    def start(self, seconds: float = 600) -> None:
        """Start it, again if the disk is full, and wait until it answers."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process is None or self.process.poll() is not None:
                with open(self._log, "ab") as log:
                    self.process = subprocess.Popen(self._argv, stdout=log, stderr=log,
                                                    env=self._environment)
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"the server does not start: see {self._log}")

    def end(self, number: int) -> None:
        """End it by a signal."""
        assert self.process is not None
        self.process.send_signal(number)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError("the server did not end 120 s after SIGTERM") from None

    def usage(self) -> tuple[float, int]:
        """Return anonymous memory in MB, and the number of descriptors."""
        assert self.process is not None
        home = Path(f"/proc/{self.process.pid}")
        line = next(line for line in (home / "status").read_text().splitlines()
                    if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1000, len(os.listdir(home / "fd"))


class Soak:
    """The threads of a soak test, and what they have counted."""

    def __init__(self, model: str, folder: Path, disk: Path | None, hours: float):
        self.model, self.folder, self.seconds = model, folder, hours * 3600
        self.fills = disk
        self.disk = disk or folder / "disk"
        self.disk.mkdir(exist_ok=True)
        self.requests = requests()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[tuple[int, float, float, int]] = []  # process, seconds, MB, descriptors
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self.environment = dict(os.environ)
        self.clock = folder / "clock"
        if libraries := glob.glob("/usr/lib/*/faketime/libfaketime.so.1"):
            self.clock.write_text("+0")
            self.environment |= {
                "LD_PRELOAD": libraries[0], "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        self.server = Server(model, self.disk, folder / "server.log", self.environment)
        self.expected = {kind: self._undisturbed(kind) for kind in KINDS}
        self.began = time.monotonic()

    def count(self, name: str) -> None:
        """Add one to a count."""
        with self._lock:
            self.counts[name] += 1

    def check(self, what: str, texts: Mapping[str, str], kind: str = "full") -> None:
        """Compare texts with the reference texts of an undisturbed run."""
        for name, text in texts.items():
            self.count("texts_compared")
            if text != self.expected[kind][name]:
                self.wrong.append(f"{what} {name}: {text!r}, not {self.expected[kind][name]!r}")

    def _job(self, kind: str, name: str, *flags: str) -> list[str]:
        return [sys.executable, "-m", "flexgen_h2o", "batch", "--model", self.model, *COMMON,
                *KINDS[kind], "-i", str(self.folder / f"{name}.in.jsonl"), "-o",
                str(self.folder / f"{name}.out.jsonl"), *flags]

    def _undisturbed(self, kind: str) -> dict[str, str]:
        write_lines(self.folder / f"{kind}.in.jsonl", self.requests)
        subprocess.run(self._job(kind, kind, "--gpu-batch-size", "8"), check=True,
                       stdout=subprocess.DEVNULL)
        return texts_of(self.folder / f"{kind}.out.jsonl")

    # Load.

    def live(self, draw: random.Random) -> None:
        """Send a request after the other: whole answers, streams, streams that are left."""
        with httpx.Client(base_url=self.server.url, timeout=300) as client:
            while not self.stop.is_set():
                line, way = draw.choice(self.requests), draw.random()
                try:
                    if way < 0.5:
                        answer = client.post(line["url"], json=line["body"])
                        self._note_status(answer, (503, 429))
                        text = text_of(answer.json()) if answer.status_code == 200 else None
                    else:
                        text = self._stream(client, line, left=way > 0.85)
                except httpx.TransportError:
                    self.count("connections_lost")
                    self.stop.wait(0.5)
                    continue
                if text is None:
                    self.stop.wait(0.2)
                    continue
                self.count("live_answers")
                self.check("live", {line["custom_id"]: text})

    def _note_status(self, answer: httpx.Response, allowed: Sequence[int]) -> None:
        if answer.status_code in allowed:
            self.count(f"answers_{answer.status_code}")
        elif answer.status_code != 200:
            self.wrong.append(f"status {answer.status_code}: {answer.text[:200]}")

    def _stream(self, client: httpx.Client, line: Mapping[str, Any], *, left: bool) -> str | None:
        text = ""
        with client.stream("POST", line["url"], json={**line["body"], "stream": True}) as answer:
            if answer.status_code != 200:
                answer.read()
                self._note_status(answer, (503, 429))
                return None
            for event in answer.iter_lines():
                data = event.removeprefix("data: ")
                if data == "[DONE]":
                    return text
                if not data:
                    continue
                body = json.loads(data)
                if "error" in body:
                    self.count("streams_given_up")
                    return None
                (choice,) = body["choices"]
                text += choice["delta"].get("content") or "" if "delta" in choice else choice[
                    "text"]
                if left and text:
                    self.count("streams_left")
                    return None
        self.wrong.append(f"stream {line['custom_id']} ended without [DONE]")
        return None

    def batches(self, draw: random.Random) -> None:
        """Upload, wait for and compare a batch after the other."""
        with httpx.Client(base_url=f"{self.server.url}/v1", timeout=60) as client:
            while not self.stop.is_set():
                url = draw.choice([line["url"] for line in self.requests])
                lines = [line for line in self.requests if line["url"] == url]
                lines = draw.sample(lines, draw.randrange(1, len(lines)))
                content = write_lines(self.folder / "upload.jsonl", lines).read_bytes()
                file = self._request(client, "POST", "/files", data={"purpose": "batch"},
                                     files={"file": content}).json()
                batch = self._request(client, "POST", "/batches", json={
                    "input_file_id": file["id"], "endpoint": url, "completion_window": "99d"}
                    ).json()
                while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
                    time.sleep(0.5)
                    batch = self._request(client, "GET", f"/batches/{batch['id']}").json()
                if batch["status"] != "completed" or batch["error_file_id"]:
                    self.wrong.append(f"a batch of {len(lines)} requests: {batch}")
                    continue
                output = self.folder / "download.jsonl"
                output.write_bytes(self._request(
                    client, "GET", f"/files/{batch['output_file_id']}/content").content)
                texts = texts_of(output)
                assert texts.keys() == {line["custom_id"] for line in lines}, "lines are missing"
                self.count("batches")
                self.check("batch", texts)
                for id in (file["id"], batch["output_file_id"]):
                    self._request(client, "DELETE", f"/files/{id}")

    def _request(self, client: httpx.Client, method: str, url: str, **options: Any
                 ) -> httpx.Response:
        """Send a request until it is answered; a deleted file may be gone."""
        until = time.monotonic() + 1200
        while time.monotonic() < until:
            try:
                answer = client.request(method, url, **options)
            except httpx.TransportError:
                self.count("connections_lost")
            else:
                gone = method == "DELETE" and answer.status_code == 404
                if answer.status_code == 200 or gone:
                    return answer
                self._note_status(answer, (503, 507))
            time.sleep(1)
        raise AssertionError("a request was not answered within 20 minutes")

    def jobs(self, draw: random.Random) -> None:
        """Run batch jobs, which are killed and started again until they are complete."""
        number = 0
        while not self.stop.is_set():
            number, kind = number + 1, draw.choice([*KINDS])
            lines = draw.sample(self.requests, draw.randrange(8, len(self.requests)))
            write_lines(self.folder / "job.in.jsonl", lines)
            for path in self.folder.glob("job.out.jsonl*"):
                path.unlink()
            command = self._job(kind, "job", *ON_DISK, "--offload-dir", str(self.disk / "offload"))
            status, kills = None, 0
            while status != 0:
                with open(self.folder / "job.err", "wb") as log:
                    process = subprocess.Popen(command, stdout=log, stderr=log,
                                               env=self.environment)
                    try:
                        life = draw.uniform(4, 30) if kills < 4 else 1200
                        status = process.wait(life)
                    except subprocess.TimeoutExpired:
                        process.send_signal(signal.SIGKILL if draw.random() < 0.7
                                            else signal.SIGTERM)
                        process.wait()
                        kills += 1
                        self.count("job_kills")
                        continue
                message = (self.folder / "job.err").read_text("utf-8", "replace")
                if status and any(words in message for words in FULL_DISK):
                    self.count("jobs_without_disk")
                    time.sleep(3)
                elif status:
                    self.wrong.append(f"a job ended with status {status}: {message[-300:]}")
                    break
            else:
                texts = texts_of(self.folder / "job.out.jsonl")
                assert texts.keys() == {line["custom_id"] for line in lines}, "lines are missing"
                self.count("jobs")
                self.check(f"job, {kind}", texts, kind)

    def watch(self, draw: random.Random) -> None:
        """Sample the server's memory and descriptors."""
        while not self.stop.wait(2):
            with suppress(OSError, StopIteration):  # it is being started again
                process = self.server.process
                assert process is not None
                self.samples.append((process.pid, time.monotonic() - self.began,
                                     *self.server.usage()))

    # The run.

    def run(self) -> None:
        """Run all threads for the time, then let the load end."""
        self.server.start()
        self.began = time.monotonic()
        works = [Soak.live, Soak.live, Soak.batches, Soak.jobs, kills, pressure, full_disk,
                 slow_disk, clock_jumps, Soak.watch]
        threads = [threading.Thread(target=self._guarded, args=(work, number), daemon=True)
                   for number, work in enumerate(works)]
        for thread in threads:
            thread.start()
        while time.monotonic() - self.began < self.seconds and not self.wrong:
            time.sleep(1)
        self.stop.set()
        for thread in threads:
            thread.join(1500)
            if thread.is_alive():
                self.wrong.append(f"{thread.name} did not end")

    def _guarded(self, work: Callable[[Soak, random.Random], None], number: int) -> None:
        try:
            work(self, random.Random(number))
        except Exception as error:
            self.wrong.append(f"{work.__name__}: {type(error).__name__}: {error}")

    def leaked_descriptors(self) -> int:
        """Return by how many descriptors the server exceeds a fresh one, both idle."""
        used = self._idle_descriptors()
        self.server.end(signal.SIGTERM)
        self.server.start()
        line = self.requests[1]
        answer = httpx.post(self.server.url + line["url"], json=line["body"], timeout=120)
        self.check("last", {line["custom_id"]: text_of(answer.json())})
        return used - self._idle_descriptors()

    def _idle_descriptors(self) -> int:
        counts = []
        for _ in range(20):  # the server closes connections after 5 s
            time.sleep(1)
            counts.append(self.server.usage()[1])
        return min(counts)

    def growth(self) -> tuple[float, float, float]:
        """Return the growth of the last server's memory in MB an hour, its hours, and its most MB.
        """
        last = self.samples[-1][0]
        rows = np.array([sample[1:3] for sample in self.samples if sample[0] == last])
        rows = rows[rows[:, 0] >= rows[0, 0] + 0.2 * (rows[-1, 0] - rows[0, 0])]  # not its start
        hours = (rows[:, 0] - rows[0, 0]) / 3600
        slope = np.polyfit(hours, rows[:, 1], 1)[0] if len(rows) > 2 else float("nan")
        return float(slope), float(hours[-1]), float(rows[:, 1].max())


COUNTS = ("live_answers", "streams_left", "streams_given_up", "batches", "jobs", "texts_compared",
          "server_kills", "job_kills", "connections_lost", "disk_fills", "disk_slowdowns",
          "jobs_without_disk", "answers_507", "answers_503", "answers_429", "clock_jumps")
COLUMNS = ("hours", *COUNTS, "wrong", "growth_mb_per_hour", "growth_hours", "memory_mb",
           "leaked_descriptors", "cpu", "date", "commit")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak test, print and append its row, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    with small_disk(folder / "disk") as disk:
        soak = Soak(arguments.model, folder, disk, arguments.hours)
        try:
            soak.run()
            leaked = soak.leaked_descriptors()
        finally:
            if soak.server.process is not None:
                soak.server.process.kill()
                soak.server.process.wait()
    growth, hours, memory = soak.growth()
    if leaked > MOST_DESCRIPTORS:
        soak.wrong.append(f"{leaked} descriptors are left open")
    if growth > MOST_GROWTH and hours * 3600 >= SHORTEST_TREND:
        soak.wrong.append(f"the server's memory grows by {growth:.1f} MB an hour")
    row = {"hours": arguments.hours, **{name: soak.counts[name] for name in COUNTS},
           "wrong": len(soak.wrong), "growth_mb_per_hour": growth, "growth_hours": hours,
           "memory_mb": memory, "leaked_descriptors": leaked, "cpu": cpu_model(),
           **{name: origin()[name] for name in ("date", "commit")}}
    append_row(arguments.csv, COLUMNS, row)
    print("\n".join(f"{name:20} {value}" for name, value in row.items()))
    if soak.wrong:
        print("\n".join(f"wrong: {each}" for each in soak.wrong[:20]), f"logs are in {folder}",
              sep="\n")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
