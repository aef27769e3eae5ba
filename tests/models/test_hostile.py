"""Checkpoints made to do harm: one line, status 2, bounded memory, and nothing outside is touched.

Damaged files without intent are in test_checkpoint.py, test_sources.py and cli/test_bad_input.
"""

import json
import os
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.error_cases import command_refused, error_line, refused
from helpers.gguf_cases import make
from helpers.selection import full
from helpers.tiny_tokenizers import with_words

from flexgen_h2o.cli.values import load_yaml
from flexgen_h2o.commands import generate
from flexgen_h2o.engine.tokenizer import load_tokenizer
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.gguf.header import read_header
from flexgen_h2o.models.sources import checkpoint_folder

MAX_MEMORY = 1 << 30  # that a refusal may take for a moment
MAX_SECONDS = 20  # of CPU time, whatever else the machine does
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FILE = "model.safetensors"


class Watch:
    """Files that are opened for writing or removed, and programs that are started, while on."""

    def __init__(self) -> None:
        self.on, self.seen = False, []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, (str, bytes)) and (flags or 0) & WRITES:
                self.seen.append(os.fsdecode(path))
        elif event in ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree"):
            self.seen.append(str(arguments[0]))
        elif event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect"):
            self.seen.append(f"{event} {arguments[0]}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture
def harmless(tmp_path, watch, monkeypatch) -> Iterator[None]:
    """Holds a test to `MAX_MEMORY` more than before, `MAX_SECONDS`, and files in its folder.

    There are home, caches, temporary files and the current folder.
    """
    for name, folder in {"HOME": "home", "FLEXGEN_H2O_CACHE": "cache", "TMPDIR": "tmp"}.items():
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # otherwise the cached folder stays
    monkeypatch.chdir(tmp_path)

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before, began = status("VmRSS"), time.process_time()
    watch.on, watch.seen = True, []
    yield
    watch.on = False
    assert time.process_time() - began < MAX_SECONDS
    assert status("VmHWM") - before < MAX_MEMORY
    outside = [path for path in watch.seen if not path.startswith((str(tmp_path), "/dev/", "/proc"))
               and "__pycache__" not in path]
    assert outside == []


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    """A copy of a tiny model with a tokenizer."""
    return Path(with_words(tiny_model("llama").folder, tmp_path / "model"))


def refuse(capfd, *words: str, model: str = "model") -> str:
    """The line with which the command refuses the model."""
    return command_refused(generate.main, capfd, [
        "--model", model, "--prompt", "w1", "--gen-len", "2", "--device", "cpu", "--no-log",
        "--offload-dir", "offload"], *words)


# Safetensors


def header(entries: object, *, length: int | None = None) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def entry(shape=(2,), offsets=(0, 8), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = {
    "terabytes": (header({"w": entry()}, length=1 << 42), "header length is 4398046511104"),
    "more than there is": (header({"w": entry()}, length=1 << 24), "is truncated"),
    "overlapping": (header({"a": entry(), "b": entry(offsets=(4, 12))}), "starts at byte"),
    "the same bytes": (header({"a": entry(), "b": entry()}), "starts at byte"),
    "a hole": (header({"a": entry(offsets=(8, 16))}), "starts at byte"),
    "past the end": (header({"a": entry((1 << 50,), (0, 1 << 52))}), "is truncated"),
    "negative": (header({"a": entry(offsets=(-8, 0))}), "does not describe tensor a"),
    "negative shape": (header({"a": entry((-1, -2))}), "does not describe tensor a"),
    "huge shape": (header({"a": entry((10**4000, 10**4000))}), "does not describe tensor a"),
    "a shape that wraps": (header({"a": entry((1 << 32, 1 << 32), (0, 0))}), "takes"),
    "many dimensions": (header({"a": entry([1 << 60] * 10**5)}), "does not describe tensor a"),
    "fractions": (header({"a": entry((2.0,))}), "does not describe tensor a"),
    "dtype": (header({"a": entry(dtype="PICKLE")}), "has dtype PICKLE"),
    "dtype of a kind": (header({"a": entry(dtype=["F32"])}), "does not describe tensor a"),
    "a name in lines": (header({"a\nb\x1b[2J": entry(dtype="X")}),
                        r"tensor a b\x1b[2J has dtype X"),
    "a long name": (header({"a" * 10**6: entry(dtype="X")}), " ... "),
    "a count that is true": (header({"a": entry((True, 2))}), "does not describe tensor a"),
    "three offsets": (header({"a": entry(offsets=(0, 8, 9))}), "does not describe tensor a"),
    "no offsets": (header({"a": {"dtype": "F32"}}), "does not describe tensor a"),
    "too few bytes": (header({"a": entry(offsets=(0, 4))}), "takes 8"),
    "backwards": (header({"a": entry(offsets=(8, 0))}), "takes 8"),
    "bytes that follow": (header({"a": entry((1,), (0, 4))}), "4 bytes follow"),
    "no object": (header([1]), "not a JSON object"),
    "a key twice": (header(b'{"a": 1, "a": 2}'), "is not JSON"),
    "depth": (header(b"[" * 10**6), "is not JSON"),
    "depth of an entry": (header(b'{"a":' * 10**5 + b"1" + b"}" * 10**5), "is not JSON"),
    "digits": (header(b'{"a": ' + b"9" * 10**6 + b"}"), "is not JSON"),
    "lists": (header(b'{"a": [' + b"[]," * (10**5) + b"[]]}"), "does not describe tensor a")}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(tmp_path, harmless, name):
    raw, words = HEADERS[name]
    (tmp_path / FILE).write_bytes(raw + bytes(8))
    assert len(refused(lambda: open_checkpoint(tmp_path), FILE, words)) < 5000


def test_sparse_file_of_terabytes(model, harmless, capfd):
    """Sparse: it takes no room, and is longer than any memory."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", FILE):
        kept = (model / name).read_bytes() if (model / name).exists() else None
        with open(model / name, "wb") as file:
            file.truncate(1 << 43)
        refuse(capfd, "header length" if name == FILE else "more than any model's", name)
        (model / name).write_bytes(kept) if kept else (model / name).unlink()


# Folders


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json",
                                  "model.safetensors.index.json", "chat_template.jinja"])
def test_symlinks_out_of_the_folder_are_refused(model, harmless, capfd, name):
    """What a text file says may come to stand in outputs: another file of the user's must not."""
    secret = model.parent / "secret"
    secret.write_text('{"password": "x"}')
    if "index" in name:
        (model / FILE).unlink()
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    line = refuse(capfd, f"{name} is a link out of the model's folder, to {secret}")
    assert "password" not in line
    (model / name).unlink()
    (model / name).symlink_to("../model/there")  # within it all may be
    (model / "there").write_text("{")
    if "jinja" not in name:  # of which "{" is a good one
        assert "link out" not in refuse(capfd)


# Code


def test_checkpoint_code_is_never_run(model, harmless, capfd):
    """Neither archives that unpack to far more, nor the code that configurations name."""
    shutil.move(model / FILE, model.parent / FILE)
    target = model / "pytorch_model.bin"
    torch.save({"w": torch.ones(1)}, target)
    kept = zipfile.ZipFile(target).namelist()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in kept:
            bomb.writestr(name, bytes(1 << 24))  # that packs to a thousandth
    assert target.stat().st_size < 1 << 20
    refuse(capfd, "was not loaded")
    target.unlink()
    shutil.move(model.parent / FILE, model / FILE)
    (model / "evil.py").write_text("import os\nos.system('touch ran')\n")
    code = {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M",
                         "AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "EvilTokenizer"}
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(values | code))
    for unknown in (False, True):
        if unknown:  # so that only the code could read it
            values["model_type"] = "evil"
            (model / "config.json").write_text(json.dumps(values | code))
        status = generate.main(["--model", "model", "--prompt", "w1", "--gen-len", "2", "--device",
                                "cpu", "--no-log", "--offload-dir", "offload"])
        out, err = capfd.readouterr()
        if status:
            error_line(err)
        assert status in (0, 2), err
    assert not list(model.parent.rglob("ran"))


# Configurations


VALUES = [10**400, -1, 1e308, float("nan"), float("inf"), True, None, "9" * 10**6, [], {}, [[]] * 9,
          "../x", "\0", "\ud800", "a\nb\x1b[2J"]


@pytest.mark.parametrize("key", [
    "num_hidden_layers", "rope_parameters", "eos_token_id",
    *full("dtype", "quantization_config", "hidden_size", "vocab_size", "head_dim",
          "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "max_position_embeddings", "hidden_act", "rms_norm_eps", "model_type",
          "tie_word_embeddings", "architectures")])
def test_values_of_a_config(model, harmless, capfd, key):
    given = json.loads((model / "config.json").read_text())
    for value in VALUES:
        (model / "config.json").write_text(json.dumps(given | {key: value}))
        status = generate.main(["--model", "model", "--prompt", "w1", "--gen-len", "1", "--device",
                                "cpu", "--no-log", "--offload-dir", "offload"])
        _, err = capfd.readouterr()
        assert status == 0 or status == 2 and len(error_line(err)) < 5000, (value, err)


DEEP = b'{"a":' * 10**5 + b"1" + b"}" * 10**5


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json",
                                  "tokenizer_config.json", "special_tokens_map.json",
                                  f"{FILE}.index.json"])
@pytest.mark.parametrize("raw", [DEEP, b"\xff\xfe{", b'{"a": ' + b"9" * 10**6 + b"}", b"[1]", b""],
                         ids=["deep", "bytes", "digits", "list", "empty"])
def test_invalid_json_files(model, harmless, capfd, name, raw):
    if "index" in name:
        (model / FILE).unlink()
    (model / name).write_bytes(raw)
    status = generate.main(["--model", "model", "--prompt", "w1", "--gen-len", "1", "--device",
                            "cpu", "--no-log", "--offload-dir", "offload"])
    _, err = capfd.readouterr()
    assert status == 2 or name == "special_tokens_map.json" and status == 0, err
    if status:
        error_line(err)


@pytest.mark.parametrize("change", [
    lambda file: file["model"].update(vocab={"w0": -1}),
    lambda file: file.update(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}),
    lambda file: file.update(model={"type": "Unigram", "vocab": [], "unk_id": 10**9}),
    lambda file: file.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(" * 10**4},
                                              "behavior": "Isolated", "invert": False}),
    lambda file: file.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    lambda file: file.update(added_tokens=[{"id": 10**12, "content": "x"}]),
    lambda file: file.update(decoder={"type": "Sequence", "decoders": [{}] * 10**5})], ids=range(7))
def test_tokenizers(model, harmless, change):
    file = json.loads((model / "tokenizer.json").read_text())
    change(file)
    (model / "tokenizer.json").write_text(json.dumps(file))
    refused(lambda: load_tokenizer(model), "the tokenizer in", "get its files again")


BOMBS = {
    "laughs": "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
    "merges": "a: &a {x: 1}\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 20)}], k{i}: 1}}\n"
        for i in range(12)),
    "itself": "model: &a [*a]\n",
    "merged with itself": "model: &a {<<: *a}\n",
    "keys": "? &a [*a]\n: 1\n",
    "depth": "model: " + "[" * 10**4,
    "size": "model: " + "a" * (2 << 20),
    "objects": "model: !!python/object/apply:os.system ['touch ran']\n",
    "digits": "gen_len: " + "9" * 10**5,
    "sixties": "gen_len: " + ":".join(["59"] * 10**4),
    "no date": "model: 2020-99-99\n"}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("flag", ["--config", *full("--hh-ratio", "--hardware")])
def test_yaml_bombs(tmp_path, harmless, capfd, name, flag):
    (tmp_path / "bomb.yaml").write_text(BOMBS[name])
    extra = ["--plan-only"] if flag == "--hardware" else []
    command_refused(generate.main, capfd, [flag, "bomb.yaml", *extra])
    assert not (tmp_path / "ran").exists()


def test_yaml_aliases_are_accepted(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {x: 1, y: [2, 3]}\nb: {<<: *a, <<: *a, x: 4}\nc: *a\n")
    assert load_yaml(tmp_path / "a.yaml")["b"] == {"x": 4, "y": [2, 3]}


def test_a_key_is_given_once(tmp_path):
    (tmp_path / "a.yaml").write_text("a: {x: 1}\nb:\n  1: x\n  '1': x\n  y: 1\n  'y': 2\n")
    refused(lambda: load_yaml(tmp_path / "a.yaml"), "line 6 gives 'y' again", "leave one out")


# GGUF


def gguf(*, tensors: int = 0, values: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, values) + body


def text(word: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(word) if length is None else length) + word


def listed(kind: int, count: int) -> bytes:
    return text(b"general.x") + struct.pack("<IIQ", 9, kind, count)


def tensor(dims: int = 1, size: int = 1, offset: int = 0, kind: int = 0) -> bytes:
    return text(b"w") + struct.pack("<I", dims) + struct.pack("<Q", size) * min(dims, 9) + \
        struct.pack("<IQ", kind, offset)


def number(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


GGUFS = {
    "tensors": (gguf(tensors=1 << 60), "1152921504606846976 tensors"),
    "values": (gguf(values=1 << 60), "1152921504606846976 values"),
    "a long key": (gguf(values=1, body=text(b"x", 1 << 60)), "a text of"),
    "a key past the end": (gguf(values=1, body=text(b"x", 999)), "goes on past"),
    "a list of numbers": (gguf(values=1, body=listed(0, 1 << 60)), "a list of"),
    "a list of texts": (gguf(values=1, body=listed(8, 1 << 12)), "goes on past"),
    "a list of lists": (gguf(values=1, body=listed(9, 1) * 999), "unknown type 9"),
    "type": (gguf(values=1, body=text(b"x") + struct.pack("<I", 99)), "unknown type 99"),
    "dimensions": (gguf(tensors=1, body=tensor(dims=1 << 31)), "has 2147483648 dimensions"),
    "no dimensions": (gguf(tensors=1, body=tensor(dims=0)), "has 0 dimensions"),
    "offset": (gguf(tensors=1, body=tensor(offset=(1 << 64) - 1)), "lies past its end"),
    "size": (gguf(tensors=1, body=tensor(size=1 << 62)), "GGUF"),
    "version": (gguf(version=99), "version 99"),
    "no architecture": (gguf(), "architecture 'unknown'"),
    "twice a value": (gguf(values=2, body=number(b"x", 1) * 2), "two values x"),
    "twice a tensor": (gguf(tensors=2, body=tensor() * 2), "two tensors w"),
    "a long name": (gguf(values=1, body=text(b"x" * 5000)), "a name of 5000 bytes"),
    "not UTF-8": (gguf(values=1, body=text(b"\xff") + bytes(99)), "not UTF-8"),
    "alignment": (gguf(values=1, body=number(b"general.alignment", 3)), "alignment of 3"),
    "parts of blocks": (gguf(tensors=1, body=tensor(size=31, kind=2)), "in blocks of 32"),
    "known type": (gguf(tensors=1, body=tensor(kind=16)), "GGUF type IQ2_XXS"),
    "unknown type": (gguf(tensors=1, body=tensor(kind=99)), "GGUF type number 99"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "one of several": (gguf(values=1, body=number(b"split.count", 2)), "one of 2 files")}


@pytest.mark.parametrize("name", GGUFS)
def test_gguf_headers(tmp_path, harmless, name):
    raw, words = GGUFS[name]
    (tmp_path / "bad.gguf").write_bytes(raw)
    refused(lambda: checkpoint_folder(str(tmp_path / "bad.gguf")), "bad.gguf", words)
    with open(tmp_path / "bad.gguf", "r+b") as file:
        file.truncate(1 << 43)
    refused(lambda: checkpoint_folder(str(tmp_path / "bad.gguf")), "bad.gguf")


def tiny_gguf(folder: Path) -> Path:
    return make("llama", folder)[1].rename(folder / "model.gguf")


def change_value(raw: bytes, key: bytes, value: bytes) -> bytes:
    """A GGUF file with another number of 4 bytes under a key."""
    place = raw.index(key) + len(key) + 4
    return raw[:place] + value + raw[place + 4 :]


@pytest.mark.parametrize(("key", "value"), [
    (b"llama.block_count", b"\xff\xff\xff\x7f"), (b"llama.embedding_length", b"\xff\xff\xff\x7f"),
    (b"llama.attention.head_count", b"\0\0\0\0"), (b"llama.attention.head_count_kv", b"\7\0\0\0"),
    (b"llama.feed_forward_length", b"\xff\xff\xff\xff"), (b"llama.context_length", b"\xff" * 4),
    (b"llama.rope.freq_base", b"\0\0\xc0\x7f"), (b"general.architecture", b"\xff\xff\xff\xff")])
def test_gguf_values(tmp_path, harmless, capfd, key, value):
    source = tiny_gguf(tmp_path)
    read_header(source)
    source.write_bytes(change_value(source.read_bytes(), key, value))
    refuse(capfd, model="model.gguf")


def test_a_gguf_tensor_of_no_columns_and_terabytes_of_rows(tmp_path, harmless, capfd):
    source = tiny_gguf(tmp_path)
    raw, name = source.read_bytes(), b"blk.0.attn_k.weight"
    sizes = raw.index(name) + len(name) + 4  # behind their number
    source.write_bytes(raw[:sizes] + struct.pack("<QQ", 0, 1 << 40) + raw[sizes + 16 :])
    refuse(capfd, "attn_k.weight is empty", model="model.gguf")


def test_too_many_expert_tensors_are_refused(tmp_path, harmless, capfd):
    """Each is a tensor for each of as many experts as there are bytes."""
    body = text(b"general.architecture") + struct.pack("<I", 8) + text(b"qwen3moe")
    for place in range(2):
        body += text(b"blk.%d.ffn_up_exps.weight" % place) + struct.pack(
            "<IQQQIQ", 3, 1, 1, 1 << 17, 0, 0)
    raw = gguf(tensors=2, values=1, body=body)
    (tmp_path / "model.gguf").write_bytes(raw + bytes(1 << 20))
    refuse(capfd, "more tensors than any model", model="model.gguf")
