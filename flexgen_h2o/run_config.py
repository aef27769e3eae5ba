"""The table of command-line flags: one field each, from which all else about them is made.

`flex_opt` builds argparse from the fields' metadata, YAML keys are checked against their names,
and the resolved values are what is saved beside results. Names and meaning are FlexGen's and the
H2O fork's where those have the flag. No torch.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from flexgen_h2o.config import (
    Policy,
    SamplingParams,
    check_bool,
    check_choice,
    check_int,
    check_number,
    parse_percent,
)
from flexgen_h2o.errors import UserError

GROUPS = ("model", "input", "batch and lengths", "policy", "compression", "sampling", "results")
DUMMY = "_DUMMY_"
_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def flag_name(name: str) -> str:
    """The flag of a field: ``gen_len`` is ``--gen-len``."""
    return "--" + name.replace("_", "-")


def _flag(group: str, kind: str, default: object, *, help: str, **rules: object):
    """A field and the metadata of its flag.

    `kind` is text, path, texts, percent, int, float or bool. Rules: `choices`, `low` (a bound),
    `metavar`, `const` (the value of the bare flag), `shown` (the default in words), and `coming`
    (True: anything but the default is refused until the feature is there).
    """
    assert group in GROUPS
    return field(default=default, metadata={"group": group, "kind": kind, "help": help, **rules})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One value for each flag of `flex_opt`, checked. Lengths are tokens, sizes are sequences.

    Raises `UserError` for a value of a wrong type or range, for values that contradict each
    other, and (with "not yet") for a feature that is still to come.
    """

    model: str = _flag(
        "model", "text", "facebook/opt-6.7b", metavar="NAME",
        help="model name, Hugging Face repo id or local folder",
    )
    path: str | None = _flag(
        "model", "path", None, shown="by model name",
        help=f"folder or .gguf file of the weights; {DUMMY} for seeded random weights",
    )
    device: str = _flag(
        "model", "text", "auto", metavar="auto|cpu|cuda[:n]", help="the device that computes",
    )
    dtype: str = _flag(
        "model", "text", "auto", choices=("auto", "float16", "bfloat16", "float32"),
        help="number format of weights, cache and compute",
    )
    prompt: tuple[str, ...] = _flag(
        "input", "texts", (), metavar="TEXT", shown="synthetic prompts",
        help="a prompt as text; give it once for each prompt",
    )
    prompts: str | None = _flag(
        "input", "path", None, metavar="FILE", shown="synthetic prompts",
        help=".txt file of one prompt a line, or .jsonl file with a `prompt` key",
    )
    config: str | None = _flag(
        "input", "path", None, metavar="FILE.yaml", shown="none",
        help="read flags from a file (underscores for dashes); the command line overrides it",
    )
    prompt_len: int = _flag(
        "batch and lengths", "int", 512, low=1,
        help="length of each synthetic prompt (random token ids, EOS ignored), in tokens",
    )
    gen_len: int = _flag(
        "batch and lengths", "int", 32, low=1, help="most tokens to generate for each prompt",
    )
    cut_gen_len: int | None = _flag(
        "batch and lengths", "int", None, low=1, shown="all of --gen-len",
        help="stop after this many tokens and project the times to --gen-len",
    )
    gpu_batch_size: int = _flag(
        "batch and lengths", "int", 4, low=1, help="sequences computed together",
    )
    num_gpu_batches: int = _flag(
        "batch and lengths", "int", 1, low=1,
        help="GPU batches of a block, which share each load of a layer's weights",
    )
    percent: tuple[float, ...] = _flag(
        "policy", "percent", (100, 0, 100, 0, 100, 0), metavar="P",
        help="percent of weights on gpu, cpu; of cache on gpu, cpu; of activations on gpu, cpu "
        "(100 0 if left out); the rest is on disk",
    )
    overlap: bool = _flag(
        "policy", "bool", True, help="run transfers beside compute",
    )
    pin_weight: bool = _flag(
        "policy", "bool", True, help="page-lock weights in host memory (with a GPU)",
    )
    cpu_cache_compute: bool = _flag(
        "policy", "bool", False, coming=True, help="attend on the CPU where the cache is there",
    )
    sep_layer: bool = _flag(
        "policy", "bool", False, coming=True, help="schedule attention and MLP as two layers",
    )
    offload_dir: str = _flag(
        "policy", "path", "~/.cache/flexgen_h2o/offload", metavar="DIR",
        help="folder for what the disk tier writes; emptied at exit",
    )
    hh_ratio: float = _flag(
        "compression", "float", 1.0, coming=True,
        help="heavy hitters to keep, and as many recent tokens, as a fraction of the prompt",
    )
    hh_all: bool = _flag(
        "compression", "bool", True, coming=True,
        help="evict among generated tokens too, not in the prompt alone",
    )
    hh_long_seq: bool = _flag(
        "compression", "bool", False, coming=True,
        help="drop OPT's positions past its table (for speed measurements only)",
    )
    attn_sparsity: float = _flag(
        "compression", "float", 1.0, coming=True, help="fraction of cached values to attend to",
    )
    compress_weight: bool = _flag(
        "compression", "bool", False, coming=True, help="keep weights in 4-bit groups",
    )
    compress_cache: bool = _flag(
        "compression", "bool", False, coming=True, help="keep the KV cache in 4-bit groups",
    )
    do_sample: bool = _flag(
        "sampling", "bool", False, help="sample the next token; otherwise take the likeliest",
    )
    temperature: float = _flag(
        "sampling", "float", 1.0, help="divide logits by this (with --do-sample)",
    )
    top_k: int = _flag(
        "sampling", "int", 50,
        help="sample among this many likeliest tokens; 0 for all (with --do-sample)",
    )
    top_p: float = _flag(
        "sampling", "float", 1.0,
        help="sample among the likeliest tokens of this total probability (with --do-sample)",
    )
    min_p: float | None = _flag(
        "sampling", "float", None, shown="off",
        help="drop tokens below this fraction of the top probability (with --do-sample)",
    )
    repetition_penalty: float = _flag(
        "sampling", "float", 1.0, help="factor against tokens already seen; 1 is none",
    )
    no_repeat_ngram_size: int = _flag(
        "sampling", "int", 0, help="never repeat a run of this many tokens; 0 is off",
    )
    min_new_tokens: int = _flag(
        "sampling", "int", 0, help="tokens to generate before EOS may come",
    )
    ignore_eos: bool = _flag(
        "sampling", "bool", False, help="generate all of --gen-len, past EOS",
    )
    seed: int = _flag(
        "sampling", "int", 0, help="seed of sampling, synthetic prompts and random weights",
    )
    output: str | None = _flag(
        "results", "path", None, metavar="FILE.jsonl", shown="none",
        help="write a line for each prompt: prompt, prompt_tokens, token_ids, text, finish_reason",
    )
    csv: str | None = _flag(
        "results", "path", None, metavar="FILE", shown="none",
        help="append a row of results; bytes, seconds and tokens/s as its header says",
    )
    trace: str | None = _flag(
        "results", "path", None, metavar="FILE.json", shown="none",
        help="write transfers and compute as Chrome trace JSON, in microseconds (ui.perfetto.dev)",
    )
    log_file: str = _flag(
        "results", "path", "auto", metavar="FILE",
        help="append the table of results; auto: a .log here, named after the configuration",
    )
    no_log: bool = _flag(
        "results", "bool", False, help="write no log file",
    )
    verbose: int = _flag(
        "results", "int", 2, low=0, const=3,
        help="print 0: nothing, 1: the table of results, 2: the texts too, 3: the memory plan too",
    )
    debug_mode: str | None = _flag(
        "results", "text", None, coming=True, shown="none", metavar="MODE",
        help="FlexGen's fewer_batch or breakdown",
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _checked(spec, getattr(self, spec.name)))
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(f"--device must be auto, cpu, cuda or cuda:n, got {self.device!r}")
        self._check_lengths()
        self._check_files()
        if not self.do_sample:
            for name in _ONLY_WHEN_SAMPLING:
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise UserError(f"{flag_name(name)} has no effect: add --do-sample")
        self.policy()
        self.sampling()

    def _check_lengths(self) -> None:
        cut = self.cut_gen_len
        if cut is None:
            return
        if cut > self.gen_len:
            raise UserError(f"--cut-gen-len must be at most --gen-len {self.gen_len}, got {cut}")
        if cut == 1 and self.gen_len > 1:
            raise UserError("--cut-gen-len 1 measures no decode step to project from: give 2 up")

    def _check_files(self) -> None:
        if self.prompt and self.prompts:
            raise UserError("give --prompt or --prompts, not both")
        if self.prompts and not self.prompts.endswith((".txt", ".jsonl")):
            raise UserError(f"--prompts must name a .txt or .jsonl file, got {self.prompts!r}")
        seen: dict[str, str] = {}
        for name in ("prompts", "config", "output", "csv", "trace", "log_file"):
            path = getattr(self, name)
            if path is None or path == "auto":
                continue
            other = seen.setdefault(os.path.realpath(path), name)
            if other != name:
                raise UserError(f"{flag_name(other)} and {flag_name(name)} name the same file")

    @property
    def synthetic(self) -> bool:
        """Whether prompts are random token ids, as no text is given."""
        return not self.prompt and self.prompts is None

    def policy(self) -> Policy:
        """The placements, batch sizes and overlap of the run."""
        weights, cache, activations = parse_percent(self.percent)
        return Policy(
            gpu_batch_size=self.gpu_batch_size,
            num_gpu_batches=self.num_gpu_batches,
            weights=weights,
            cache=cache,
            activations=activations,
            overlap=self.overlap,
            cpu_cache_compute=self.cpu_cache_compute,
            pin_weight=self.pin_weight,
        )

    def sampling(self) -> SamplingParams:
        """How tokens are chosen. Synthetic prompts never stop at EOS, as in FlexGen's benchmark."""
        names = ("do_sample", "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
        return SamplingParams(
            max_new_tokens=self.gen_len,
            eos_token_id=-1 if self.ignore_eos or self.synthetic else None,
            seed=self.seed,
            **{name: getattr(self, name) for name in names + _ONLY_WHEN_SAMPLING},
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> RunConfig:
        """Make a config from names and values. An unknown name raises `UserError`."""
        known = [spec.name for spec in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f": did you mean {near[0]}?" if near else ": see --help for the names"
                raise UserError(f"unknown key {name!r}{hint}")
        return cls(**values)

    def to_dict(self) -> dict[str, object]:
        """The resolved values as plain YAML types, without `config`: they include that file."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        del values["config"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def save(self, path: str | os.PathLike) -> None:
        """Write the resolved config as YAML that ``--config`` reads. OSError if it cannot."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        Path(path).write_text(text, encoding="utf-8")


def _checked(spec, value: object) -> object:
    """The value of a field, checked by its metadata and brought into one form."""
    name, rules = flag_name(spec.name), spec.metadata
    if value is None and spec.default is None:
        return None
    kind = rules["kind"]
    if kind == "bool":
        check_bool(name, value)
    elif kind == "int":
        check_int(name, value, low=rules.get("low"))
    elif kind == "float":
        check_number(name, value)
    elif kind == "percent":
        return _six_percentages(value)
    elif kind == "texts":
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(_is_text(text) for text in texts):
            raise UserError(f"{name} must be text that is not empty, got {value!r}")
        return tuple(texts)
    elif not _is_text(value):
        raise UserError(f"{name} must be text that is not empty, got {value!r}")
    if "choices" in rules:
        check_choice(name, value, rules["choices"])
    if rules.get("coming") and value != spec.default:
        default = str(spec.default).lower()
        raise UserError(f"{name} is not yet supported: leave it at its default, {default}")
    return os.path.expanduser(value) if kind == "path" else value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _six_percentages(value: object) -> tuple[float, ...]:
    """Both forms of ``--percent`` as six numbers. YAML may give a list or ``0 100 100 0``."""
    numbers = value.split() if isinstance(value, str) else value
    if not isinstance(numbers, (list, tuple)):
        raise UserError(f"--percent takes 4 or 6 numbers, got {value!r}")
    if list(numbers) == ["auto"]:
        raise UserError("--percent auto is not yet supported: give 4 or 6 numbers")
    shares = [s for p in parse_percent(numbers) for s in (p.gpu, p.cpu)]
    return tuple(int(share) if share == int(share) else share for share in shares)


def load_yaml(path: str | os.PathLike) -> dict[str, object]:
    """Read a mapping of flags from a YAML file; `RunConfig.from_mapping` checks its keys.

    Raises
    ------
    UserError
        The file is missing, unreadable, not UTF-8, not YAML, not a mapping, or names `config`.
    """
    try:
        values = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read --config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path} is not UTF-8 text: save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"--config {path} is not valid YAML{where}") from None
    if not isinstance(values, dict):
        raise UserError(f"--config {path} must hold lines of `name: value`")
    if "config" in values:
        raise UserError(f"--config {path} names another config: put its lines into one file")
    return values
