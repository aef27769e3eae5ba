"""llama.cpp and ik_llama.cpp on a CPU, by low-level functions: parallel sequences, greedy.

One context holds all sequences of the batch, each in its own stream, as in `llama-batched-bench`. A
decode step is one call. The argmax is taken outside, as llama.cpp's sampler copies all logits into
a list of candidates first.

GGUF files are written by the `gguf` package from Hugging Face folders of LLaMA or Qwen3-MoE, with
the tensor names that the engine reads. They have no tokenizer: benchmarks give token ids.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from baselines import Baseline, BaselineSettings, Timings, installed, missing
from flexgen_h2o.config.validation import Count
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.gguf.architectures import ARCHITECTURES
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.registry import from_transformers, read_config

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

    from flexgen_h2o.models.checkpoint import Checkpoint

N_BATCH, PADDED = 2048, 256
"""Tokens of a call (llama.cpp's default), and the multiple of a sequence's capacity."""
PROBE_TOKENS, PROBE_STEPS, PROBES = 16, 4, 2
BITS: Mapping[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "F32": 16}
"""Matrix types and nominal bits; 16 means the scenario's dtype.

Q4_0 has a float16 scale for 32 weights (4.5 bits in all), Q4_1 also a float16 minimum (5 bits). The
engine's 4-bit groups have both for 64 weights (4.5 bits).
"""
_HEARD = (3, 4)  # levels of log messages: warnings and errors


class LlamaCpp(Baseline):
    """llama.cpp.

    `weights` is the type of all matrices, one of `BITS`. `threads` is by default the fastest count
    for prompts and for steps, measured while loading. `n_ubatch` is the number of tokens computed
    together. `repack`, llama.cpp's default, keeps weights in memory in the layout of its fastest
    kernels; without it they are read through the page cache, as they must be if memory is too
    small. The cache is in float16, llama.cpp's default.
    """

    documented = ("https://github.com/ggml-org/llama.cpp/blob/master/docs/development/"
                  "token_generation_performance_tips.md")
    options: Mapping[str, Any] = {"weights": "Q4_0", "threads": None, "n_ubatch": 512,
                                  "flash_attention": True, "repack": True}
    kinds: Mapping[str, Any] = {
        "weights": Literal[tuple(BITS)], "threads": Count | None,
        "n_ubatch": Annotated[int, Meta(ge=1, le=N_BATCH)], "flash_attention": bool,
        "repack": bool}
    same_load = False  # the cache depends on the batch size
    _repack, _flash_attention = "use_extra_bufts", "flash_attn_type"  # names of parameters
    _lib: Any = None
    _model = _context = _batch = None

    def __init__(self, settings: BaselineSettings):
        super().__init__(settings)
        self._errors: list[str] = []

    @classmethod
    def weight_bits(cls, options: Mapping[str, Any]) -> int:
        return BITS[options["weights"]]

    def refusal(self) -> str | None:
        return missing("llama_cpp", "bench-llama-cpp")

    def version(self) -> str:
        return installed("llama_cpp_python")

    def ready(self, model: Path) -> None:
        gguf_file(model, self.settings.options["weights"])

    def prepare(self, model: Path) -> str:
        self._lib, options = self._library(), self.settings.options
        max_sequences = self._lib.llama_max_parallel_sequences()
        if self.settings.batch > max_sequences:
            raise UserError(f"llama.cpp runs at most {max_sequences} sequences at once")
        self._listen()
        self._lib.llama_backend_init()
        self._open(gguf_file(model, options["weights"]))
        self._batch = self._lib.llama_batch_init(N_BATCH, 0, 1)
        prompts, steps = self._choose_threads()
        info = self._lib.llama_print_system_info().decode()
        return (f"{options['weights']}, {steps} threads for steps and {prompts} for prompts, "
                f"n_ubatch {options['n_ubatch']}, flash attention "
                f"{'on' if options['flash_attention'] else 'off'}, weights "
                f"{'repacked' if options['repack'] else 'as in the file'}; "
                f"{' '.join(info.split())}")

    def _library(self) -> Any:
        """Return llama.cpp's functions by name."""
        import llama_cpp

        return llama_cpp

    def _listen(self) -> None:
        """Record warnings and errors, and print nothing."""
        @self._lib.llama_log_callback
        def heard(level: int, text: bytes, _) -> None:
            if level in _HEARD:
                self._errors.append(text.decode(errors="replace").strip())

        self._heard = heard  # must outlive the calls
        self._lib.llama_log_set(heard, None)

    def _open(self, path: Path) -> None:
        """Load the model, and make a context for all sequences."""
        settings = self.settings
        model_params = self._lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        setattr(model_params, self._repack, settings.options["repack"])
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}: {' '.join(self._errors[-3:])}")
        self._vocab = self._lib.llama_vocab_n_tokens(
            self._lib.llama_model_get_vocab(self._model))
        room = -(-(settings.prompt_len + settings.gen_len) // PADDED) * PADDED
        context_params = self._lib.llama_context_default_params()
        context_params.n_ctx, context_params.n_seq_max = room * settings.batch, settings.batch
        context_params.kv_unified = False  # one stream a sequence; else other sequences are masked
        context_params.n_batch, context_params.n_ubatch = N_BATCH, settings.options["n_ubatch"]
        setattr(context_params, self._flash_attention, int(settings.options["flash_attention"]))
        self._context = self._lib.llama_init_from_model(self._model, context_params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context: {' '.join(self._errors[-3:])}")

    def _choose_threads(self) -> tuple[int, int]:
        """Set and return the numbers of threads for prompts and for steps."""
        tried = [self.settings.options["threads"]]
        if tried == [None]:
            max_threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
            powers = (1 << power for power in range(max_threads.bit_length()))
            tried = sorted({max_threads, *powers})
        prompts, steps = tried[-1], tried[-1]
        if len(tried) > 1:
            timings: dict[int, list[Timings]] = {count: [] for count in tried}
            short = [[0] * min(PROBE_TOKENS, self.settings.prompt_len)] * self.settings.batch
            for count in tried * PROBES:
                self._lib.llama_set_n_threads(self._context, count, count)
                timings[count].append(self.generate(short, min(PROBE_STEPS, self.settings.gen_len)))
            prompts = min(tried, key=lambda count: min(timing.prefill for timing in timings[count]))
            steps = min(tried,
                        key=lambda count: min(min(timing.steps) for timing in timings[count]))
        self._lib.llama_set_n_threads(self._context, steps, prompts)
        return prompts, steps

    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        times = [time.perf_counter()]
        tokens = [[token] for token in self._prompted(prompts)]
        times.append(time.perf_counter())
        for step in range(gen_len - 1):
            entries = [(text[-1], len(prompt) + step, row, True)
                       for row, (prompt, text) in enumerate(zip(prompts, tokens, strict=True))]
            for row, token in self._decoded(entries).items():
                tokens[row].append(token)
            times.append(time.perf_counter())
        prefill, *steps = (b - a for a, b in zip(times, times[1:], strict=False))
        return Timings(prefill, tuple(steps), tuple(map(tuple, tokens)))

    def _prompted(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return the first token of each sequence."""
        entries = list(chain.from_iterable(
            ((token, position, row, position == len(prompt) - 1)
             for position, token in enumerate(prompt)) for row, prompt in enumerate(prompts)))
        first: dict[int, int] = {}
        for start in range(0, len(entries), N_BATCH):
            first |= self._decoded(entries[start:start + N_BATCH])
        return [first[row] for row in range(len(prompts))]

    def _decoded(self, entries: Iterable[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token, position, sequence, predict) entries. Return tokens by sequence."""
        batch, outputs = self._batch, []
        for index, (token, position, row, follows) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = follows
            if follows:
                outputs.append((row, index))
        batch.n_tokens = index + 1
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode answers {status}: {' '.join(self._errors[-3:])}")
        return {row: int(np.ctypeslib.as_array(
            self._lib.llama_get_logits_ith(self._context, index), (self._vocab,)).argmax())
            for row, index in outputs}

    def close(self) -> None:
        if self._batch is not None:
            self._lib.llama_batch_free(self._batch)
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        if self._lib is not None:
            self._lib.llama_log_set(self._lib.llama_log_callback(), None)
        self._model = self._context = self._batch = None


class IkLlama(LlamaCpp):
    """ik_llama.cpp, a fork of llama.cpp with other kernels, through ik-llama-cpp-python.

    All sequences are in one cache, as it has no streams. Its flash attention fails there (assertion
    `S > 0`), so it is off by default. Repacking reads the file without a map.
    """

    documented = "https://github.com/ikawrakow/ik_llama.cpp#readme"
    options: Mapping[str, Any] = {**LlamaCpp.options, "flash_attention": False}
    _repack, _flash_attention = "repack_tensors", "flash_attn"

    def refusal(self) -> str | None:
        return missing("ik_llama_cpp", "bench-ik-llama")

    def version(self) -> str:
        return installed("ik_llama_cpp_python")

    def _library(self) -> Any:
        """Return its functions by llama.cpp's later names, including those without a binding."""
        from ik_llama_cpp import _ctypes_api as bound

        raw, heard = bound._lib, ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p,
                                                  ctypes.c_void_p)
        raw.llama_log_set.argtypes = (heard, ctypes.c_void_p)
        raw.llama_print_system_info.restype = ctypes.c_char_p
        raw.llama_set_n_threads.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
        return SimpleNamespace(**{
            **vars(bound), "llama_log_callback": heard, "llama_log_set": raw.llama_log_set,
            "llama_print_system_info": raw.llama_print_system_info,
            "llama_set_n_threads": raw.llama_set_n_threads,
            "llama_max_parallel_sequences": lambda: sys.maxsize,
            "llama_get_memory": lambda context: context,
            "llama_memory_clear": lambda context, _: bound.llama_kv_cache_clear(context),
            "llama_model_free": bound.llama_free_model})


_BLOCK = 32


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file: name, shape, type, and the checkpoint tensors that it is made of.

    Experts of a layer are stacked into one tensor.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    parts: tuple[str, ...]


def gguf_file(folder: Path, weights: str) -> Path:
    """Return the GGUF file of a folder, which is written into the cache once.

    All matrices have the type `weights`, also the embedding and the head, as in the engine with 4
    bits. Norms and routers are float32.

    Raises `UserError` if the architecture is not supported, rows do not fill blocks, or a file
    cannot be read or written.

    `folder`: with config.json and safetensors or `.bin` weights. `weights`: one of `BITS`.
    """
    from flexgen_h2o.files.disk_cache import build_once, model_title
    from flexgen_h2o.models.convert import converted, weight_files

    folder = Path(folder).resolve()
    config = gguf_config(folder)
    built = build_once([*weight_files(folder), folder / "config.json"], f"gguf-{weights}",
                       model_title(folder), lambda target: _write(folder, config, target, weights),
                       cache=converted())
    return _file(built)


def _file(folder: Path) -> Path:
    return folder / "model.gguf"


def gguf_config(folder: Path) -> ModelConfig:
    """Return the config of a LLaMA or Qwen3-MoE without biases. Raises `UserError` for others."""
    values = read_config(folder)
    config = from_transformers(values, folder.name)
    known = (values["model_type"] in ("llama", "qwen3_moe") and config.activation == "silu"
             and config.rope.rope_type in ("default", "llama3")
             and not (config.attention_bias or config.mlp_bias or config.attention))
    if not known:
        raise UserError(f"{folder.name}: GGUF files are made of LLaMA's architecture and of "
                        "Qwen3-MoE only, without biases and windows, rotated plainly or as LLaMA 3")
    if config.dense_layers:
        raise UserError(f"{folder.name}: llama.cpp has no mixtures with dense layers between")
    if config.experts is not None and not config.experts.router.normalize:
        raise UserError(f"{folder.name}: llama.cpp lets the shares of a token's experts sum up to 1"
                        " in every Qwen3-MoE: norm_topk_prob = False cannot be said")
    return config


def _architecture(config: ModelConfig) -> str:
    """Return the `general.architecture` of a config."""
    return "llama" if config.experts is None else "qwen3moe"


def _write(folder: Path, config: ModelConfig, target: Path, weights: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    from flexgen_h2o.models import family
    from flexgen_h2o.models.checkpoint import resolve, unstacked
    from flexgen_h2o.models.checkpoint_files import open_checkpoint

    plain = GGMLQuantizationType.F32
    known = ARCHITECTURES[_architecture(config)]
    specs = config.weights.by_name()
    tensors = _tensors(config, GGMLQuantizationType[weights], plain)
    writer = GGUFWriter(_file(target), _architecture(config))
    _add_metadata(writer, config)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        stored = quant_shape_to_byte_shape(tensor.shape, tensor.kind)
        writer.add_tensor_info(
            tensor.name, tensor.shape if tensor.kind == plain else stored,
            np.dtype(np.float32 if tensor.kind == plain else np.uint8), math.prod(stored),
            raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    kind = family(config)
    views = {} if config.experts is None else kind.views(config)
    with unstacked(open_checkpoint(folder), views) as checkpoint:
        names = resolve(checkpoint, specs.values(), kind.aliases)
        for tensor in tensors:
            parts = []
            for name in tensor.parts:
                values = _read(checkpoint, names[name], specs[name].shape)
                heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(
                    name.split(".")[-2], 0) if known.interleaved else 0
                parts.append(quantize(in_pairs(values, heads), tensor.kind))
            writer.write_tensor_data(parts[0] if len(parts) == 1 else np.stack(parts))
    writer.close()


def _tensors(config: ModelConfig, weights: GGMLQuantizationType, plain: GGMLQuantizationType
             ) -> list[FileTensor]:
    """Return the tensors of the file. Raises `UserError` if rows do not fill blocks."""
    specs = config.weights.by_name()
    parts: dict[str, list[str]] = {}
    for name in specs:
        parts.setdefault(_gguf_name(name, config), []).append(name)
    tensors = []
    for name, names in parts.items():
        shape = specs[names[0]].shape
        kind = plain if len(shape) == 1 or shape in config.never_quantized else weights
        if kind != plain and shape[1] % _BLOCK:
            raise UserError(f"{config.name}: rows of {shape[1]} weights are not whole blocks of "
                            f"{_BLOCK}")
        shape = shape if len(names) == 1 else (len(names), *shape)
        tensors.append(FileTensor(name, shape, kind, tuple(names)))
    return tensors


def _add_metadata(writer: GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata that llama.cpp needs."""
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    if config.experts is not None:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.per_token)
        writer.add_expert_feed_forward_length(config.experts.ffn_size)
    writer.add_tokenizer_model("no_vocab")


def rope_factors(config: ModelConfig) -> np.ndarray | None:
    """Return the divisors of RoPE frequencies, float32 [head_dim / 2]; None if all are 1."""
    import torch

    from flexgen_h2o.models.rope import frequencies

    if config.rope.rope_type == "default":
        return None
    near = torch.device("cpu")
    plain = replace(config.rope, kind="default")
    return (frequencies(plain, near) / frequencies(config.rope, near)).numpy()


def _read(checkpoint: Checkpoint, name: str, shape: Sequence[int]) -> np.ndarray:
    import torch

    values = torch.empty(tuple(shape), dtype=torch.float32)
    checkpoint.read(name, values)
    return values.numpy()


def _gguf_name(name: str, config: ModelConfig) -> str:
    """Return llama.cpp's name of a checkpoint tensor; experts of a layer share one."""
    known = ARCHITECTURES[_architecture(config)]
    outer = {hub: our_name for our_name, hub in known.outer.items()}
    inner = {hub: our_name for our_name, hub in known.layer.items()}
    if name.startswith(f"{known.layers}."):
        number, suffix = name.removeprefix(f"{known.layers}.").split(".", 1)
        suffix = re.sub(r"\.experts\.[0-9]+\.", ".experts.{}.", suffix.removesuffix(".weight"))
        return f"blk.{number}.{inner[suffix]}.weight"
    return f"{outer[name.removesuffix('.weight')]}.weight"


def in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the rows of a query or key projection, as llama.cpp's LLaMA expects.

    Hugging Face checkpoints rotate the two halves of a head together, llama.cpp rotates pairs. With
    0 `heads` nothing changes.
    """
    if not heads:
        return values
    halves = values.reshape(heads, 2, -1, values.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
