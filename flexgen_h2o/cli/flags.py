"""The table of command-line flags: one dataclass field per flag.

Parsers, checks, --help, docs and saved configurations are derived from it. Names and meaning are
as in FlexGen and the H2O repository if these have the flag. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexgen_h2o.cli.values import flag
from flexgen_h2o.config.h2o import (
    BUDGET_BASES,
    EVICTIONS,
    INDEX_BITS,
    SCORES,
    SINK_WINDOW_SINKS,
    H2OConfig,
)
from flexgen_h2o.config.policy import OFFLOAD_DIR, SPECULATIVE_METHODS, Policy
from flexgen_h2o.config.weight_layout import AUTO, DTYPES, WEIGHT_BITS

_MODELS = "the model's"
"""Shown default of a flag that generation_config.json sets."""
GOALS = ("throughput", "latency")
GROUPS = ("model", "input", "batch and lengths", "policy", "planning", "cache", "sampling",
          "results", "several processes", "server")

COMMON = ("model", "path", "device", "dtype", "weight_bits", "activation_bits", "prompt", "prompts",
          "chat", "config", "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", "percent",
          "offload_dir", "speculate", "draft_model", "pipeline_parallel", "plan_only",
          "memory_limit", "hh_ratio", "recall", "cache_bits", "do_sample", "temperature", "top_p",
          "seed", "output", "csv", "stream", "verbose")
"""Flags that ``--help`` shows; ``--help-all`` shows the others too."""


def _flag(group: str, flag_type: str, default: object, *, help: str, **rules: object) -> Any:
    """Return a dataclass field with the metadata of its flag; `group` is one of `GROUPS`."""
    return flag(flag_type, default, help=help, group=group, **rules)


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """One value per flag of `generate`. Lengths are in tokens, batch sizes in sequences."""

    model: str = _flag(
        "model", "text", "facebook/opt-6.7b", metavar="NAME",
        help="model name, Hugging Face repo id, local folder or .gguf file",
    )
    path: str | None = _flag(
        "model", "path", None, shown="by model name",
        help="folder or .gguf file of the weights; _DUMMY_ for seeded random weights",
    )
    device: str = _flag(
        "model", "text", "auto", metavar="auto|cpu|cuda[:n]", help="compute device",
    )
    dtype: str = _flag(
        "model", "text", "auto", choices=("auto", *DTYPES),
        help="data type of weights, KV cache and compute",
    )
    compress_weight: bool = _flag(
        "model", "bool", False, help="the same as --weight-bits 4",
    )
    weight_bits: int | str | None = _flag(
        "model", "bits", None, choices=(AUTO, *WEIGHT_BITS), shown="auto; 4 with --compress-weight",
        help="bit width of weight matrices; auto keeps the quantized values of a GGUF file and is "
        "16 for other models; 16 is --dtype; 12 is bfloat16 with a shorter exponent",
    )
    activation_bits: int = _flag(
        "model", "int", 16, choices=(16, 8),
        help="activation bit width for quantized matmuls; 8 quantizes activations (W4A8 with "
        "--weight-bits 4) and uses integer matmuls on a CPU",
    )
    weight_cache: str = _flag(
        "model", "path", "auto", metavar="DIR",
        help="folder that keeps quantized weights for later runs; auto: in the user's cache, "
        "next to converted models",
    )
    no_weight_cache: bool = _flag(
        "model", "bool", False, help="quantize weights for this run only",
    )
    calibration: str | None = _flag(
        "model", "path", None, metavar="FILE", shown="none",
        help="calibrate 8-bit or 4-bit weight quantization on this text: a text file, or a .jsonl "
        "file with a `text`, `article` or `prompt` key",
    )
    batch_invariant: bool = _flag(
        "model", "bool", False,
        help="generate the same tokens and log-probabilities for a prompt alone, in any batch and "
        "with any number of threads, on CPUs of the same type; slower",
    )
    prompt: tuple[str, ...] = _flag(
        "input", "texts", (), metavar="TEXT", shown="synthetic prompts",
        help="prompt text; repeat the flag for more prompts",
    )
    prompts: str | None = _flag(
        "input", "path", None, metavar="FILE", shown="synthetic prompts",
        help=".txt file with one prompt per line, or .jsonl file with a `prompt` key",
    )
    chat: bool = _flag(
        "input", "bool", False,
        help="send each prompt as a user message through the model's chat template",
    )
    chat_template_kwargs: str | None = _flag(
        "input", "text", None, metavar="JSON", shown="none",
        help='arguments of the chat template, such as \'{"enable_thinking": false}\'',
    )
    config: str | None = _flag(
        "input", "path", None, metavar="FILE.yaml", shown="none",
        help="read flags from a YAML file (underscores for dashes); the command line overrides it",
    )
    num_prompts: int | None = _flag(
        "batch and lengths", "int", None, ge=1, shown="a block",
        help="number of synthetic prompts",
    )
    prompt_len: int = _flag(
        "batch and lengths", "int", 512, ge=1,
        help="length of each synthetic prompt in tokens (random token ids, EOS ignored)",
    )
    gen_len: int = _flag(
        "batch and lengths", "int", 32, ge=1,
        help="maximum number of tokens to generate per prompt",
    )
    cut_gen_len: int | None = _flag(
        "batch and lengths", "int", None, ge=1, shown="all of --gen-len",
        help="stop after this many tokens and project the times to --gen-len",
    )
    warm_up: bool = _flag(
        "batch and lengths", "bool", False,
        help="warm up with the first GPU batch before measuring: two tokens, or all tokens on a "
        "GPU, where kernels are compiled per shape",
    )
    gpu_batch_size: int | None = _flag(
        "batch and lengths", "int", None, ge=1,
        shown=f"{Policy.gpu_batch_size}; chosen with --percent auto",
        help="sequences computed together",
    )
    num_gpu_batches: int | None = _flag(
        "batch and lengths", "int", None, ge=1,
        shown=f"{Policy.num_gpu_batches}; chosen with --percent auto",
        help="GPU batches per block; a block shares each load of a layer's weights",
    )
    prefill_chunk: int | None = _flag(
        "batch and lengths", "int", None, ge=1, shown="the whole prompt",
        help="chunked prefill: process prompts in chunks of this many tokens, which takes less "
        "memory",
    )
    percent: tuple[float, ...] | str = _flag(
        "policy", "percent", (100, 0, 100, 0, 100, 0), metavar="P",
        help="percent of weights on gpu, cpu; of KV cache on gpu, cpu; of activations on gpu, cpu "
        "(100 0 if omitted); the rest is on disk. auto: choose the fastest policy by "
        "measurement",
    )
    overlap: bool = _flag("policy", "bool", True, help="overlap transfers with compute")
    pin_weight: bool = _flag(
        "policy", "bool", True, help="pin weights in host memory (with a GPU)",
    )
    cpu_cache_compute: bool = _flag(
        "policy", "bool", False,
        help="compute attention on the CPU for the part of the cache in host memory",
    )
    selective_fetch: bool = _flag(
        "policy", "bool", False,
        help="with --recall and a cache on disk (with a GPU: in host memory), read only the "
        "selected tokens that are not in the hot set; for disks with fast random reads",
    )
    hot_set: float | None = _flag(
        "policy", "float", None, gt=0, le=1, metavar="SHARE",
        shown="twice the budget",
        help="size of the hot set of --selective-fetch, as a fraction of all tokens; a larger one "
        "needs fewer reads",
    )
    sep_layer: bool = _flag(
        "policy", "bool", False,
        help="schedule attention and MLP as two layers, which takes smaller weight buffers",
    )
    expert_percent: tuple[float, ...] | None = _flag(
        "policy", "shares", None, metavar="P", shown="the fastest memory left by other weights",
        help="percent of a mixture's experts on gpu, cpu, disk; --percent then covers all other "
        "weights",
    )
    expert_slots: int | None = _flag(
        "policy", "int", None, ge=1, shown="the experts that a decode step chooses in two layers",
        help="slots in the fastest memory for experts that are not resident there; with experts on "
        "disk, they are added to the slots for the percent in memory; the most used experts keep "
        "their slots",
    )
    cpu_expert_compute: bool = _flag(
        "policy", "bool", False,
        help="compute experts in host memory on the CPU (with a GPU)",
    )
    expert_counts: str | None = _flag(
        "policy", "path", None, metavar="FILE.json", shown="none",
        help="expert counts that --count-experts wrote: plan with them, and begin with the "
        "most chosen experts in the fastest memory",
    )
    refill_share: float = _flag(
        "policy", "float", Policy.refill_share, gt=0, le=1,
        help="end a block when this fraction of its sequences has finished; the others continue "
        "in the next block; 1 waits for all",
    )
    speculate: str | None = _flag(
        "policy", "text", None, choices=("none", *SPECULATIVE_METHODS),
        shown="none; draft with --draft-model; with --percent auto, ngram where it costs nothing",
        help="speculative decoding, for few sequences on a CPU: draft tokens from the text so far "
        "(ngram), by --draft-model (draft) or by the model's layer for multi-token prediction "
        "(mtp), and verify them in one decode step; a GPU batch then has one sequence",
    )
    draft_model: str | None = _flag(
        "policy", "text", None, metavar="NAME", shown="none",
        help="small model with the same tokenizer that drafts tokens; it stays in memory",
    )
    num_speculative_tokens: int = _flag(
        "policy", "int", Policy.num_speculative_tokens, ge=1,
        help="maximum number of drafted tokens of a decode step (with --speculate)",
    )
    offload_dir: str | tuple[str, ...] = _flag(
        "policy", "paths", OFFLOAD_DIR, metavar="DIR",
        help="folder of the disk tier, emptied at exit; over several, files are spread by the "
        "rates of their disks",
    )
    pipeline_parallel: int = _flag(
        "policy", "int", 1, ge=1,
        help="number of ranks, started by torchrun, that share the layers; each has its own "
        "memory and disk",
    )
    rank_timeout: float = _flag(
        "policy", "float", 600.0, gt=0, metavar="SECONDS",
        help="end all ranks if none makes progress for this long (with --pipeline-parallel); a "
        "lost rank is noticed within 30 s",
    )
    verify: bool = _flag(
        "policy", "bool", False,
        help="check weights read from disk against checksums from their first read; a mismatch "
        "ends the run",
    )
    goal: str = _flag(
        "planning", "text", GOALS[0], choices=GOALS,
        help="goal of --percent auto: most tokens per second, or the lowest latency of a block "
        "(of one sequence unless batch sizes are given)",
    )
    allow_compression: bool = _flag(
        "planning", "bool", False,
        help="let --percent auto choose bit widths of weights and cache where they are not given",
    )
    plan_only: bool = _flag(
        "planning", "bool", False, help="print the plan and its predictions; run nothing",
    )
    recalibrate: bool = _flag(
        "planning", "bool", False,
        help="measure this machine again for the plan",
    )
    hardware: str | None = _flag(
        "planning", "path", None, metavar="FILE.yaml", shown="this machine",
        help="plan for the machine described in this file (with --plan-only)",
    )
    memory_limit: int | None = _flag(
        "planning", "size", None, metavar="SIZE", shown="free memory",
        help="bound of the plan on host memory, such as 6GB or 1.5GiB; to enforce it, run in a "
        "cgroup",
    )
    device_memory_limit: int | None = _flag(
        "planning", "size", None, metavar="SIZE", shown="free memory",
        help="bound of the plan on GPU memory",
    )
    eviction: str = _flag(
        "cache", "text", "h2o", choices=EVICTIONS,
        help="tokens that stay cached: h2o: heavy hitters and recent tokens; window: recent "
        "tokens; sink-window: first and recent tokens; full: all",
    )
    hh_ratio: float | tuple[float, ...] = _flag(
        "cache", "ratios", 1.0, metavar="X",
        help="heavy hitters to keep, and as many recent tokens, as a fraction of the prompt; 1 "
        "keeps all; several numbers, or a .yaml file that lists them, are one per decoder "
        "layer",
    )
    recent_ratio: float | tuple[float, ...] | None = _flag(
        "cache", "ratios", None, metavar="X", shown="as --hh-ratio",
        help="recent tokens to keep as a fraction of the prompt, where it differs from "
        "--hh-ratio; same forms",
    )
    budget_of: str = _flag(
        "cache", "text", "prompt", choices=BUDGET_BASES,
        help="base of --hh-ratio and --recent-ratio: tokens of the prompt, or all tokens so far, "
        "so that the cache grows",
    )
    num_heavy_hitter_tokens: int | None = _flag(
        "cache", "int", None, ge=0, shown="half of --num-window-length",
        help="heavy hitters to keep, in tokens; without --num-window-length as many recent tokens",
    )
    num_window_length: int | None = _flag(
        "cache", "int", None, ge=1, shown="by --hh-ratio",
        help="tokens to keep in all: heavy hitters, sinks, and recent tokens for the rest",
    )
    hh_all: bool = _flag(
        "cache", "bool", True, help="evict among generated tokens too, not only in the prompt",
    )
    evict_while_prefilling: bool = _flag(
        "cache", "bool", False,
        help="evict after each --prefill-chunk of a prompt, so that a prompt of any length fits; "
        "changes which tokens are kept",
    )
    recall: bool = _flag(
        "cache", "bool", False,
        help="evict nothing; each new token attends to the tokens that its query weighs most, as "
        "many as the budget, found by a quantized key index",
    )
    index_bits: int = _flag(
        "cache", "int", H2OConfig.index_bits, choices=INDEX_BITS,
        help="bit width of the key index (--recall)",
    )
    score: str = _flag(
        "cache", "text", "sum", choices=SCORES,
        help="score of heavy hitters: sum of the attention they received; mean over the queries "
        "that saw them; decay: a sum that fades by --score-decay; caote: change of the "
        "attention output (slower)",
    )
    score_decay: float = _flag(
        "cache", "float", H2OConfig.decay,
        help="factor on old attention per new token (--score decay)",
    )
    sink_tokens: int | None = _flag(
        "cache", "int", None, ge=0, shown=f"0; {SINK_WINDOW_SINKS} with --eviction sink-window",
        help="first tokens of each prompt that always stay",
    )
    enable_position_rolling: bool = _flag(
        "cache", "bool", False,
        help="use a cached token's rank in the cache as its position, to generate past the trained "
        "context",
    )
    hh_long_seq: bool = _flag(
        "cache", "bool", False,
        help="drop OPT's positions past its table (for speed measurements only)",
    )
    attn_sparsity: float = _flag(
        "cache", "float", 1.0, gt=0, le=1,
        help="fraction of the cached values that each new token reads, those with the largest "
        "weights; fewer are transferred from host memory (from disk all are)",
    )
    compress_cache: bool = _flag("cache", "bool", False, help="the same as --cache-bits 4")
    cache_bits: int | None = _flag(
        "cache", "int", None, choices=(16, 8, 4), shown="16; 4 with --compress-cache",
        help="bit width of the KV cache; 16 is --dtype",
    )
    key_bits: int | None = _flag(
        "cache", "int", None, choices=(16, 8, 4), shown="--cache-bits",
        help="bit width of cached keys; 8 with --value-bits 4 loses almost nothing",
    )
    value_bits: int | None = _flag(
        "cache", "int", None, choices=(16, 8, 4), shown="--cache-bits",
        help="bit width of cached values",
    )
    do_sample: bool = _flag(
        "sampling", "bool", False, help="sample the next token; otherwise greedy",
    )
    temperature: float | None = _flag(
        "sampling", "float", None, shown=_MODELS, help="sampling temperature (with --do-sample)",
    )
    top_k: int | None = _flag(
        "sampling", "int", None, shown=_MODELS,
        help="sample from this many most likely tokens; 0 for all (with --do-sample)",
    )
    top_p: float | None = _flag(
        "sampling", "float", None, shown=_MODELS,
        help="sample from the most likely tokens with this total probability (with --do-sample)",
    )
    min_p: float | None = _flag(
        "sampling", "float", None, shown=_MODELS,
        help="drop tokens below this fraction of the top probability (with --do-sample)",
    )
    repetition_penalty: float | None = _flag(
        "sampling", "float", None, shown=_MODELS,
        help="penalty on tokens already seen; 1 is none",
    )
    no_repeat_ngram_size: int | None = _flag(
        "sampling", "int", None, shown=_MODELS,
        help="never repeat an n-gram of this size; 0 is off",
    )
    min_new_tokens: int | None = _flag(
        "sampling", "int", None, shown=_MODELS, help="tokens to generate before EOS is allowed",
    )
    no_generation_config: bool = _flag(
        "sampling", "bool", False,
        help="ignore the defaults in the model's generation_config.json, except end tokens",
    )
    ignore_eos: bool = _flag("sampling", "bool", False, help="generate all of --gen-len, past EOS")
    seed: int = _flag(
        "sampling", "int", 0, help="seed of sampling, synthetic prompts and random weights",
    )
    output: str | None = _flag(
        "results", "path", None, metavar="FILE.jsonl", shown="none",
        help="write a line per prompt: prompt, prompt_tokens, token_ids, text, finish_reason; for "
        "chats also content and reasoning_content",
    )
    csv: str | None = _flag(
        "results", "path", None, metavar="FILE", shown="none",
        help="append a row of results; the header has the units",
    )
    trace: str | None = _flag(
        "results", "path", None, metavar="FILE.json", shown="none",
        help="write transfers, compute and memory as a Chrome trace (ui.perfetto.dev)",
    )
    count_experts: str | None = _flag(
        "results", "path", None, metavar="FILE.json", shown="none",
        help="write how many tokens chose each expert of a mixture, for --expert-counts",
    )
    log_file: str = _flag(
        "results", "path", "auto", metavar="FILE",
        help="append the table of results; auto: a .log in this folder, named after the "
        "configuration",
    )
    no_log: bool = _flag("results", "bool", False, help="write no log file")
    verbose: int = _flag(
        "results", "int", 2, ge=0, const=3,
        help="0: print nothing, 1: table of results, 2: also the texts, 3: also the memory plan",
    )
    stream: bool = _flag(
        "results", "bool", False,
        help="print texts token by token as they come, one prompt after the other",
    )
    debug_mode: str | None = _flag(
        "results", "text", None, shown="none", choices=("breakdown",),
        help="breakdown: print the time of compute and of each link, and which one is the "
        "bottleneck",
    )
