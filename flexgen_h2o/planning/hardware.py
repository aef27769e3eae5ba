"""A machine as the cost model sees it: rates of links and of compute, and its memory. No torch.

`calibrate` measures this machine; others are read from YAML files (configs/hardware/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexgen_h2o.kernels.implementations import Winners


@dataclass(frozen=True)
class Compute:
    """Rates of the compute device for the parts of a step.

    Attributes
    ----------
    linear : mapping of bits to mapping of rows to float
        Seconds that products with a billion weights take, by bits of a weight (16, 8, 4, and 12
        where it was measured) and rows that are multiplied together; products far larger than the
        caches. Between two counts of rows it is interpolated, above the largest it grows with the
        rows.
    prefill_attention : mapping of "plain" and "scored" to float
        FLOP/s of causal attention over a prompt (4 x head_dim for each query and key that it
        sees), without and with heavy hitters' scores.
    query_seconds : mapping of "plain" and "scored" to float
        What it takes for each query of a head besides, which is most where prompts are short; none
        where it was not measured.
    caching : mapping of bits to float
        Seconds that putting a billion elements of a prompt's keys and values into a cache of 16, 8
        or 4 bits takes: choosing, quantizing and copying. None without those that were not
        measured.
    decode_attention : mapping of bits to float
        Bytes of records per second at which one new token attends over a cache of 16, 8 or 4
        bits in this device's own memory.
    head_seconds : float
        What attention takes for each sequence and KV head of a decode step beside the above.
    elementwise : float
        Seconds that a decoder layer spends on norms, activations, residuals and copies, for a
        billion elements of its hidden states (rows x hidden size), at hundreds of rows and up.
    layer_seconds : float
        What a decoder layer takes for each GPU batch however few rows there are.
    bound_layer_seconds : float or None
        The same of a decode step's layers whose weights are in this device's memory, where these
        are bound (`engine.token_layers`); None where nothing is.
    logit_seconds : float
        Seconds that choosing the next token takes for a billion logits (sequences x vocabulary).
    implementations : mapping of operation to mapping of bits to mapping of rows to str
        With which implementation these rates were reached, where there was a choice.
    rounded_linear : mapping of bits to mapping of rows to float
        As `linear`, of products that round activations to 8 bits; without those that were not
        measured.
    """

    linear: Mapping[int, Mapping[int, float]]
    prefill_attention: Mapping[str, float]
    decode_attention: Mapping[int, float]
    head_seconds: float
    elementwise: float
    layer_seconds: float
    logit_seconds: float
    implementations: Winners = field(default_factory=dict)
    rounded_linear: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    bound_layer_seconds: float | None = None
    query_seconds: Mapping[str, float] = field(default_factory=dict)
    caching: Mapping[int, float] = field(default_factory=dict)

    def products(self, bits: int, activation_bits: int = 16) -> Mapping[int, float]:
        """Seconds of products with a billion weights by rows; rounding costs nothing where it was
        not measured, and 12 bits then cost as much as 16."""
        plain = self.linear.get(bits, self.linear[16])
        rounded = self.rounded_linear if activation_bits == 8 else {}
        return rounded.get(bits, plain)


@dataclass(frozen=True)
class HostAttentionRates:
    """Rates of attention on the host's CPU over a cache in host memory, beside a GPU.

    Attributes are those of `Compute`; copies to and from the GPU are counted apart.
    """

    decode_attention: Mapping[int, float]
    head_seconds: float


@dataclass(frozen=True)
class RecallRates:
    """The rates of recall on a CPU and from a disk, over those of a cache that is read in order.

    `calibrate` measures the first three. The defaults hold where nothing else is known: they are
    fitted to measurements on one CPU in memory (an EPYC with AVX2) and of one model from one disk
    (smollm2), and tests hold them to the rows in benchmarks/results.

    Attributes
    ----------
    index_work : float
        Times as long as a byte of a cache of 16 bits takes a byte of the index. It is read in order
        too, but a byte has two or four codes to be multiplied, and weights have to be compared.
    apart : float
        Times as long as in order a chosen key or value takes to come: it begins where nothing could
        foresee, and ends before the processor has begun to read ahead.
    calls : float
        Times `head_seconds`: one call indexes, one chooses, one attends.
    missed : float
        Tokens of a KV head that a step chooses and memory has not, over what it chooses times
        (1 - s) ** 1.5 / s ** 0.5, where memory holds the share s of all tokens.
    fetching : float
        Times `layer_seconds`, for each GPU batch: what it takes besides to order, place and copy
        what a layer reads from disk. Of a layer that is bound around attention.
    """

    index_work: float = 1.5
    apart: float = 3
    calls: float = 2.5
    missed: float = 0.035
    fetching: float = 5


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes
    ----------
    name : str
    gpu_bytes : int or None
        Memory of the GPU; None where the CPU computes, in host memory.
    cpu_bytes, disk_bytes : int
        Host memory and disk space that a run may have.
    links : mapping of str to float
        Bytes per second of each of `report.LINKS`; those of a GPU only where there is one.
    compute : Compute
    host_attention : HostAttentionRates or None
        Beside a GPU.
    interference : float
        What goes on at the same time disturbs each other: beside the busiest resource, a step
        takes this share (0 to 1) of the time that the others would take alone.
    read_interference : float
        Beside reading from disk, compute takes longer by this share (0 to 1) of the time that
        reading takes alone: more than the other way round where the processors that compute, and
        their memory, also do the work of the disk. It counts where it is more than `interference`.
    fetch_seconds, fetch_head_seconds : float
        On a machine without a GPU, what processors take for each layer and GPU batch of a decode
        step whose cache comes from disk, and for each sequence and KV head of it, besides reading:
        to order the transfers, to lay the changes that wait in memory over what was read, and to
        note new ones. Compute, which has all processors, waits for it.
    recall : RecallRates
        Of this machine's CPU, also beside a GPU.
    """

    name: str
    gpu_bytes: int | None
    cpu_bytes: int
    disk_bytes: int
    links: Mapping[str, float]
    compute: Compute
    host_attention: HostAttentionRates | None = None
    interference: float = 0.0
    read_interference: float = 0.0
    fetch_seconds: float = 0.0
    fetch_head_seconds: float = 0.0
    recall: RecallRates = RecallRates()

    @property
    def has_gpu(self) -> bool:
        """True if compute memory is apart from host memory."""
        return self.gpu_bytes is not None
