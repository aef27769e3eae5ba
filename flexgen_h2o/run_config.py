"""The table of command-line flags: one field each, from which all else about them is made.

`flex_opt` builds argparse from the fields' metadata, YAML keys are checked against their names,
and the resolved values are what is saved beside results. Names and meaning are FlexGen's and the
H2O fork's where those have the flag. No torch.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from flexgen_h2o.config import (
    SCORES,
    H2OConfig,
    Policy,
    SamplingParams,
    check_bool,
    check_int,
    check_number,
    parse_percent,
)
from flexgen_h2o.errors import UserError

GROUPS = ("model", "input", "batch and lengths", "policy", "cache", "sampling", "results")
DUMMY = "_DUMMY_"
EVICTIONS = ("h2o", "window", "sink-window", "full")
SINK_WINDOW_SINKS = 4
"""Sinks of ``--eviction sink-window``, as in StreamingLLM (arXiv 2309.17453)."""

_WINDOWS = ("window", "sink-window")
_RATIOS = ("hh_ratio", "recent_ratio")
_COUNTS = ("num_heavy_hitter_tokens", "num_window_length")
_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def flag_name(name: str) -> str:
    """The flag of a field: ``gen_len`` is ``--gen-len``."""
    return "--" + name.replace("_", "-")


def _flag(group: str, kind: str, default: object, *, help: str, **rules: object):
    """A field and the metadata of its flag.

    `kind` is text, path, texts, percent, ratios, int, float or bool. Rules: `choices`, `low` (a
    bound), `metavar`, `const` (the value of the bare flag), `shown` (the default in words), and
    `coming` (True: anything but the default is refused until the feature is there).
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
    compress_weight: bool = _flag(
        "model", "bool", False, coming=True, help="keep weights in 4-bit groups",
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
    prefill_chunk: int | None = _flag(
        "batch and lengths", "int", None, low=1, shown="the whole prompt",
        help="read prompts in pieces of this many tokens, which takes less memory",
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
        "policy", "bool", False, help="attend on the CPU where the cache is there",
    )
    sep_layer: bool = _flag(
        "policy", "bool", False, coming=True, help="schedule attention and MLP as two layers",
    )
    offload_dir: str = _flag(
        "policy", "path", "~/.cache/flexgen_h2o/offload", metavar="DIR",
        help="folder for what the disk tier writes; emptied at exit",
    )
    eviction: str = _flag(
        "cache", "text", "h2o", choices=EVICTIONS,
        help="which tokens stay: h2o, heavy hitters and recent ones; window, as many but all "
        "recent; sink-window, that and the first; full, all",
    )
    hh_ratio: float | tuple[float, ...] = _flag(
        "cache", "ratios", 1.0, metavar="X",
        help="heavy hitters to keep, and as many recent tokens, as a fraction of the prompt; 1 for "
        "all; several numbers, or a .yaml file that lists them: one for each decoder layer",
    )
    recent_ratio: float | tuple[float, ...] | None = _flag(
        "cache", "ratios", None, metavar="X", shown="as --hh-ratio",
        help="recent tokens to keep, where not as many as heavy hitters; in the same forms",
    )
    num_heavy_hitter_tokens: int | None = _flag(
        "cache", "int", None, low=0, shown="half of --num-window-length",
        help="heavy hitters to keep, in tokens; without --num-window-length as many recent ones",
    )
    num_window_length: int | None = _flag(
        "cache", "int", None, low=1, shown="by --hh-ratio",
        help="tokens to keep in all: heavy hitters, sinks, and recent ones for the rest",
    )
    hh_all: bool = _flag(
        "cache", "bool", True, help="evict among generated tokens too, not in the prompt alone",
    )
    score: str = _flag(
        "cache", "text", "sum", choices=SCORES,
        help="heavy hitters have most attention: summed, as the mean over the queries that saw "
        "them, or fading by --score-decay",
    )
    score_decay: float = _flag(
        "cache", "float", 0.98, help="factor on old attention for each new token (--score decay)",
    )
    sink_tokens: int | None = _flag(
        "cache", "int", None, low=0, shown=f"0; {SINK_WINDOW_SINKS} with --eviction sink-window",
        help="first tokens of each prompt to keep always",
    )
    enable_position_rolling: bool = _flag(
        "cache", "bool", False,
        help="a cached token's position is its rank in the cache, to go past the trained context",
    )
    hh_long_seq: bool = _flag(
        "cache", "bool", False,
        help="drop OPT's positions past its table (for speed measurements only)",
    )
    attn_sparsity: float = _flag(
        "cache", "float", 1.0, coming=True, help="fraction of cached values to attend to",
    )
    compress_cache: bool = _flag(
        "cache", "bool", False, help="keep the KV cache in 4-bit groups",
    )
    cache_bits: int | None = _flag(
        "cache", "int", None, choices=(16, 8, 4), shown="16; 4 with --compress-cache",
        help="bits of a number in the KV cache; 16 is --dtype as it is",
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
        ratio_files = {name: _yaml_file(getattr(self, name)) for name in _RATIOS}
        for spec in fields(self):
            object.__setattr__(self, spec.name, _checked(spec, getattr(self, spec.name)))
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(f"--device must be auto, cpu, cuda or cuda:n, got {self.device!r}")
        self._check_lengths()
        self._check_files(ratio_files)
        self._check_cache()
        if not self.do_sample:
            for name in _ONLY_WHEN_SAMPLING:
                if getattr(self, name) != _default(name):
                    raise UserError(f"{flag_name(name)} has no effect: add --do-sample")
        self.policy()
        self.h2o()
        self.sampling()

    def _check_lengths(self) -> None:
        cut = self.cut_gen_len
        if cut is None:
            return
        if cut > self.gen_len:
            raise UserError(f"--cut-gen-len must be at most --gen-len {self.gen_len}, got {cut}")
        if cut == 1 and self.gen_len > 1:
            raise UserError("--cut-gen-len 1 measures no decode step to project from: give 2 up")

    def _check_files(self, ratio_files: Mapping[str, str | None]) -> None:
        if self.prompt and self.prompts:
            raise UserError("give --prompt or --prompts, not both")
        if self.prompts and not self.prompts.endswith((".txt", ".jsonl")):
            raise UserError(f"--prompts must name a .txt or .jsonl file, got {self.prompts!r}")
        seen: dict[str, str] = {}
        named = ("prompts", "config", "output", "csv", "trace", "log_file")
        for name, path in (*ratio_files.items(), *((name, getattr(self, name)) for name in named)):
            if path is None or path == "auto":
                continue
            other = seen.setdefault(os.path.realpath(path), name)
            if other != name and not {other, name} <= set(_RATIOS):
                raise UserError(f"{flag_name(other)} and {flag_name(name)} name the same file")

    def _check_cache(self) -> None:
        if self.compress_cache and self.cache_bits == 16:
            raise UserError("--compress-cache and --cache-bits 16 contradict: leave one out")
        if self.score != "decay" and self.score_decay != _default("score_decay"):
            raise UserError("--score-decay has no effect: add --score decay")
        budget = self._budget_flags()
        if not budget:
            self._check_full()
            return
        ratios, counts = ([flag_name(name) for name in names if name in budget]
                          for names in (_RATIOS, _COUNTS))
        if self.eviction == "full":
            raise UserError(f"--eviction full keeps all: leave {(ratios + counts)[0]} out")
        if ratios and counts:
            raise UserError(f"give {ratios[0]} or {counts[0]}, not both")
        if self.eviction == "h2o" and budget == ["recent_ratio"]:
            raise UserError("--recent-ratio says nothing of heavy hitters: give --hh-ratio below 1 "
                            "too, or --eviction window")
        if self.eviction == "window" and self.sink_tokens:
            raise UserError("--eviction window has no sinks: give --eviction sink-window")
        if self.eviction in _WINDOWS and len(counts) == 2:
            raise UserError(f"--num-heavy-hitter-tokens has no effect with --eviction "
                            f"{self.eviction}: leave it out")
        scored = self.eviction == "h2o" and self.num_heavy_hitter_tokens != 0
        if self.score != "sum" and not scored:
            raise UserError("--score has no effect without heavy hitters: leave it out")

    def _check_full(self) -> None:
        """Refuse what would do nothing, as nothing is evicted."""
        idle = [f"--eviction {self.eviction}"] if self.eviction in _WINDOWS else []
        for name in ("score", "sink_tokens", "enable_position_rolling"):
            if getattr(self, name) not in (_default(name), 0):  # no sinks are none by default
                idle.append(flag_name(name))
        if not self.hh_all:
            idle.append("--hh-all false")
        if idle:
            hint = ("leave it out" if self.eviction == "full"
                    else "give --hh-ratio or --num-window-length")
            raise UserError(f"{idle[0]} has no effect on the full cache: {hint}")

    def _budget_flags(self) -> list[str]:
        """Names of the given flags that say how much stays cached; none for the full cache."""
        names = [name for name in ("recent_ratio", *_COUNTS) if getattr(self, name) is not None]
        ratios = self.hh_ratio if isinstance(self.hh_ratio, tuple) else (self.hh_ratio,)
        return names if all(ratio == 1 for ratio in ratios) else ["hh_ratio", *names]

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
            prefill_chunk=self.prefill_chunk,
        )

    @property
    def resolved_cache_bits(self) -> int:
        """Bits of a cached number: 16 (as `dtype` says), 8 or 4."""
        return self.cache_bits or (4 if self.compress_cache else 16)

    @property
    def resolved_sink_tokens(self) -> int:
        """First tokens that always stay."""
        if self.sink_tokens is None:
            return SINK_WINDOW_SINKS if self.eviction == "sink-window" else 0
        return self.sink_tokens

    def h2o(self) -> H2OConfig | None:
        """What stays cached; None for everything, with nothing else asked for."""
        budget = self._budget_flags()
        if not budget:
            return H2OConfig(drop_positions=True) if self.hh_long_seq else None
        sizes = self._counts() if set(budget) & set(_COUNTS) else self._ratios(budget)
        return H2OConfig(
            **sizes,
            sink_tokens=self.resolved_sink_tokens,
            score=self.score,
            decay=self.score_decay,
            positions="rolling" if self.enable_position_rolling else "original",
            evict_generated=self.hh_all,
            drop_positions=self.hh_long_seq,
        )

    def _ratios(self, budget: Sequence[str]) -> dict[str, object]:
        """The sizes of `H2OConfig` by ratios. A window has those of heavy and recent together."""
        recent = self.hh_ratio if self.recent_ratio is None else self.recent_ratio
        pairs = _by_layer(self.hh_ratio, recent)
        if self.eviction == "h2o":
            return {"heavy_ratio": self.hh_ratio, "recent_ratio": self.recent_ratio}
        if "hh_ratio" not in budget:
            return {"recent_ratio": recent}
        # Rounded, for 0.7 + 0.1 is a little less than 0.8, and a token less of ten.
        sums = tuple(min(1.0, round(a + b, 9)) for a, b in pairs)
        return {"recent_ratio": sums if len(sums) > 1 else sums[0]}

    def _counts(self) -> dict[str, object]:
        """The sizes of `H2OConfig` by counts, in tokens."""
        total, heavy, sinks = (
            self.num_window_length, self.num_heavy_hitter_tokens, self.resolved_sink_tokens)
        flag, given = ("num_window_length", total) if total else ("num_heavy_hitter_tokens", heavy)
        if self.eviction in _WINDOWS:
            total, heavy = total or 2 * heavy, 0
        elif total is None:
            total = 2 * heavy + sinks
        elif heavy is None:
            heavy = total // 2
        recent = total - heavy - sinks
        if recent < 1:
            raise UserError(f"{flag_name(flag)} {given} leaves no recent tokens beside {heavy} "
                            f"heavy hitters and {sinks} sinks: raise it")
        return {"heavy_tokens": heavy, "recent_tokens": recent}

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


def _default(name: str) -> object:
    return RunConfig.__dataclass_fields__[name].default


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
    elif kind == "ratios":
        return _read_ratios(name, value)
    elif kind == "texts":
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(_is_text(text) for text in texts):
            raise UserError(f"{name} must be text that is not empty, got {value!r}")
        return tuple(texts)
    elif not _is_text(value):
        raise UserError(f"{name} must be text that is not empty, got {value!r}")
    if value not in rules.get("choices", (value,)):
        choices = ", ".join(map(str, rules["choices"]))
        raise UserError(f"{name} must be one of {choices}, got {value!r}")
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


def _yaml_file(value: object) -> str | None:
    """The file that stands for numbers, if one does."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    is_file = isinstance(value, str) and value.endswith((".yaml", ".yml"))
    return os.path.expanduser(value) if is_file else None


def _read_ratios(flag: str, value: object) -> float | tuple[float, ...]:
    """A fraction, or several: as numbers, as their text, or in a YAML file that lists them."""
    path = _yaml_file(value)
    if path is not None:
        value = _read_yaml(flag, path)
        if not isinstance(value, list):
            raise UserError(f"{flag} {path} must hold a list of numbers, such as [0.1, 0.2]")
    elif isinstance(value, str):
        value = value.split()
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if not numbers:
        raise UserError(f"{flag} is empty: give a number, or one for each decoder layer")
    ratios = tuple(_ratio(flag, number) for number in numbers)
    return ratios if len(ratios) > 1 else ratios[0]


def _ratio(flag: str, value: object) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"{flag} takes numbers above 0, at most 1, or a .yaml file of them, "
                            f"got {value!r}") from None
    check_number(flag, value, above=0, high=1)
    return float(value)


def _by_layer(*ratios: float | tuple[float, ...]) -> list[tuple[float, ...]]:
    """The two ratios of each layer; of the one there is, if neither is given by layer."""
    lengths = {len(ratio) for ratio in ratios if isinstance(ratio, tuple)}
    if len(lengths) > 1:
        raise UserError("--hh-ratio and --recent-ratio list different counts of numbers: give one "
                        "for each decoder layer")
    count = lengths.pop() if lengths else 1
    columns = [ratio if isinstance(ratio, tuple) else (ratio,) * count for ratio in ratios]
    return list(zip(*columns, strict=True))


def load_yaml(path: str | os.PathLike) -> dict[str, object]:
    """Read a mapping of flags from a YAML file; `RunConfig.from_mapping` checks its keys.

    Raises
    ------
    UserError
        The file is missing, unreadable, not UTF-8, not YAML, not a mapping, or names `config`.
    """
    values = _read_yaml("--config", path)
    if not isinstance(values, dict):
        raise UserError(f"--config {path} must hold lines of `name: value`")
    if "config" in values:
        raise UserError(f"--config {path} names another config: put its lines into one file")
    return values


def _read_yaml(flag: str, path: str | os.PathLike) -> object:
    """What a YAML file holds. `UserError` if it is missing, unreadable, not UTF-8 or not YAML."""
    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} is not UTF-8 text: save it as UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter of a date or depth
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{flag} {path} is not valid YAML{where}") from None
