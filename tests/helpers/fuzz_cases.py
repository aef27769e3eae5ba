"""Fuzz targets: valid files, mutations of them, and the parsers that read them.

Cases are drawn from a `random.Random`.
"""

import contextlib
import copy
import io
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml

from flexgen_h2o.cli.launch import read_prompts
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import load_yaml
from flexgen_h2o.commands import generate
from flexgen_h2o.engine.args import EngineArgs
from flexgen_h2o.engine.source import find_model
from flexgen_h2o.engine.tokenizer import load_tokenizer
from flexgen_h2o.models.checkpoint_files import SafetensorsCheckpoint, open_checkpoint
from flexgen_h2o.models.gguf.checkpoint import read_gguf
from flexgen_h2o.models.gguf.conversion import convert_gguf
from flexgen_h2o.models.safetensors_io import write_safetensors
from flexgen_h2o.planning.hardware import load_hardware
from flexgen_h2o.requests import request as requests
from flexgen_h2o.storage.device import Device

MAX_READ = 1 << 20  # elements of a tensor that a case reads
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64 - 1, -2**63, 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), "", " ", "0", "-1", "1e999", "nan", "a" * 5000, "\0", "\n",
    "\x1b[2J", "\ud800", "\u2028", "../x", "/etc/passwd", "..\\x", "C:\\x", "file:///x", "{{x}}",
    "%s%n", [], {}, [[]], [0] * 999, {"": {}}, [None, "x", 1], {"a": {"b": {"c": []}}})
_BETWEEN = "\x1f"  # the words of a command line
NUMBERS = (0, 1, 3, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
CONFIG = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8,
    "hidden_act": "silu", "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "attention_bias": False, "eos_token_id": [2],
    "bos_token_id": 1, "dtype": "float32", "head_dim": 4, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}
SHAPES = {
    "model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,),
    **{f"model.layers.0.{name}.weight": shape for name, shape in {
        "input_layernorm": (8,), "post_attention_layernorm": (8,), "self_attn.q_proj": (8, 8),
        "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (8, 8), "mlp.up_proj": (8, 8), "mlp.down_proj": (8, 8)}.items()}}


# Mutations


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """Return the bytes with some changed, deleted, repeated or inserted."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            number = rng.choice(NUMBERS)
            size = rng.choice((4, 8))
            data[place : place + size] = struct.pack("<Q", number)[:size]
        elif kind == 2:
            del data[place : place + rng.choice((1, 4, 8, 64))]
        elif kind == 3:
            data[place:place] = data[place : place + rng.choice((1, 8, 64))]
        elif kind == 4:
            del data[place:]
        else:
            data[place:place] = rng.choice(
                (b"[", b"{", b'"', b"\0", b"\xff", b"-", b"9" * 30, b"*a"))
    return bytes(data)


def changed(rng: random.Random, value: Any) -> Any:
    """Return a JSON value with some parts replaced, deleted, nested or copied elsewhere."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 5))):
        places = list(_places(value))
        if not places:
            return rng.choice(VALUES)
        holder, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other, place = rng.choice(places)
            holder[key] = copy.deepcopy(other[place])
        elif kind == 2:
            for _ in range(rng.choice((1, 5, 20))):
                holder[key] = [holder[key]]
        elif kind == 3 and isinstance(holder, dict):
            holder[rng.choice(("", "x", "\n", "__metadata__", str(key) + "x"))] = holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(inner):
        yield value, key
        if isinstance(child, (dict, list)):
            yield from _places(child)


def json_case(rng: random.Random, good: Any) -> bytes:
    """Return the bytes of a JSON value, changed or damaged or both."""
    raw = json.dumps(changed(rng, good) if rng.random() < 0.8 else good,
                     ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    return damaged(rng, raw) if rng.random() < 0.3 else raw


# Targets


@dataclass(frozen=True)
class Target:
    """A parser of untrusted input: `draw` makes the bytes that `read` gets.

    `read` may raise `UserError` and nothing else, and connect to `port` of this machine.
    """

    draw: Callable[[random.Random], bytes]
    read: Callable[[bytes], object]
    port: int | None = None


def make_model(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a LLaMA of a few kilobytes with a tokenizer; a few values recur in its weights."""
    def values(name: str) -> torch.Tensor:
        pattern = (torch.arange(torch.Size(SHAPES[name]).numel()) * 7919 % 31 - 15) / 16
        return (1 + pattern / 8 if "norm" in name else pattern).to(dtype).reshape(SHAPES[name])

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors",
                      {name: (dtype, shape) for name, shape in SHAPES.items()},
                      lambda name: iter([values(name)]))
    vocab = {f"w{number}": number for number in range(16)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [{
            "id": 2, "content": "w2", "special": True, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False}],
        "pre_tokenizer": {"type": "Whitespace"}, "normalizer": None, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2",
        "chat_template": "{{ x }}"}))


def make_gguf(path: Path) -> None:
    """Write a GGUF file of a few kilobytes."""
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    for add, value in ((writer.add_context_length, 32), (writer.add_embedding_length, 8),
                       (writer.add_block_count, 1), (writer.add_feed_forward_length, 8),
                       (writer.add_head_count, 2), (writer.add_head_count_kv, 1),
                       (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, 16),
                       (writer.add_tokenizer_model, "llama"), (writer.add_eos_token_id, 2),
                       (writer.add_token_list, [f"w{number}" for number in range(16)]),
                       (writer.add_token_scores, [0.0] * 16), (writer.add_token_types, [1] * 16)):
        add(value)
    for name, shape in {"token_embd.weight": (16, 8), "output_norm.weight": (8,),
                        "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (4, 8)}.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def targets(folder: Path) -> dict[str, Target]:
    """Return all targets by name; `folder` is empty and theirs."""
    model = folder / "model"
    make_model(model)
    make_gguf(folder / "good.gguf")
    targets = {"safetensors": _safetensors(folder), "index": _index(folder),
             "config": _file_of(model, "config.json", CONFIG, lambda: _find(model)),
             "generation config": _file_of(model, "generation_config.json",
                                           {"eos_token_id": [2, 3]}, lambda: _find(model)),
             "gguf": _gguf(folder, read_gguf),
             "gguf converted": _gguf(folder, convert_gguf),
             "yaml": _yaml(folder), "hardware": _hardware(folder), "flags": _flags(),
             "prompts": _prompts(folder)}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        good = json.loads((model / name).read_text())
        targets[name] = _file_of(model, name, good, lambda: load_tokenizer(model))
    return targets | {"requests": _requests()}


def _find(folder: Path) -> object:
    source = find_model(EngineArgs(model=str(folder), dtype="float32", weight_bits=16,
                                   progress=False), Device())
    return source.config.num_parameters()


def _file_of(folder: Path, name: str, good: Any, read: Callable[[], object]) -> Target:
    """Return the target of a JSON file of the model; each case restores the file."""
    path = folder / name
    kept = path.read_bytes() if path.exists() else None

    def case(raw: bytes) -> None:
        path.write_bytes(raw)
        try:
            read()
        finally:
            path.unlink() if kept is None else path.write_bytes(kept)

    return Target(lambda rng: json_case(rng, good), case)


def _safetensors(folder: Path) -> Target:
    path = folder / "case.safetensors"
    good = (folder / "model" / "model.safetensors").read_bytes()
    length = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]

    def draw(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return damaged(rng, good)
        raw = json_case(rng, header)
        size = len(raw) if rng.random() < 0.9 else rng.choice(NUMBERS)
        return struct.pack("<Q", size) + raw + data[: rng.choice((len(data), len(data), 0, 99))]

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        with SafetensorsCheckpoint(path) as checkpoint:
            for name in checkpoint.names():
                shape = checkpoint.info(name).shape
                if torch.Size(shape).numel() < MAX_READ and checkpoint.info(name
                                                                             ).dtype.is_floating_point:
                    checkpoint.read(name, torch.empty(shape))

    return Target(draw, read)


def _index(folder: Path) -> Target:
    home, shard = folder / "sharded", "model-00001-of-00001.safetensors"
    home.mkdir()
    (home / shard).write_bytes((folder / "model" / "model.safetensors").read_bytes())
    good = {"metadata": {"total_size": 9}, "weight_map": dict.fromkeys(SHAPES, shard)}

    def read(raw: bytes) -> None:
        (home / "model.safetensors.index.json").write_bytes(raw)
        open_checkpoint(home).close()

    return Target(lambda rng: json_case(rng, good), read)


def _gguf(folder: Path, work: Callable[[Path], object]) -> Target:
    path = folder / "case.gguf"
    work(folder / "good.gguf")  # loads libraries
    good = (folder / "good.gguf").read_bytes()
    values = good.index(b"blk.0.attn_q")  # everything before it is read first

    def draw(rng: random.Random) -> bytes:
        return damaged(rng, good[:values]) + good[values:] if rng.random() < 0.7 else damaged(
            rng, good)

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        work(path)

    return Target(draw, read)


def _yaml(folder: Path) -> Target:
    path = folder / "case.yaml"
    named = ("model", "path")  # files of the user's choice, which are read wherever they are
    good = {name: value for name, value in RunConfig().to_dict().items()
            if value is not None and name not in named}

    def draw(rng: random.Random) -> bytes:
        keys = rng.sample(sorted(good), rng.randrange(1, 6))
        value = {key: good[key] for key in keys}
        aliased = b"a: &a [1, 2]\n" * (rng.random() < 0.1)
        return aliased + _yaml_case(rng, value)

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        RunConfig.from_mapping(load_yaml(path)).to_dict()

    return Target(draw, read)


def _yaml_case(rng: random.Random, good: dict[str, Any]) -> bytes:
    """Return the bytes of a YAML mapping, changed or damaged or both. Values are JSON."""
    value = changed(rng, good) if rng.random() < 0.8 else good
    if isinstance(value, dict) and rng.random() < 0.8:
        text = "".join(f"{key}: {json.dumps(item)}\n" for key, item in value.items())
    else:
        text = json.dumps(value)
    raw = text.encode("utf-8", "surrogatepass")
    return damaged(rng, raw) if rng.random() < 0.4 else raw


def _hardware(folder: Path) -> Target:
    path = folder / "hardware.yaml"
    known = sorted((Path(__file__).parents[2] / "configs").glob("hardware/*.yaml"))
    raw = known[0].read_bytes()
    good = yaml.safe_load(raw)

    def draw(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return damaged(rng, raw)
        return yaml.safe_dump(changed(rng, good)).encode("utf-8", "surrogatepass")

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        load_hardware(path)

    return Target(draw, read)


def _flags() -> Target:
    names = [f"--{spec.name.replace('_', '-')}" for spec in fields(RunConfig)]
    words = [*(str(value) for value in VALUES if "/" not in str(value)),
             "4", "16", "0.5", "auto", "cpu", "full", "100", "0"]

    def draw(rng: random.Random) -> bytes:
        argv: list[str] = []
        for _ in range(rng.randrange(6)):
            argv.append(rng.choice(names) if rng.random() < 0.9 else rng.choice(words))
            argv += rng.choices(words, k=rng.choice((0, 1, 1, 1, 2, 4, 6)))
        return os.fsencode(_BETWEEN.join(word.encode("utf-8", "surrogatepass").decode(
            "utf-8", "surrogateescape") for word in argv))

    def read(raw: bytes) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            generate.parse_args(os.fsdecode(raw).split(_BETWEEN) if raw else [])

    return Target(draw, read)


def _prompts(folder: Path) -> Target:
    good = [{"prompt": "some text"}, {"prompt": "\u2028 é \\n"}, {"prompt": "x" * 99, "id": 3}]

    def draw(rng: random.Random) -> bytes:
        lines = [json_case(rng, line) if rng.random() < 0.3 else json.dumps(line).encode()
                 for line in good]
        raw = rng.choice((b"\n", b"\r\n", b"\n\n")).join(lines)
        return damaged(rng, raw) if rng.random() < 0.3 else raw

    def read(raw: bytes) -> None:
        path = folder / ("prompts.jsonl" if raw[:1] != b"\n" else "prompts.txt")
        path.write_bytes(raw)
        read_prompts(str(path))

    return Target(draw, read)


def _requests() -> Target:
    """Return the target of the lines of a batch job."""
    defaults = requests.Defaults(models=("m",), max_tokens=4)
    sampling = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 1, "n": 1,
                "presence_penalty": 0.1, "frequency_penalty": 0.1, "top_k": 5, "min_p": 0.1,
                "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": False,
                "stop_token_ids": [5], "logit_bias": {"3": 1.5}, "add_special_tokens": True,
                "response_format": {"type": "json_object"}}
    good = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True,
            "top_logprobs": 2, "chat_template_kwargs": {"a": 1}, "documents": [{"text": "x"}],
            "reasoning_effort": "low", "tools": [], "stream": False, **sampling}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {
            "model": "m", "prompt": [1, 2], "logprobs": 2, "echo": False, **sampling}},
        {"id": "c", "prompt": "some text"}]
    return Target(lambda rng: json_case(rng, rng.choice(good)),
                  lambda raw: requests.read_request(raw, 1, defaults))
