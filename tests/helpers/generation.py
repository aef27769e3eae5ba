"""Generation with tiny models: prompts, placements, and the tokens of the engine and transformers.
"""

import dataclasses
import random

import torch

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.metrics.run_stats import RunStats

NEW = 12
LENGTHS = [34, 21, 7, 13, 1]

PLACES = [Placement(100, 0, 0), Placement(0, 100, 0), Placement(0, 0, 100), Placement(40, 30, 30)]
MODES = [("opt", "original"), ("opt_350m_style", "original"), ("llama", "original"),
         ("llama", "rolling"), ("llama3_rope", "rolling"), ("llama_linear_rope", "rolling"),
         ("neox", "original"), ("neox", "rolling"), ("neox_linear_rope", "rolling")]
VARIANTS = {
    "mean": {"heavy_ratio": 0.1, "score": "mean"},
    "decay": {"heavy_ratio": 0.1, "score": "decay", "decay": 0.8},
    "caote": {"heavy_ratio": 0.1, "score": "caote"},
    "window": {"heavy_tokens": 0, "recent_ratio": 0.2},
    "sinks and window": {"heavy_tokens": 0, "recent_tokens": 5, "sink_tokens": 3},
    "sinks and heavy": {"heavy_tokens": 4, "recent_ratio": 0.05, "sink_tokens": 2},
    "of the text": {"heavy_ratio": 0.1, "budget_of": "text"},
    "half of the text": {"heavy_ratio": 0.3, "recent_ratio": 0.2, "budget_of": "text"},
    "by layer, of the text": {"heavy_ratio": [0.1, 0.11, 0.5], "recent_ratio": 0.1,
                              "budget_of": "text"},
    "prompt only": {"heavy_ratio": 0.1, "evict_generated": False},
    "counts": {"heavy_tokens": 6, "recent_tokens": 2},
    "one token": {"heavy_tokens": 0, "recent_tokens": 1},
    "crossed mid-run": {"heavy_tokens": 9, "recent_tokens": 9},
    "pyramid": {"heavy_ratio": [0.4, 0.2, 0.05], "recent_ratio": [0.05, 0.2, 0.4]},
    "one layer full": {"heavy_ratio": [1, 0.1, 0.1]}}

POLICY_FIELDS = {field.name for field in dataclasses.fields(Policy)}
_generated: dict[tuple, tuple[torch.nn.Module, list[int]]] = {}


def make_prompts(vocab: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Return random prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


def prompts_of(tiny, lengths: list[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Return random prompts of a model's tokens."""
    return make_prompts(tiny.model.config.vocab_size, lengths, seed)


def transformers_tokens(tiny, prompts: list[list[int]], new: int, **options) -> list[list[int]]:
    """Return transformers' tokens of each prompt; each is generated once per session."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    tokens = []
    for prompt in prompts:
        key = id(tiny.model), new, repr((prompt, options))
        if key not in _generated:
            ids = torch.tensor([prompt])
            output = tiny.model.generate(ids, attention_mask=torch.ones_like(ids),
                                         max_new_tokens=new, **options)
            _generated[key] = tiny.model, output[0, len(prompt):].tolist()
        tokens.append(list(_generated[key][1]))
    return tokens


def bits_of(bits: int | tuple[int, int]) -> dict[str, int]:
    """Return arguments of `LLM` for the bits of the cache, or of (keys, values)."""
    if isinstance(bits, int):
        return {"cache_bits": bits}
    return dict(zip(("key_bits", "value_bits"), bits, strict=True))


def run(model, prompts: list[list[int]], h2o: H2OConfig | None = None, *, new: int = NEW,
        cache_bits: int | tuple[int, int] = 16, **options) -> tuple[list[list[int]], RunStats]:
    """Return the tokens of every prompt, and the statistics of the run.

    `model` is a folder or has one. `options` are fields of `Policy` and arguments of `LLM`.
    """
    fields = {name: options.pop(name) for name in [*options] if name in POLICY_FIELDS}
    policy = Policy(**{"gpu_batch_size": 3, "num_gpu_batches": 2} | fields)
    options = {"dtype": "float32", "weight_cache": None} | options
    with LLM(str(getattr(model, "folder", model)), policy=policy, h2o=h2o, progress=False,
             **bits_of(cache_bits), **options) as llm:
        outputs = llm.generate(prompts, max_new_tokens=new, eos_token_id=-1)
        return token_ids(outputs), llm.stats


def token_ids(outputs) -> list[list[int]]:
    """Return the tokens of outputs of `LLM.generate`."""
    return [out.token_ids for out in outputs]


def tokens(*args, **options) -> list[list[int]]:
    """Return the tokens of `run`."""
    return run(*args, **options)[0]


def open_llm(tiny, h2o: H2OConfig | None = None, *, chunk: int | None = None,
             cache_bits: int | tuple[int, int] = 16, **policy) -> LLM:
    """Return an LLM for one sequence at a time."""
    policy = Policy(**{"gpu_batch_size": 1, "prefill_chunk": chunk} | policy)
    return LLM(str(tiny.folder), policy=policy, h2o=h2o, dtype="float32", **bits_of(cache_bits),
               progress=False)


def answers(llm: LLM, turns: list[list[int]], new: int = 12, **options) -> list[list[int]]:
    """Return the answer of a stream to each turn."""
    with llm.stream(**options) as stream:
        return [stream.generate(turn, max_new_tokens=new, eos_token_id=-1).token_ids
                for turn in turns]
