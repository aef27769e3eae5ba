"""llama.cpp on a CPU, by the low-level functions of llama-cpp-python: parallel sequences, greedy.

One context holds all sequences of the batch, each in a stream of its own, as llama.cpp's
`llama-batched-bench` has them. A step of all of them is one call. Tokens are chosen by the highest
logit outside of it: its sampler first copies every logit into a list of candidates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from baselines.base import Baseline, BaselineSettings, Timings, installed, missing
from baselines.llama_gguf import BITS, gguf_file
from flexgen_h2o.config.validation import check_bool, check_choice, check_int
from flexgen_h2o.errors import UserError

N_BATCH, PADDED = 2048, 256
"""Tokens of a call, llama.cpp's default; and to what it rounds a sequence's room up."""
PROBE_TOKENS, PROBE_STEPS, PROBES = 16, 4, 2
_ERROR = 3  # level of log messages


class LlamaCpp(Baseline):
    """See `baselines.base.Baseline`.

    Options are the type of all matrices, `weights`, one of `llama_gguf.BITS`; `threads` (default:
    as many of those that the comparison gives as are fastest, for prompts and for steps, tried on
    the batch while it loads); `n_ubatch`, tokens that compute together; `flash_attention`; and
    `repack`, llama.cpp's default: weights are held in memory in the order that its fastest products
    take. Without it they are read from the file through the page cache, as they must be where
    memory does not hold them. The cache is in float16, llama.cpp's default.
    """

    documented = ("https://github.com/ggml-org/llama.cpp/blob/master/docs/development/"
                  "token_generation_performance_tips.md")
    options: Mapping[str, Any] = {"weights": "Q4_0", "threads": None, "n_ubatch": 512,
                                  "flash_attention": True, "repack": True}
    loads_alike = False  # its cache is of the batch
    _lib: Any = None
    _model = _context = _batch = None

    def __init__(self, settings: BaselineSettings):
        super().__init__(settings)
        self._errors: list[str] = []

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        found = super().check(name, options)
        check_choice(f"system {name}: weights", found["weights"], tuple(BITS))
        check_int(f"system {name}: n_ubatch", found["n_ubatch"], low=1, high=N_BATCH)
        for option in ("flash_attention", "repack"):
            check_bool(f"system {name}: {option}", found[option])
        if found["threads"] is not None:
            check_int(f"system {name}: threads", found["threads"], low=1)
        return found

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
        import llama_cpp

        self._lib, options = llama_cpp, self.settings.options
        most = llama_cpp.llama_max_parallel_sequences()
        if self.settings.batch > most:
            raise UserError(f"llama.cpp runs at most {most} sequences at once")
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

    def _listen(self) -> None:
        """Keep what it says of errors, and let it print nothing."""
        @self._lib.llama_log_callback
        def heard(level: int, text: bytes, _) -> None:
            if level == _ERROR:
                self._errors.append(text.decode(errors="replace").strip())

        self._heard = heard  # it must outlive the calls
        self._lib.llama_log_set(heard, None)

    def _open(self, path: Path) -> None:
        """Load the model, and make room for all tokens of all sequences."""
        settings = self.settings
        wanted = self._lib.llama_model_default_params()
        wanted.n_gpu_layers = 0
        wanted.use_extra_bufts = settings.options["repack"]
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), wanted)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}: {' '.join(self._errors[-3:])}")
        self._vocab = self._lib.llama_vocab_n_tokens(
            self._lib.llama_model_get_vocab(self._model))
        room = -(-(settings.prompt_len + settings.gen_len) // PADDED) * PADDED
        asked = self._lib.llama_context_default_params()
        asked.n_ctx, asked.n_seq_max = room * settings.batch, settings.batch
        asked.kv_unified = False  # a stream for each, as the others' tokens are masked otherwise
        asked.n_batch, asked.n_ubatch = N_BATCH, settings.options["n_ubatch"]
        asked.flash_attn_type = int(settings.options["flash_attention"])
        self._context = self._lib.llama_init_from_model(self._model, asked)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context: {' '.join(self._errors[-3:])}")

    def _choose_threads(self) -> tuple[int, int]:
        """Set the numbers of threads for prompts and for steps; the fastest unless one is given."""
        tried = [self.settings.options["threads"]]
        if tried == [None]:
            most = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
            tried = sorted({most, *(1 << power for power in range(most.bit_length()))})
        prompts, steps = tried[-1], tried[-1]
        if len(tried) > 1:
            found: dict[int, list[Timings]] = {count: [] for count in tried}
            short = [[0] * min(PROBE_TOKENS, self.settings.prompt_len)] * self.settings.batch
            for count in tried * PROBES:
                self._lib.llama_set_n_threads(self._context, count, count)
                found[count].append(self.generate(short, min(PROBE_STEPS, self.settings.gen_len)))
            prompts = min(tried, key=lambda count: min(each.prefill for each in found[count]))
            steps = min(tried, key=lambda count: min(min(each.steps) for each in found[count]))
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
        """The token that follows each prompt."""
        entries = list(chain.from_iterable(
            ((token, position, row, position == len(prompt) - 1)
             for position, token in enumerate(prompt)) for row, prompt in enumerate(prompts)))
        first: dict[int, int] = {}
        for start in range(0, len(entries), N_BATCH):
            first |= self._decoded(entries[start:start + N_BATCH])
        return [first[row] for row in range(len(prompts))]

    def _decoded(self, entries: Iterable[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run tokens, each with its position, its sequence, and whether one is to follow it: those
        that follow, by sequence.
        """
        batch, wanted = self._batch, []
        for index, (token, position, row, follows) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = follows
            if follows:
                wanted.append((row, index))
        batch.n_tokens = index + 1
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode answers {status}: {' '.join(self._errors[-3:])}")
        return {row: int(np.ctypeslib.as_array(
            self._lib.llama_get_logits_ith(self._context, index), (self._vocab,)).argmax())
            for row, index in wanted}

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
