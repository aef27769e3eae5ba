"""Measure the compute rates of a device with the engine's own operations.

Weights and caches are random, and are cycled through copies that exceed the processor caches.
Outputs are reused. Rates include the load of other processes, as a run does.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.h2o.eviction import Cut, Eviction, EvictionState
from flexgen_h2o.kernels import dispatch, ops
from flexgen_h2o.kernels.arguments import EvictionArguments, QuantizedMatrix
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.torch_ops import argmax
from flexgen_h2o.models.families.opt import Opt
from flexgen_h2o.models.layers import CapturingOperations, Operations, add_linear_, linear
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.quantized import WeightFormat
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.models.tensors import TensorSpec
from flexgen_h2o.planning.hardware import BILLION, BITS, ROWS
from flexgen_h2o.storage.device import Device
from flexgen_h2o.storage.links import disk_beside

MIN_SECONDS = 1e-9
"""Lower bound of a difference of times, which noise could make negative."""

MIN_CALLS, MAX_CALLS = 7, 200
"""Minimum and maximum number of samples of a measurement."""

PATIENCE = 8
"""Factor of the time spent on a difference, which is small compared with its operands."""

_OPT = Opt()


class Timer:
    """Timer of work on a device: a warm-up, then the median of samples of several calls each.

    `seconds`: approximate time of all samples of a measurement.
    """

    def __init__(self, device: Device, seconds: float):
        self._device = device
        self._seconds = seconds

    def seconds(self, work: Callable[[], object], *, give_up: float = math.inf) -> float:
        """Return the seconds of a call; stop after three calls if they take `give_up` or more."""
        if give_up < math.inf:
            self._sample(work, 1)
            least = min(self._sample(work, 1) for _ in range(2))
            if least >= give_up:
                return least
        return statistics.median(took for took, in self._samples(self._seconds, work))

    def difference(self, longer: Callable[[], object], shorter: Callable[[], object]) -> float:
        """Return the difference in seconds of two calls, from interleaved samples."""
        samples = self._samples(PATIENCE * self._seconds, longer, shorter)
        return statistics.median(with_it - without for with_it, without in samples)

    def _samples(self, seconds: float, *works: Callable[[], object]) -> list[list[float]]:
        """Return samples of the seconds of a call of each of `works`, taken for about `seconds`."""
        for work in works:  # compiles, and starts threads
            self._sample(work, 1)
        tried = [[self._sample(work, 1) for work in works] for _ in range(MIN_CALLS)]
        once = sum(map(min, zip(*tried, strict=True)))
        if MIN_CALLS * once >= seconds:
            return tried
        calls = math.ceil(seconds / MAX_CALLS / once)
        samples: list[list[float]] = []
        ends = time.perf_counter() + seconds
        while len(samples) < MIN_CALLS or time.perf_counter() < ends:
            samples.append([self._sample(work, calls) for work in works])
        return samples

    def _sample(self, work: Callable[[], object], calls: int) -> float:
        self._device.record_event().synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self._device.record_event().synchronize()
        return (time.perf_counter() - began) / calls


class DecodeStep:
    """Attention of a decode step over full slots with heavy hitters: each call evicts.

    `slots` [2, sequences, kv_heads, slots, width]: keys and values as stored.
    """

    def __init__(self, slots: Tensor, *, bits: int, head_dim: int):
        self._slots = slots
        self._layout = CacheLayout.from_bits(head_dim, bits)
        shape, count = slots.shape[1:4], slots.shape[3]
        order = torch.rand(shape, device=slots.device).argsort(-1)
        self._state = EvictionState(Eviction(), torch.rand(shape, device=slots.device),
                                    order.to(torch.int32))
        metadata = torch.tensor([count, count, max(1, count // 2), 1], dtype=torch.int32)
        self._metadata = metadata[:, None].repeat(1, shape[0]).to(slots.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of a new token: q, k, v [sequences, heads or KV heads, head_dim]."""
        self._metadata[1] += 1
        return ops.decode_attention(q, k, v, slots=self._slots, metadata=self._metadata,
                                    layout=self._layout, state=self._state)[0]

    def capture(self, q: Tensor, k: Tensor, v: Tensor, *, into: CapturedCalls) -> Tensor:
        """Capture a call into a list of calls; return the tensor that replays write."""
        return native.decode_attention(q, k, v, slots=self._slots, metadata=self._metadata,
                                       layout=self._layout, capture=into,
                                       eviction=EvictionArguments.from_state(self._state))[0]


def run_layer(config: ModelConfig, weights: dict[str, Tensor], x: Tensor, operations: Operations, *,
              attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Run a decoder layer as the executor does; x [rows, hidden] is updated in place."""
    attended = attend(*_OPT.attention_inputs(config, weights, x, operations))
    _OPT.attention_output(config, weights, x, attended, operations)
    _OPT.mlp(config, weights, x, operations)


def run_matmuls(weights: dict[str, Tensor], source: Tensor, x: Tensor,
                operations: Operations) -> None:
    """Run the matmuls of a small layer on `source` [rows, hidden]; two of them add to x."""
    q, _, _, wide = (linear(source, weights[name], out=operations.get(
        name, (len(source), len(weights[name])), source.dtype)) for name in ("q", "k", "v", "fc1"))
    add_linear_(x, q, weights["out"])
    add_linear_(x, wide, weights["fc2"])


GIVE_UP = 2
"""Factor over the fastest implementation beyond which another one is not measured further."""

SHORT_PROMPTS = 16
"""Factor by which the short prompts are shorter that show the overhead per query."""


@dataclass(frozen=True)
class Sizes:
    """Sizes and times of the measurements; the defaults suit a CPU."""

    matrix: tuple[int, int] = (4096, 4096)  # size of the matrices of matmuls
    rows: tuple[int, ...] = ROWS  # rows of matmuls
    rotated: int = 256 << 20  # bytes of all copies that are cycled through, at least
    # Size of the heads in attention.
    heads: int = 32
    head_dim: int = 128
    prompts: tuple[int, int] = (4, 512)  # size of a prefill
    sequences: int = 16  # sequences of a decode step
    slots: tuple[int, int] = (128, 1024)
    """Slots per sequence of two decode steps, whose difference separates bytes from overhead."""
    recalled: tuple[int, int] = (1024, 4096)
    """Tokens per sequence of decode steps with recall, which select a quarter of the few or the
    many."""
    # Size of a decoder layer. Its activations must exceed the caches, as in a run, and its matmuls
    # must not hide the rest.
    hidden: int = 1024
    layer_rows: int = 2048
    logits: tuple[int, int] = (64, 50272)
    scratch: int = 1 << 30  # bytes of the file that is written and read
    copied: int = 256 << 20  # bytes of a copy to a GPU
    seconds: float = 0.4  # approximate time of a measurement without its warm-up

    @classmethod
    def for_device(cls, device: Device) -> Sizes:
        """Return the sizes that suit a device."""
        if not device.is_gpu:
            return cls()
        return cls(matrix=(16384, 8192), rotated=1 << 30, prompts=(16, 512), sequences=32,
                   hidden=4096)


class Rates:
    """Measurements of one device.

    Parameters
    ----------
    dtype : torch.dtype
        Data type of weights, cache and activations.

    Attributes
    ----------
    implementations : dict
        The autotune table found so far, as in `ComputeRates`.
    """

    def __init__(self, device: Device, dtype: torch.dtype, sizes: Sizes):
        self._device = device
        self._dtype = dtype
        self.sizes = sizes
        self._timer = Timer(device, sizes.seconds)
        self.implementations: dict[str, dict[int, dict[int, str]]] = {}  # `ComputeRates`'s

    def interference(self, scratch: Path) -> tuple[float, float]:
        """Measure `Hardware.interference` and `read_interference`.

        Memory-bound matmuls run while a file is read.
        """
        weight = torch.randn(self.sizes.matrix, dtype=self._dtype)
        matrices = self._copies(weight, WeightOptions())
        x, out = self._random(1, weight.shape[1]), self._random(1, len(weight))

        def multiply() -> None:
            linear(x, next(matrices), out=out)
            self._device.record_event().synchronize()

        unloaded = self._timer.seconds(multiply)
        beside_disk = disk_beside(scratch, multiply, nbytes=self.sizes.scratch)
        slower = ([(beside - alone) / (unloaded * max(done, 1))
                   for alone, beside, done in beside_disk],
                  [(beside - unloaded * done) / alone for alone, beside, done in beside_disk])
        reading, computing = (min(max(statistics.median(ratios), 0.0), 1.0) for ratios in slower)
        return reading, computing

    @property
    def quantizes_activations(self) -> bool:
        """True where matmuls may quantize activations."""
        return not self._device.is_gpu

    def linear(self, bits: int, *, activation_bits: int = 16) -> dict[int, float]:
        """Measure `ComputeRates.linear`, or `rounded_linear` with 8 `activation_bits`."""
        weight = torch.randn(self.sizes.matrix, dtype=self._dtype)
        matrices = self._copies(weight, WeightOptions(bits, activation_bits=activation_bits))
        operation = "linear" if bits == 16 else "linear_quantized"
        seconds, previous = {}, math.inf
        for rows in sorted(self.sizes.rows, reverse=True):
            x, out = self._random(rows, weight.shape[1]), self._random(rows, len(weight))

            def multiply(x: Tensor = x, out: Tensor = out) -> None:
                linear(x, next(matrices), out=out)

            took = (self._fastest(operation, bits, rows, multiply) if activation_bits == 16
                    else self._timer.seconds(multiply))
            # Fewer rows cannot take longer than more: then something disturbed the measurement.
            seconds[rows] = previous = min(took, previous)
        return {rows: BILLION * seconds[rows] / weight.numel() for rows in self.sizes.rows}

    def _fastest(self, operation: str, bits: int, rows: int, work: Callable[[], object]) -> float:
        """Return the seconds of the fastest implementation, which is recorded if there are several.
        """
        possible = (("only",) if self._device.is_gpu
                    else dispatch.available(operation, rows, self._dtype))
        if len(possible) == 1:
            return self._timer.seconds(work)
        seconds: dict[str, float] = {}
        for name in possible:
            with dispatch.use_autotune_table({operation: {bits: {rows: name}}}):
                seconds[name] = self._timer.seconds(
                    work, give_up=GIVE_UP * min(seconds.values(), default=math.inf))
        best = min(seconds, key=seconds.__getitem__)
        by_rows = self.implementations.setdefault(operation, {}).setdefault(bits, {})
        self.implementations[operation][bits] = dict(sorted({**by_rows, rows: best}.items()))
        return seconds[best]

    def _copies(self, weight: Tensor, options: WeightOptions
                ) -> Iterator[Tensor | QuantizedMatrix]:
        """Yield a matrix in this format endlessly, from copies in different memory."""
        form = WeightFormat(self._dtype, options)
        spec = TensorSpec("", tuple(weight.shape))
        layout = form.layout(spec)
        data = weight.view(torch.uint8).flatten() if layout is None else ops.quantize_matrix(
            weight, layout)
        return itertools.cycle([form.view(data.to(self._device.torch_device, copy=True), 0, spec)
                                for _ in range(self._num_copies(data.nbytes))])

    def prefill_attention(self, *, scored: bool) -> tuple[float, float]:
        """Measure `ComputeRates.prefill_attention` and `query_seconds`, on long and short prompts.
        """
        sizes = self.sizes
        sequences, tokens = sizes.prompts
        rows = sequences * tokens
        q, k, v = (self._random(rows, sizes.heads, sizes.head_dim) for _ in range(3))
        scores = torch.rand(sizes.heads, rows, device=q.device) if scored else None

        def attend(tokens: int) -> None:
            ops.prefill_attention(q, k, v, [tokens] * (rows // tokens), scores=scores)

        short_tokens = max(1, tokens // SHORT_PROMPTS)
        took = (self._timer.seconds(partial(attend, tokens)) if scored
                else self._fastest("prefill_attention", 16, rows, partial(attend, tokens)))
        winners = None if scored else self.implementations
        with dispatch.use_autotune_table(winners):
            short = self._timer.seconds(partial(attend, short_tokens))
        flops, short_flops = (4 * sizes.head_dim * sizes.heads * rows * (length + 1) / 2
                              for length in (tokens, short_tokens))
        rate = (flops - short_flops) / max(took - short, took / 2)
        return rate, max(short - short_flops / rate, MIN_SECONDS) / (rows * sizes.heads)

    def caching(self) -> dict[int, float]:
        """Measure `ComputeRates.caching`, of whole prompts with scores."""
        sizes = self.sizes
        sequences, tokens = sizes.prompts
        k, v = (self._random(sequences * tokens, sizes.heads, sizes.head_dim) for _ in range(2))
        scores = torch.rand(sizes.heads, len(k), device=k.device)
        cuts = [Cut(tokens, tokens // 2, tokens - tokens // 2)] * sequences
        nanoseconds = {}
        for bits in BITS:
            packed = self._records(sizes.heads, tokens, sizes.head_dim, bits=bits)
            slots = packed.repeat(1, sequences, 1, 1, 1)
            kept_scores, positions = (
                torch.zeros(slots.shape[1:4], dtype=dtype, device=k.device)
                for dtype in (torch.float32, torch.int32))
            state = EvictionState(Eviction(), kept_scores, positions)
            layout = CacheLayout.from_bits(sizes.head_dim, bits)
            took = self._timer.seconds(partial(
                ops.select_heavy_hitters, k, v, scores, cuts=cuts, slots=slots, state=state,
                layout=layout))
            nanoseconds[bits] = BILLION * took / (2 * k.numel())
        return nanoseconds

    def decode_attention(self) -> tuple[dict[int, float], float]:
        """Measure `ComputeRates.decode_attention` and `head_seconds`, on few and many slots."""
        sizes = self.sizes
        heads = sizes.sequences * sizes.heads
        timings = {bits: [self._decode(slots, bits) for slots in sizes.slots] for bits in BITS}
        fixed = []
        for (few, short), (many, long) in timings.values():
            fixed.append((short - few * (long - short) / (many - few)) / heads)
        overhead = max(statistics.median(fixed), MIN_SECONDS)
        return {bits: nbytes / max(took - overhead * heads, took / 2)
                for bits, (_, (nbytes, took)) in timings.items()}, overhead

    def _decode(self, slots: int, bits: int) -> tuple[int, float]:
        """Return the bytes of KV entries and the seconds of a step over `slots` slots."""
        sizes = self.sizes
        records = self._records(sizes.heads, slots, sizes.head_dim, bits=bits)
        nbytes = sizes.sequences * records.nbytes
        steps = [DecodeStep(records.repeat(1, sizes.sequences, 1, 1, 1), bits=bits,
                            head_dim=sizes.head_dim) for _ in range(self._num_copies(nbytes))]
        q, k, v = (self._random(sizes.sequences, sizes.heads, sizes.head_dim) for _ in range(3))
        endless = itertools.cycle(steps)
        return nbytes, self._timer.seconds(lambda: next(endless)(q, k, v))

    def _records(self, *shape: int, bits: int) -> Tensor:
        """Return one sequence's keys and values [2, 1, *shape] as stored."""
        records = self._random(2, 1, *shape)
        if bits != 16:
            records = ops.quantize_groups(records, GroupLayout(shape[-1], bits))
        return records

    def layer_seconds(self) -> float:
        """Measure `ComputeRates.layer_seconds`: a layer with negligible matmuls and attention."""
        config, weights, step, x = self._small_layer()
        operations = Operations(self._device.torch_device)
        return self._timer.seconds(lambda: run_layer(config, weights, x, operations, attend=step))

    def captured_layer_seconds(self) -> float | None:
        """Measure `ComputeRates.captured_layer_seconds`; None where nothing is captured."""
        if self._device.is_gpu or self._dtype != torch.bfloat16 or ops.uses_reference("cpu"):
            return None
        config, weights, step, x = self._small_layer()
        calls = CapturedCalls()
        operations = CapturingOperations(Operations(self._device.torch_device), calls)
        run_layer(config, weights, x, operations, attend=partial(step.capture, into=calls))
        return self._timer.seconds(calls.replay)

    def _small_layer(self) -> tuple[ModelConfig, dict[str, Tensor], DecodeStep, Tensor]:
        """Return a layer, its weights, its attention and its input [1, hidden]."""
        heads, head_dim, slots = 2, 32, 16
        config, weights = self._layer(heads * head_dim, heads)
        step = DecodeStep(self._records(heads, slots, head_dim, bits=16), bits=16,
                          head_dim=head_dim)
        return config, weights, step, self._random(1, config.hidden_size)

    def elementwise(self) -> float:
        """Measure `ComputeRates.elementwise`: a layer without attention, minus its matmuls."""
        sizes = self.sizes
        config, weights = self._layer(sizes.hidden, max(1, sizes.hidden // sizes.head_dim))
        operations = Operations(self._device.torch_device)
        x, source = (self._random(sizes.layer_rows, sizes.hidden) for _ in range(2))
        beyond = self._timer.difference(
            lambda: run_layer(config, weights, x, operations, attend=lambda q, k, v: q),
            lambda: run_matmuls(weights, source, x, operations))
        return BILLION * max(beyond, MIN_SECONDS) / x.numel()

    def logit_seconds(self) -> float:
        """Measure `ComputeRates.logit_seconds` of an argmax."""
        logits = self._random(*self.sizes.logits)
        return BILLION * self._timer.seconds(lambda: argmax(logits)) / logits.numel()

    def _layer(self, hidden: int, heads: int) -> tuple[ModelConfig, dict[str, Tensor]]:
        """Return an OPT of one layer, and the layer's weights."""
        config = from_transformers({
            "model_type": "opt", "hidden_size": hidden, "num_attention_heads": heads,
            "ffn_dim": 4 * hidden, "num_hidden_layers": 1}, "calibration")
        specs, = _OPT.weights(config).layers
        return config, {name: self._random(*spec.shape) * 0.02 for name, spec in specs.items()}

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device.torch_device)

    def _num_copies(self, nbytes: int) -> int:
        """Return the number of copies of `nbytes` bytes that exceed the processor caches."""
        return math.ceil(self.sizes.rotated / nbytes)
