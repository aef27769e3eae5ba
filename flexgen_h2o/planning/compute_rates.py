"""Times work on a device: each measurement warms up first, and is the median of many samples."""

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
from flexgen_h2o.kernels.arguments import EvictionArguments
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.kernels.torch_ops import argmax
from flexgen_h2o.models.families.opt import FAMILY as OPT
from flexgen_h2o.models.layers import CapturingOperations, Operations, add_linear_, linear
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec
from flexgen_h2o.models.quantized import WeightFormat
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.planning.hardware import BILLION, BITS, ROWS
from flexgen_h2o.storage.links import disk_beside
from flexgen_h2o.storage.tiers import Device

MIN_SECONDS = 1e-9
"""The least that is left when one time is taken from another: noise must not make it negative."""

FEWEST, MOST = 7, 200
"""Samples of a measurement."""

PATIENCE = 8
"""Times as long is taken for a difference, which is small beside what it is made of."""


class Timer:
    """Times work on a device, in samples of so many calls that reading the clock costs nothing.

    Parameters
    ----------
    device : Device
    seconds : float
        That the samples of a measurement take together, about.
    """

    def __init__(self, device: Device, seconds: float):
        self._device = device
        self._seconds = seconds

    def seconds(self, work: Callable[[], object], *, hopeless: float = math.inf) -> float:
        """Seconds of a call; no more than a look at it if they are `hopeless`."""
        if hopeless < math.inf:
            self._sample(work, 1)
            least = min(self._sample(work, 1) for _ in range(2))
            if least >= hopeless:
                return least
        return statistics.median(took for took, in self._samples(self._seconds, work))

    def difference(self, more: Callable[[], object], less: Callable[[], object]) -> float:
        """Seconds that a call of `more` takes beyond one of `less`; they take turns."""
        samples = self._samples(PATIENCE * self._seconds, more, less)
        return statistics.median(with_it - without for with_it, without in samples)

    def _samples(self, seconds: float, *works: Callable[[], object]) -> list[list[float]]:
        """Seconds of a call of each, again and again for so long, about."""
        for work in works:  # compiles, and starts threads
            self._sample(work, 1)
        tried = [[self._sample(work, 1) for work in works] for _ in range(FEWEST)]
        once = sum(map(min, zip(*tried, strict=True)))
        if FEWEST * once >= seconds:
            return tried
        calls = math.ceil(seconds / MOST / once)
        samples, ends = [], time.perf_counter() + seconds
        while len(samples) < FEWEST or time.perf_counter() < ends:
            samples.append([self._sample(work, calls) for work in works])
        return samples

    def _sample(self, work: Callable[[], object], calls: int) -> float:
        self._device.mark().synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self._device.mark().synchronize()
        return (time.perf_counter() - began) / calls


# Parts of an OPT layer that are timed by themselves, called the way that the engine does.


class DecodeStep:
    """A step over full slots in the middle of a generation with heavy hitters: each call evicts.

    Parameters
    ----------
    slots : Tensor [2, sequences, kv_heads, slots, width]
        Keys and values, or their records.
    bits, head_dim : int
    """

    def __init__(self, slots: Tensor, *, bits: int, head_dim: int):
        self._slots = slots
        self._layout = CacheLayout.of(head_dim, bits)
        shape, count = slots.shape[1:4], slots.shape[3]
        order = torch.rand(shape, device=slots.device).argsort(-1)
        self._state = EvictionState(Eviction(), torch.rand(shape, device=slots.device),
                                    order.to(torch.int32))
        metadata = torch.tensor([count, count, max(1, count // 2), 1], dtype=torch.int32)
        self._metadata = metadata[:, None].repeat(1, shape[0]).to(slots.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a new token; q [sequences, heads, head_dim], k and v with their heads."""
        self._metadata[1] += 1
        return ops.decode_attention(q, k, v, slots=self._slots, metadata=self._metadata,
                                    layout=self._layout, state=self._state)[0]

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, capture: CapturedCalls) -> Tensor:
        """Note a call among the steps of a program; the result is what these write."""
        return native.decode_attention(q, k, v, slots=self._slots, metadata=self._metadata,
                                       layout=self._layout, capture=capture,
                                       eviction=EvictionArguments.of(self._state))[0]


def run_layer(config: ModelConfig, weights: dict[str, Tensor], x: Tensor, do: Operations, *,
              attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """A decoder layer, as the executor calls it; x [rows, hidden] is updated in place."""
    attended = attend(*OPT.attention_inputs(config, weights, x, do))
    OPT.attention_output(config, weights, x, attended, do)
    OPT.mlp(config, weights, x, do)


def run_products(weights: dict[str, Tensor], source: Tensor, x: Tensor, do: Operations) -> None:
    """The products of such a layer alone, of source [rows, hidden]; two are added to x."""
    q, _, _, wide = (linear(source, weights[name], out=do.get(
        name, (len(source), len(weights[name])), source.dtype)) for name in ("q", "k", "v", "fc1"))
    add_linear_(x, q, weights["out"])
    add_linear_(x, wide, weights["fc2"])


# Measured rates of compute: the engine's own operations, each the way that a run uses it.
#
# Weights and caches are random and go round in copies that no processor cache holds together;
# outputs are used again and again. A rate is what a run gets from this machine, if nothing else
# runs
# on it now that does not then.


HOPELESS = 2
"""Times as long as another implementation takes one that is not timed to the end."""

SHORTER = 16
"""Times as short as other prompts are those that tell what attention takes for a query."""


@dataclass(frozen=True)
class Sizes:
    """Sizes and times of the measurements; the defaults suit a CPU.

    Attributes
    ----------
    matrix : (outputs, inputs)
        Of products.
    rows : tuple of int
        That are multiplied together.
    rotated : int
        Bytes of all copies that go round, at least.
    heads, head_dim : int
        Of attention.
    prompts : (sequences, tokens of each)
        Of a prefill.
    sequences : int
        Of a decode step.
    slots : (few, many)
        Of each sequence in two decode steps, whose difference tells bytes from heads.
    recalled : (few, many)
        Tokens of each sequence in decode steps that recall a quarter, or as many as of few.
    hidden, layer_rows : int
        Of a decoder layer: so wide that its activations leave the caches, as in a run, and not so
        wide that its products drown the rest.
    logits : (sequences, vocabulary)
    scratch, copied : int
        Bytes of the file that is written and read, and of a copy to a GPU.
    seconds : float
        That a measurement takes, about, beside its warm-up.
    """

    matrix: tuple[int, int] = (4096, 4096)
    rows: tuple[int, ...] = ROWS
    rotated: int = 256 << 20
    heads: int = 32
    head_dim: int = 128
    prompts: tuple[int, int] = (4, 512)
    sequences: int = 16
    slots: tuple[int, int] = (128, 1024)
    recalled: tuple[int, int] = (1024, 4096)
    hidden: int = 1024
    layer_rows: int = 2048
    logits: tuple[int, int] = (64, 50272)
    scratch: int = 1 << 30
    copied: int = 256 << 20
    seconds: float = 0.4

    @classmethod
    def of(cls, device: Device) -> Sizes:
        """Numbers of rows that keep the device busy."""
        if not device.separate:
            return cls()
        return cls(matrix=(16384, 8192), rotated=1 << 30, prompts=(16, 512), sequences=32,
                   hidden=4096)


class Rates:
    """Measures one device.

    Parameters
    ----------
    device : Device
    dtype : torch.dtype
        Of weights, cache and activations.
    sizes : Sizes
    """

    def __init__(self, device: Device, dtype: torch.dtype, sizes: Sizes):
        self._device = device
        self._dtype = dtype
        self.sizes = sizes
        self._clock = Timer(device, sizes.seconds)
        self.implementations: dict[str, dict[int, dict[int, str]]] = {}  # `ComputeRates`'s

    def interference(self, scratch: Path) -> tuple[float, float]:
        """`Hardware.interference` and `Hardware.read_interference`, of products that read all of
        memory and reading a file."""
        weight = torch.randn(self.sizes.matrix, dtype=self._dtype)
        matrices = self._copies(weight, WeightOptions())
        x, out = self._random(1, weight.shape[1]), self._random(1, len(weight))

        def multiply() -> None:
            linear(x, next(matrices), out=out)
            self._device.mark().synchronize()

        each = self._clock.seconds(multiply)
        found = disk_beside(scratch, multiply, nbytes=self.sizes.scratch)
        slower = ([(beside - alone) / (each * max(done, 1)) for alone, beside, done in found],
                  [(beside - each * done) / alone for alone, beside, done in found])
        reading, computing = (min(max(statistics.median(each), 0.0), 1.0) for each in slower)
        return reading, computing

    @property
    def rounds_activations(self) -> bool:
        """True where products may round them."""
        return not self._device.separate

    def linear(self, bits: int, *, activation_bits: int = 16) -> dict[int, float]:
        """`ComputeRates.linear` of so many bits; with 8 `activation_bits`, `rounded_linear`."""
        weight = torch.randn(self.sizes.matrix, dtype=self._dtype)
        matrices = self._copies(weight, WeightOptions(bits, activation_bits=activation_bits))
        operation = "linear" if bits == 16 else "linear_quantized"
        seconds, more = {}, math.inf
        for rows in sorted(self.sizes.rows, reverse=True):
            x, out = self._random(rows, weight.shape[1]), self._random(rows, len(weight))

            def multiply(x: Tensor = x, out: Tensor = out) -> None:
                linear(x, next(matrices), out=out)

            took = (self._fastest(operation, bits, rows, multiply) if activation_bits == 16
                    else self._clock.seconds(multiply))
            # Where fewer rows seem to take longer than more, something has come between.
            seconds[rows] = more = min(took, more)
        return {rows: BILLION * seconds[rows] / weight.numel() for rows in self.sizes.rows}

    def _fastest(self, operation: str, bits: int, rows: int, work: Callable[[], object]) -> float:
        """Seconds of a call with the fastest implementation, which is noted if there are others."""
        possible = (("only",) if self._device.separate
                    else dispatch.available(operation, rows, self._dtype))
        if len(possible) == 1:
            return self._clock.seconds(work)
        seconds = {}
        for name in possible:
            with dispatch.use_autotune_table({operation: {bits: {rows: name}}}):
                seconds[name] = self._clock.seconds(
                    work, hopeless=HOPELESS * min(seconds.values(), default=math.inf))
        best = min(seconds, key=seconds.__getitem__)
        by_rows = self.implementations.setdefault(operation, {}).setdefault(bits, {})
        self.implementations[operation][bits] = dict(sorted({**by_rows, rows: best}.items()))
        return seconds[best]

    def _copies(self, weight: Tensor, options: WeightOptions
                ) -> Iterator[Tensor | QuantizedMatrix]:
        """A matrix in this form, again and again in other memory."""
        form = WeightFormat(self._dtype, options)
        spec = TensorSpec("", tuple(weight.shape))
        layout = form.layout(spec)
        rest = weight.view(torch.uint8).flatten() if layout is None else ops.quantize_matrix(
            weight, layout)
        return itertools.cycle([form.view(rest.to(self._device.torch, copy=True), 0, spec)
                                for _ in range(self._rounds(rest.nbytes))])

    def prefill_attention(self, *, scored: bool) -> tuple[float, float]:
        """`ComputeRates.prefill_attention` and `query_seconds`, from long prompts
        and from as many rows in short ones."""
        sizes = self.sizes
        sequences, tokens = sizes.prompts
        rows = sequences * tokens
        q, k, v = (self._random(rows, sizes.heads, sizes.head_dim) for _ in range(3))
        scores = torch.rand(sizes.heads, rows, device=q.device) if scored else None

        def attend(tokens: int) -> None:
            ops.prefill_attention(q, k, v, [tokens] * (rows // tokens), scores=scores)

        few = max(1, tokens // SHORTER)
        took = (self._clock.seconds(partial(attend, tokens)) if scored
                else self._fastest("prefill_attention", 16, rows, partial(attend, tokens)))
        winners = None if scored else self.implementations
        with dispatch.use_autotune_table(winners):
            short = self._clock.seconds(partial(attend, few))
        flops, fewer = (4 * sizes.head_dim * sizes.heads * rows * (each + 1) / 2
                        for each in (tokens, few))
        rate = (flops - fewer) / max(took - short, took / 2)
        return rate, max(short - fewer / rate, MIN_SECONDS) / (rows * sizes.heads)

    def caching(self) -> dict[int, float]:
        """`ComputeRates.caching`, of whole prompts with scores."""
        sizes = self.sizes
        sequences, tokens = sizes.prompts
        k, v = (self._random(sequences * tokens, sizes.heads, sizes.head_dim) for _ in range(2))
        scores = torch.rand(sizes.heads, len(k), device=k.device)
        cuts = [Cut(tokens, tokens // 2, tokens - tokens // 2)] * sequences
        found = {}
        for bits in BITS:
            one = self._records(sizes.heads, tokens, sizes.head_dim, bits=bits)
            slots = one.repeat(1, sequences, 1, 1, 1)
            state = EvictionState(Eviction(), *(
                torch.zeros(slots.shape[1:4], dtype=dtype, device=k.device)
                for dtype in (torch.float32, torch.int32)))
            layout = CacheLayout.of(sizes.head_dim, bits)
            took = self._clock.seconds(lambda slots=slots, state=state, layout=layout: (
                ops.select_heavy_hitters(k, v, scores, cuts=cuts, slots=slots, state=state,
                                         layout=layout)))
            found[bits] = BILLION * took / (2 * k.numel())
        return found

    def decode_attention(self) -> tuple[dict[int, float], float]:
        """`decode_attention` and `head_seconds`, from steps over few and over many slots."""
        sizes = self.sizes
        heads = sizes.sequences * sizes.heads
        found = {bits: [self._decode(slots, bits) for slots in sizes.slots] for bits in BITS}
        fixed = []
        for (few, short), (many, long) in found.values():
            fixed.append((short - few * (long - short) / (many - few)) / heads)
        each = max(statistics.median(fixed), MIN_SECONDS)
        return {bits: nbytes / max(took - each * heads, took / 2)
                for bits, (_, (nbytes, took)) in found.items()}, each

    def _decode(self, slots: int, bits: int) -> tuple[int, float]:
        """Bytes of records, and seconds, of a step over so many slots."""
        sizes = self.sizes
        one = self._records(sizes.heads, slots, sizes.head_dim, bits=bits)
        nbytes = sizes.sequences * one.nbytes
        steps = [DecodeStep(one.repeat(1, sizes.sequences, 1, 1, 1), bits=bits,
                            head_dim=sizes.head_dim) for _ in range(self._rounds(nbytes))]
        q, k, v = (self._random(sizes.sequences, sizes.heads, sizes.head_dim) for _ in range(3))
        endless = itertools.cycle(steps)
        return nbytes, self._clock.seconds(lambda: next(endless)(q, k, v))

    def _records(self, *shape: int, bits: int) -> Tensor:
        """Keys and values [2, 1, *shape] of a sequence, at rest."""
        records = self._random(2, 1, *shape)
        if bits != 16:
            records = ops.quantize_groups(records, GroupLayout(shape[-1], bits))
        return records

    def layer_seconds(self) -> float:
        """`ComputeRates.layer_seconds`: a layer whose products and attention are nothing."""
        config, weights, step, x = self._small_layer()
        do = Operations(self._device.torch)
        return self._clock.seconds(lambda: run_layer(config, weights, x, do, attend=step))

    def captured_layer_seconds(self) -> float | None:
        """`ComputeRates.captured_layer_seconds`, of the same layer."""
        if self._device.separate or self._dtype != torch.bfloat16 or ops.uses_reference("cpu"):
            return None
        config, weights, step, x = self._small_layer()
        program = CapturedCalls()
        run_layer(config, weights, x, CapturingOperations(Operations(self._device.torch), program),
                  attend=partial(step.bind, capture=program))
        return self._clock.seconds(program.replay)

    def _small_layer(self) -> tuple[ModelConfig, dict[str, Tensor], DecodeStep, Tensor]:
        """A layer, its weights, its attention and its input [1, hidden]."""
        heads, head_dim, slots = 2, 32, 16
        config, weights = self._layer(heads * head_dim, heads)
        step = DecodeStep(self._records(heads, slots, head_dim, bits=16), bits=16,
                          head_dim=head_dim)
        return config, weights, step, self._random(1, config.hidden_size)

    def elementwise(self) -> float:
        """`ComputeRates.elementwise`: what a layer with no attention takes beyond its products."""
        sizes = self.sizes
        config, weights = self._layer(sizes.hidden, max(1, sizes.hidden // sizes.head_dim))
        do = Operations(self._device.torch)
        x, source = (self._random(sizes.layer_rows, sizes.hidden) for _ in range(2))
        beyond = self._clock.difference(
            lambda: run_layer(config, weights, x, do, attend=lambda q, k, v: q),
            lambda: run_products(weights, source, x, do))
        return BILLION * max(beyond, MIN_SECONDS) / x.numel()

    def logit_seconds(self) -> float:
        """`ComputeRates.logit_seconds`, for the likeliest token."""
        logits = self._random(*self.sizes.logits)
        return BILLION * self._clock.seconds(lambda: argmax(logits)) / logits.numel()

    def _layer(self, hidden: int, heads: int) -> tuple[ModelConfig, dict[str, Tensor]]:
        """An OPT of one layer, and the layer's weights."""
        config = from_transformers({
            "model_type": "opt", "hidden_size": hidden, "num_attention_heads": heads,
            "ffn_dim": 4 * hidden, "num_hidden_layers": 1}, "calibration")
        specs, = OPT.weights(config).layers
        return config, {name: self._random(*spec.shape) * 0.02 for name, spec in specs.items()}

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device.torch)

    def _rounds(self, nbytes: int) -> int:
        """Number of copies of so many bytes that no processor cache holds together."""
        return math.ceil(self.sizes.rotated / nbytes)
