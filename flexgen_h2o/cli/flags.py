"""The table of command-line flags: one field each, from which all else about them is made.

Names and meaning are FlexGen's and the H2O fork's where those have the flag. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.config.h2o import (
    BUDGETS_OF,
    EVICTIONS,
    INDEX_BITS,
    SCORES,
    SINK_WINDOW_SINKS,
    H2OConfig,
)
from flexgen_h2o.config.policy import OFFLOAD_DIR, Policy
from flexgen_h2o.config.weight_layout import AUTO, DTYPES, WEIGHT_BITS

WARM_UP = ("generate from the first GPU batch before what is measured: two tokens, or all on a "
           "GPU, where kernels are compiled for the lengths that they meet")
"""The help of `--warm-up`, which is on in `bench`."""
_MODELS = "the model's"
"""What `--help` shows as the default of a flag that generation_config.json sets."""
GOALS = ("throughput", "latency")
GROUPS = ("model", "input", "batch and lengths", "policy", "planning", "cache", "sampling",
          "results", "several processes")

COMMON = ("model", "path", "device", "dtype", "weight_bits", "activation_bits", "prompt", "prompts",
          "chat", "config", "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", "percent",
          "offload_dir", "pipeline_parallel", "plan_only", "memory_limit", "hh_ratio", "recall",
          "cache_bits", "do_sample", "temperature", "top_p", "seed", "output", "csv", "verbose")
"""Flags that ``--help`` shows; ``--help-all`` shows the others too."""


def _flag(group: str, kind: str, default: object, *, help: str, **rules: object) -> Any:
    """A field and the metadata of its flag, which ``--help`` shows in one of `GROUPS`."""
    return flag(kind, default, help=help, group=group, **rules)


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """One value for each flag of `flex_opt`. Lengths are tokens, sizes are sequences."""

    model: str = _flag(
        "model", "text", "facebook/opt-6.7b", metavar="NAME",
        help="model name, Hugging Face repo id or local folder",
    )
    path: str | None = _flag(
        "model", "path", None, shown="by model name",
        help="folder or .gguf file of the weights; _DUMMY_ for seeded random weights",
    )
    device: str = _flag(
        "model", "text", "auto", metavar="auto|cpu|cuda[:n]", help="the device that computes",
    )
    dtype: str = _flag(
        "model", "text", "auto", choices=("auto", *DTYPES),
        help="number format of weights, cache and compute",
    )
    compress_weight: bool = _flag(
        "model", "bool", False, help="keep weights in 4-bit groups",
    )
    weight_bits: int | str | None = _flag(
        "model", "bits", None, choices=(AUTO, *WEIGHT_BITS), shown="auto; 4 with --compress-weight",
        help="bits of a number in matrices of weights; auto keeps the quantized values of a GGUF "
        "file, and is 16 for other models; 16 is --dtype as it is, 12 bfloat16 with a shorter "
        "exponent",
    )
    activation_bits: int = _flag(
        "model", "int", 16, choices=(16, 8),
        help="bits of a number that meets quantized weights; 8: rounded, for products of whole "
        "numbers on a CPU",
    )
    weight_cache: str = _flag(
        "model", "path", "auto", metavar="DIR",
        help="folder that keeps quantized weights for later runs; auto: beside the converted "
        "models in the user's cache",
    )
    no_weight_cache: bool = _flag(
        "model", "bool", False, help="quantize weights anew and keep them for this run alone",
    )
    calibration: str | None = _flag(
        "model", "path", None, metavar="FILE", shown="none",
        help="quantize weights to 8 or 4 bits by this text: a text file, or a .jsonl file with a "
        "`text`, `article` or `prompt` key; inputs that are large in it count for more",
    )
    prompt: tuple[str, ...] = _flag(
        "input", "texts", (), metavar="TEXT", shown="synthetic prompts",
        help="a prompt as text; give it once for each prompt",
    )
    prompts: str | None = _flag(
        "input", "path", None, metavar="FILE", shown="synthetic prompts",
        help=".txt file of one prompt a line, or .jsonl file with a `prompt` key",
    )
    chat: bool = _flag(
        "input", "bool", False,
        help="put each prompt, as a user's message, into the model's chat template",
    )
    chat_template_kwargs: str | None = _flag(
        "input", "text", None, metavar="JSON", shown="none",
        help='arguments of the chat template, such as \'{"enable_thinking": false}\'',
    )
    config: str | None = _flag(
        "input", "path", None, metavar="FILE.yaml", shown="none",
        help="read flags from a file (underscores for dashes); the command line overrides it",
    )
    num_prompts: int | None = _flag(
        "batch and lengths", "int", None, low=1, shown="a block",
        help="synthetic prompts, in as many blocks as they take",
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
    warm_up: bool = _flag(
        "batch and lengths", "bool", False,
        help=WARM_UP,
    )
    gpu_batch_size: int | None = _flag(
        "batch and lengths", "int", None, low=1,
        shown=f"{Policy.gpu_batch_size}; chosen with --percent auto",
        help="sequences computed together",
    )
    num_gpu_batches: int | None = _flag(
        "batch and lengths", "int", None, low=1,
        shown=f"{Policy.num_gpu_batches}; chosen with --percent auto",
        help="GPU batches of a block, which share each load of a layer's weights",
    )
    prefill_chunk: int | None = _flag(
        "batch and lengths", "int", None, low=1, shown="the whole prompt",
        help="read prompts in chunks of this many tokens, which takes less memory",
    )
    percent: tuple[float, ...] | str = _flag(
        "policy", "percent", (100, 0, 100, 0, 100, 0), metavar="P",
        help="percent of weights on gpu, cpu; of cache on gpu, cpu; of activations on gpu, cpu "
        "(100 0 if left out); the rest is on disk. auto: what is fastest here, by measurement",
    )
    overlap: bool = _flag("policy", "bool", True, help="run transfers beside compute")
    pin_weight: bool = _flag(
        "policy", "bool", True, help="page-lock weights in host memory (with a GPU)",
    )
    cpu_cache_compute: bool = _flag(
        "policy", "bool", False, help="attend on the CPU where the cache is there",
    )
    fetch_chosen: bool = _flag(
        "policy", "bool", False,
        help="with --recall, of a cache on disk (with a GPU: in host memory) read only the tokens "
        "that a step chooses and memory (the GPU's) has not: for disks that do many small reads",
    )
    fast_set: float | None = _flag(
        "policy", "float", None, above=0, high=1, metavar="SHARE",
        shown="twice what a step attends to",
        help="share of all tokens that memory holds of what --fetch-chosen reads: more of them, "
        "fewer reads",
    )
    sep_layer: bool = _flag(
        "policy", "bool", False,
        help="schedule attention and MLP as two layers, which takes smaller buffers for weights",
    )
    expert_percent: tuple[float, ...] | None = _flag(
        "policy", "shares", None, metavar="P", shown="what the rest leaves of the fastest memory",
        help="percent of a mixture's experts on gpu, cpu, disk; --percent is of all other weights "
        "then",
    )
    expert_slots: int | None = _flag(
        "policy", "int", None, low=1, shown="what a decode step chooses in two layers",
        help="experts of a mixture that have room in the fastest memory beside those that rest "
        "there; the ones used most, of late, stay",
    )
    cpu_expert_compute: bool = _flag(
        "policy", "bool", False,
        help="compute a mixture's experts on the CPU where they are in host memory (with a GPU)",
    )
    expert_counts: str | None = _flag(
        "policy", "path", None, metavar="FILE.json", shown="none",
        help="counts of the choices of a mixture's experts, by --count-experts: plan by them, and "
        "keep the ones chosen most often in the fastest memory",
    )
    refill_share: float = _flag(
        "policy", "float", Policy.refill_share, above=0, high=1,
        help="end a block when so many of its sequences have ended, and let the others go on "
        "beside the next ones; 1 waits for all of them",
    )
    offload_dir: str = _flag(
        "policy", "path", OFFLOAD_DIR, metavar="DIR",
        help="folder for what the disk tier writes; emptied at exit",
    )
    pipeline_parallel: int = _flag(
        "policy", "int", 1, low=1,
        help="ranks, as torchrun starts them, over which the layers are spread, each with memory "
        "and disk of its own",
    )
    rank_timeout: float = _flag(
        "policy", "float", 600.0, above=0, metavar="SECONDS",
        help="end all ranks if none gets on for so long (with --pipeline-parallel); one that is "
        "gone is noticed within 30 s",
    )
    verify: bool = _flag(
        "policy", "bool", False,
        help="hold weights that are read from disk against checksums, made when they were first "
        "read or written; what has changed ends the run",
    )
    goal: str = _flag(
        "planning", "text", GOALS[0], choices=GOALS,
        help="what --percent auto is for: most tokens per second, or the least time of a block, of "
        "one sequence unless batch sizes are given",
    )
    allow_compression: bool = _flag(
        "planning", "bool", False,
        help="let --percent auto choose bits of weights and cache too, where they are not given",
    )
    plan_only: bool = _flag(
        "planning", "bool", False, help="print the plan and what it predicts; run nothing",
    )
    recalibrate: bool = _flag(
        "planning", "bool", False,
        help="measure this machine anew for the plan, not only the first time",
    )
    hardware: str | None = _flag(
        "planning", "path", None, metavar="FILE.yaml", shown="this machine",
        help="plan for the machine in this file (with --plan-only)",
    )
    memory_limit: int | None = _flag(
        "planning", "size", None, metavar="SIZE", shown="what is free",
        help="most host memory to take, such as 6GB or 1.5GiB",
    )
    device_memory_limit: int | None = _flag(
        "planning", "size", None, metavar="SIZE", shown="what is free",
        help="most memory of the GPU to take",
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
    budget_of: str = _flag(
        "cache", "text", "prompt", choices=BUDGETS_OF,
        help="what --hh-ratio and --recent-ratio are fractions of: the prompt's tokens, or all "
        "tokens so far, so that the cache grows with the text",
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
    evict_while_prefilling: bool = _flag(
        "cache", "bool", False,
        help="evict after each --prefill-chunk of a prompt too, so that one of any length fits; "
        "changes what is kept",
    )
    recall: bool = _flag(
        "cache", "bool", False,
        help="evict nothing: each new token attends to as many tokens as would stay, those that "
        "its own query weighs most by an index of keys",
    )
    index_bits: int = _flag(
        "cache", "int", H2OConfig.index_bits, choices=INDEX_BITS,
        help="bits of a number in the index of keys (--recall)",
    )
    score: str = _flag(
        "cache", "text", "sum", choices=SCORES,
        help="heavy hitters have most attention: summed, as the mean over the queries that saw "
        "them, or fading by --score-decay; with caote they move attention's output most, which "
        "is slower",
    )
    score_decay: float = _flag(
        "cache", "float", H2OConfig.decay,
        help="factor on old attention for each new token (--score decay)",
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
        "cache", "float", 1.0, above=0, high=1,
        help="fraction of the cached values that each new token reads, those of most attention; "
        "fewer travel from host memory (from disk all do)",
    )
    compress_cache: bool = _flag("cache", "bool", False, help="keep the KV cache in 4-bit groups")
    cache_bits: int | None = _flag(
        "cache", "int", None, choices=(16, 8, 4), shown="16; 4 with --compress-cache",
        help="bits of a number in the KV cache; 16 is --dtype as it is",
    )
    key_bits: int | None = _flag(
        "cache", "int", None, choices=(16, 8, 4), shown="--cache-bits",
        help="bits of a number in cached keys; 8 with --value-bits 4 loses almost nothing",
    )
    value_bits: int | None = _flag(
        "cache", "int", None, choices=(16, 8, 4), shown="--cache-bits",
        help="bits of a number in cached values",
    )
    do_sample: bool = _flag(
        "sampling", "bool", False, help="sample the next token; otherwise take the likeliest",
    )
    temperature: float | None = _flag(
        "sampling", "float", None, shown=_MODELS, help="divide logits by this (with --do-sample)",
    )
    top_k: int | None = _flag(
        "sampling", "int", None, shown=_MODELS,
        help="sample among this many likeliest tokens; 0 for all (with --do-sample)",
    )
    top_p: float | None = _flag(
        "sampling", "float", None, shown=_MODELS,
        help="sample among the likeliest tokens of this total probability (with --do-sample)",
    )
    min_p: float | None = _flag(
        "sampling", "float", None, shown=_MODELS,
        help="drop tokens below this fraction of the top probability (with --do-sample)",
    )
    repetition_penalty: float | None = _flag(
        "sampling", "float", None, shown=_MODELS,
        help="factor against tokens already seen; 1 is none",
    )
    no_repeat_ngram_size: int | None = _flag(
        "sampling", "int", None, shown=_MODELS,
        help="never repeat a run of this many tokens; 0 is off",
    )
    min_new_tokens: int | None = _flag(
        "sampling", "int", None, shown=_MODELS, help="tokens to generate before EOS may come",
    )
    no_generation_config: bool = _flag(
        "sampling", "bool", False,
        help="leave the defaults in the model's generation_config.json out, but for end tokens",
    )
    ignore_eos: bool = _flag("sampling", "bool", False, help="generate all of --gen-len, past EOS")
    seed: int = _flag(
        "sampling", "int", 0, help="seed of sampling, synthetic prompts and random weights",
    )
    output: str | None = _flag(
        "results", "path", None, metavar="FILE.jsonl", shown="none",
        help="write a line for each prompt: prompt, prompt_tokens, token_ids, text, finish_reason; "
        "of chats content and reasoning_content, too",
    )
    csv: str | None = _flag(
        "results", "path", None, metavar="FILE", shown="none",
        help="append a row of results; bytes, seconds and tokens/s as its header says",
    )
    trace: str | None = _flag(
        "results", "path", None, metavar="FILE.json", shown="none",
        help="write transfers, compute and memory as Chrome trace JSON, in microseconds "
        "(ui.perfetto.dev)",
    )
    count_experts: str | None = _flag(
        "results", "path", None, metavar="FILE.json", shown="none",
        help="write how many tokens chose each expert of a mixture, for --expert-counts",
    )
    log_file: str = _flag(
        "results", "path", "auto", metavar="FILE",
        help="append the table of results; auto: a .log here, named after the configuration",
    )
    no_log: bool = _flag("results", "bool", False, help="write no log file")
    verbose: int = _flag(
        "results", "int", 2, low=0, const=3,
        help="print 0: nothing, 1: the table of results, 2: the texts too, 3: the memory plan too",
    )
    debug_mode: str | None = _flag(
        "results", "text", None, shown="none", choices=("breakdown",),
        help="breakdown: print where the time went: compute, each link, and what binds",
    )

    @staticmethod
    def called(name: str) -> str:
        """The name of a flag in errors; a front end whose users type other names overrides it."""
        return flag_name(name)
