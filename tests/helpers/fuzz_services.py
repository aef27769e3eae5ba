"""Fuzz targets beside files: GGUF layouts, structured outputs, drafts, and a server's HTTP."""

import json
import logging
import random
import re
import shutil
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import gguf
import httpx
import torch

from flexgen_h2o import LLM, H2OConfig, Policy, StructuredOutputs
from flexgen_h2o.engine.args import EngineArgs
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.engine.source import find_model
from flexgen_h2o.engine.speculation import DraftAutotune
from flexgen_h2o.engine.structured_outputs import GrammarCompiler
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.disk_cache import cache_dir
from flexgen_h2o.storage.device import Device
from helpers import gguf_cases
from helpers.fuzz_cases import MAX_READ, NUMBERS, Target, changed, damaged, json_case
from helpers.servers import flags, request, serving
from helpers.tiny_tokenizers import tiny_tokenizer

SCHEMAS = (
    {"type": "object", "required": ["a", "b"], "additionalProperties": False, "properties": {
        "a": {"type": "string", "maxLength": 4, "pattern": "^[a-z]*$"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 3}},
     "$defs": {"n": {"type": "integer", "minimum": -3, "maximum": 9}}},
    {"anyOf": [{"const": "x"}, {"enum": [1, None, "y"]}, {"type": "number", "multipleOf": 0.5}]},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "minProperties": 1},
    {"type": "string", "format": "date"})
PATTERNS = ("[a-c]{1,3}-é+x", "(so|time) [0-9]{2,4}", r"\d+(\.\d*)?", "(a|b(c|d)*)+e", r"\p{L}+")
GRAMMARS = ('start: "a" b? "c"\nb: /[0-9]{2}/', 'root ::= "x" [0-9] [0-9]? "y"',
            'start: item ("," item)*\nitem: NAME "=" NUMBER\nNAME: /[a-z]+/\nNUMBER: /[0-9]+/')
_ENDS = (2, 5)
_TOKENS = 12  # of a text in a form
_PATIENCE = 0.25  # seconds to wait for the rest of an answer


def services(folder: Path, stack: ExitStack, *, every: bool) -> dict[str, Target]:
    """Return the targets by name; `stack` closes what they hold.

    `folder` has a folder ``model``. With `every`, each GGUF architecture is damaged.
    """
    return {"gguf layouts": _gguf_layouts(folder / "layouts", stack, every),
            "structured outputs": _structured_outputs(), "drafts": _drafts(folder, stack),
            "http": _http(folder, stack)}


# GGUF layouts


def _gguf_layouts(folder: Path, stack: ExitStack, every: bool) -> Target:
    """Return the target of models of all architectures with damaged values, shapes and types."""
    names = sorted(gguf_cases.CASES)
    files = []
    for number, name in enumerate(names if every else names[::6]):
        _, path = gguf_cases.make(name, folder / str(number))
        files.append((path.read_bytes(), _places(path)))
    # The tokenizer takes most of the time, and has a target of its own.
    stack.enter_context(mock.patch("flexgen_h2o.models.gguf.conversion.save_tokenizer",
                                   lambda header, folder: []))

    def draw(rng: random.Random) -> bytes:
        good, places = rng.choice(files)
        raw = bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            start, nbytes = rng.choice(places)
            if rng.random() < 0.2:  # a number of another place, such as another shape
                other, _ = rng.choice(places)
                raw[start : start + nbytes] = raw[other : other + nbytes]
            elif nbytes in (1, 4, 8):
                number = rng.choice((*NUMBERS, *range(40)))
                raw[start : start + nbytes] = struct.pack("<Q", number)[:nbytes]
            else:  # a text
                raw[start + rng.randrange(nbytes)] = rng.randrange(32, 127)
        return bytes(raw)

    path = folder / "case.gguf"

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        try:
            source = find_model(EngineArgs(model=str(path), dtype="float32", weight_cache=None,
                                           progress=False), Device())
            checkpoint, names = source.open(on_disk=False, progress=lambda done, total: None)
            with checkpoint:
                for name, spec in source.weights.by_name().items():
                    dtype, shape = source.weight_format.stored(spec)
                    if torch.Size(shape).numel() < MAX_READ:
                        checkpoint.read(names[name], torch.empty(shape, dtype=dtype))
        finally:
            shutil.rmtree(cache_dir() / "converted", ignore_errors=True)

    return Target(draw, read)


def _places(path: Path) -> list[tuple[int, int]]:
    """Return offset and bytes of each value, name, shape, type and offset of a GGUF file."""
    reader = gguf.GGUFReader(path)
    base = reader.data.__array_interface__["data"][0]
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    parts = [part for field in fields if not field.name.startswith("tokenizer.ggml.")
             for part in field.parts if part.nbytes]
    return [(part.__array_interface__["data"][0] - base, part.nbytes) for part in parts]


# Structured outputs


def _structured_outputs() -> Target:
    """Return the target of forms, which some tokens of a text follow."""
    tokenizer = tiny_tokenizer("byte-level")
    compiler = GrammarCompiler(tokenizer, len(tokenizer))

    def draw(rng: random.Random) -> bytes:
        kind = rng.choice(("json", "regex", "grammar", "choice"))
        if kind == "json":
            value = changed(rng, rng.choice(SCHEMAS))
        elif kind == "choice":
            value = changed(rng, ["so", "so so", "日本", ""])
        else:
            good = rng.choice(PATTERNS if kind == "regex" else GRAMMARS).encode()
            value = damaged(rng, good).decode("utf-8", "replace")
        return json.dumps([kind, value, rng.randrange(1 << 30)]).encode()

    def read(raw: bytes) -> None:
        kind, value, seed = json.loads(raw)
        masks = compiler.masks(StructuredOutputs(**{kind: value}), _ENDS)
        rng, text = random.Random(seed), Request(0, [1])
        while len(text.generated) < _TOKENS:
            logits = masks.apply(torch.zeros(1, len(tokenizer)), [text])
            token = rng.choice(torch.nonzero(logits[0] == 0)[:, 0].tolist())
            if token in _ENDS:
                break
            text.generated.append(token)
        masks.forget(text)

    return Target(draw, read)


# Drafts


def _drafts(folder: Path, stack: ExitStack) -> Target:
    """Return the target of requests, whose outputs must not depend on drafts, bit by bit."""
    def open_llm(**options) -> LLM:
        return stack.enter_context(LLM(str(folder / "model"), dtype="float32", progress=False,
                                       device="cpu", batch_invariant=True, **options))

    drafting = {"speculate": "ngram", "num_speculative_tokens": 5}
    h2o = H2OConfig(heavy_tokens=3, recent_tokens=4)
    stack.enter_context(mock.patch.object(DraftAutotune, "length", lambda self, sequences: 99))
    pairs = [(open_llm(**options), open_llm(policy=Policy(**drafting), **options))
             for options in ({}, {"h2o": h2o})]

    def draw(rng: random.Random) -> bytes:
        words = [rng.randrange(3, 16) for _ in range(rng.randrange(1, 5))]
        prompts = [(words * 9)[: rng.randrange(1, 20)] for _ in range(rng.randrange(1, 4))]
        options = {"max_new_tokens": rng.randrange(1, 12), "repetition_penalty": 1.1,
                   "eos_token_id": rng.choice((-1, 7)), "logprobs": 1}
        if rng.random() < 0.5:
            options |= {"do_sample": True, "temperature": 0.7, "seed": rng.randrange(99)}
        case = [rng.randrange(len(pairs)), prompts, options]
        if rng.random() < 0.3:
            case[2] = changed(rng, options)
        return json.dumps(case).encode()

    def read(raw: bytes) -> None:
        number, prompts, options = json.loads(raw)
        if not isinstance(options, dict):
            return
        plain, drafted = ([(output.token_ids, output.log_probs)
                           for output in llm.generate(prompts, **options)] for llm in pairs[number])
        assert plain == drafted

    return Target(draw, read)


# HTTP


def _http(folder: Path, stack: ExitStack) -> Target:
    """Return the target of bytes that a client sends: answers are below 500, and nothing is logged
    as an error of the server's.
    """
    served = stack.enter_context(serving([*flags(str(folder / "model"), folder / "data"),
                                          "--max-model-len", "24", "--max-file-size", "4KB"]))
    port = httpx.URL(served.url).port
    # The first chat starts the process of the chat template.
    served.http.post("/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "w3"}], "max_tokens": 1})
    log = logging.getLogger("uvicorn.error")
    errors = stack.enter_context(mock.patch.object(log, "error"))
    file_id = served.upload([request("r", prompt="w3", max_tokens=1)])
    completion = {"prompt": "w3 w4", "max_tokens": 2, "temperature": 0.5, "seed": 1, "stop": ["x"],
                  "logprobs": 1, "n": 1, "echo": False, "logit_bias": {"5": 1},
                  "stop_token_ids": [7], "min_tokens": 1, "response_format": {"type": "text"}}
    bodies = {
        "/v1/completions": completion,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "w3"}], "stream": True,
                                 "max_tokens": 2, "stream_options": {"include_usage": True}},
        "/v1/batches": {"input_file_id": file_id, "endpoint": "/v1/completions",
                        "completion_window": "24h", "metadata": {"a": "b"}}}
    form = (b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
            b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
            b'{"prompt": "w3"}\r\n--b--\r\n')
    paths = ("/v1/files", f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", "/v1/batches",
             "/v1/models", "/metrics", "/health", "/", "/static/page.js", "/v1/files?limit=1")

    def draw(rng: random.Random) -> bytes:
        kind, more = rng.randrange(8), b""
        if kind == 0:
            method = rng.choice(("GET", "DELETE", "PUT", "HEAD"))
            path, body = "/v1/files/file-0" if method == "DELETE" else rng.choice(paths), b""
        elif kind == 1:
            method, path = "POST", "/v1/files"
            body = damaged(rng, form) if rng.random() < 0.8 else form
            more = b"Content-Type: multipart/form-data; boundary=b\r\n"
        else:
            method, path = "POST", rng.choice(sorted(bodies))
            body = json_case(rng, bodies[path])
        head = b"%s %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n%s" % (
            method.encode(), path.encode(), port, more)
        if kind == 2:
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            head += b"Transfer-Encoding: chunked\r\n"
        else:
            head += b"Content-Length: %d\r\n" % len(body)
        raw = head + b"\r\n" + body
        return damaged(rng, raw) if rng.random() < 0.3 else raw

    def read(raw: bytes) -> None:
        answer = b""
        with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE) as client:
            try:
                client.sendall(raw)
                while part := client.recv(1 << 16):
                    answer += part
            except (ConnectionError, TimeoutError):  # closed, or it waits for the rest
                pass
        statuses = [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d+)", answer, re.M)]
        assert not any(status >= 500 for status in statuses), answer
        assert not errors.called, errors.call_args
        if not statuses:
            assert served.http.get("/health").status_code == 200
        if not statuses or statuses[0] >= 400:
            raise UserError("refused")

    return Target(draw, read, port)
