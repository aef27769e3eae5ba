"""Internals of the package that tests use where the public API does not suffice.

Those of the kernels are in kernel_internals.py. Tests import internals only from these modules, so
that a change of the package breaks one place.
"""

import json
import threading
from collections.abc import Callable, Iterable

import torch

from flexgen_h2o import LLM
from flexgen_h2o.cache.token_attention import TokenAttention
from flexgen_h2o.engine import exclusive, prepare
from flexgen_h2o.engine import source as loader
from flexgen_h2o.engine.decoder import DecoderLayers
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.schedule import Op
from flexgen_h2o.files import chat_template
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.models import quantized
from flexgen_h2o.models.gguf import conversion as gguf_conversion
from flexgen_h2o.models.gguf import values as gguf_values
from flexgen_h2o.planning import memory_rows
from flexgen_h2o.storage.disk import Disk

# Functions that are tested by themselves.
own_attention = memory_rows._attention_scratch
sparse_attention = memory_rows._sparse_attention_scratch
run_dtype = loader._dtype
LLAMA3_ROPE = gguf_values.LLAMA3_ROPE

# Where a run can be made to fail, as "module:path" below the package.
READ, WRITE = "storage.disk:Disk._read_chunk", "storage.disk:Disk._write_chunk"


def allow_forks() -> None:
    """Let children make an LLM, though this process has made one: torch has one thread here."""
    exclusive._first_process = None


# State


def _workspace_of(session):
    """Return the workspace of a `StreamingSession`, or the last one of an `LLM`."""
    return session._engine._spares[-1] if isinstance(session, LLM) else session._workspace


def cache_of(session):
    """Return the cache that an `LLM` or a `StreamingSession` has last used."""
    return _workspace_of(session).cache


def states_of(cache) -> list:
    """The scores, positions and ranks of all evicting layers, and the slots of resident ones."""
    states = [(key, state) for key, state in sorted(cache._evictions._states.items())
              if cache._evictions.plans[key[1]][key[0]].evicts]
    slots = [tier.get(*key[:2]) for key, _ in states for tier in cache.tiers if tier.is_resident]
    return [x for _, state in states for x in state.tensors] + slots


def scratch_bytes(session) -> int:
    """Return the bytes of the workspace's scratch memory."""
    return _workspace_of(session).operations.nbytes


def buffer_bytes(part) -> int:
    """Return the bytes of a part of a cache, including alignment."""
    return part._buffer.nbytes


def slots_of(layer):
    """Return the keys and values of a layer of transformers' cache."""
    return layer._slots


def stage_of(llm):
    """Return the layers of a rank."""
    return llm._engine.runner.stage


def source_of(llm):
    """Return the source of an LLM's model."""
    return llm._engine.runner.source


def weights_of(llm):
    """Return the weight store: `units`, and the tier of each weight by name."""
    return llm._engine.runner.weights


def slots_of_experts(llm) -> list:
    """Return the staging buffers of a mixture's experts."""
    return llm._engine.runner._experts._buffers


def experts_in_slots(llm) -> set[tuple[int, int]]:
    """Return the keys of the experts in slots."""
    return set(llm._engine.runner._experts._policy.cached)


def watch_arrivals(monkeypatch, llm) -> list[list[list[tuple[int, int]]]]:
    """Empty the slots, and record the groups in which the experts of each unit come.

    Returns the list to which they are added: the keys of each group, for each step.
    """
    slots, steps = llm._engine.runner._experts, []
    slots.clear()
    arrivals = slots.arrivals

    def watched():
        steps.append([])
        for group, table in arrivals():
            steps[-1].append([key for key, _ in group])
            yield group, table

    monkeypatch.setattr(slots, "arrivals", watched)
    return steps


def reorder_experts(monkeypatch, llm, order: Callable[[list], Iterable]) -> None:
    """Compute the experts of each layer one by one, in another order; all are resident."""
    slots = llm._engine.runner._experts
    arrivals = slots.arrivals

    def reordered():
        for item in order([item for group, _ in arrivals() for item in group]):
            yield [item], None

    monkeypatch.setattr(slots, "arrivals", reordered)


def weight_sizes(llm) -> dict[str, int]:
    """Return the bytes of each weight, by name."""
    store = weights_of(llm)
    return {spec.name: store._bytes(spec) for spec in store._specs()}


def extents_of(llm) -> dict:
    """Return the file extent of each weight on disk, by name."""
    store = weights_of(llm)
    return {spec.name: store.files.extent(spec) for spec in store._specs()
            if store.tiers[spec.name] == "disk"}


def staging_bytes(llm) -> list[int]:
    """Return the bytes on the device of each buffer for fetched weights."""
    store = weights_of(llm)
    shards = () if store._stream is None else store._stream.buffers
    return [buffer.device.nbytes for buffer in (*store._ring.buffers, *shards)]


def shards_out_of_order(llm) -> int:
    """Return the number of row shards that were used out of order."""
    return weights_of(llm)._stream.misses


def kept_intervals(links, link: str) -> int:
    """Return the number of intervals that are kept of a link."""
    return len(links._busy[link].intervals)


# Patches


_answer_of_subprocess = ChatRenderer._answer


def render_chats(monkeypatch, *, subprocess: bool) -> None:
    """Render chats in the subprocess of each renderer, or in this process, which is faster."""
    def answer(self, request: bytes) -> dict[str, str]:
        from transformers.utils.chat_template_utils import render_jinja_template

        return chat_template._answer(render_jinja_template, json.loads(request))

    monkeypatch.setattr(ChatRenderer, "_answer", _answer_of_subprocess if subprocess else answer)


def render_with(renderer, template: str, messages, arguments=None, **limits: float) -> str:
    """Render a chat by another template, within other `seconds`, in the renderer's process."""
    kept = renderer._always
    renderer._always = {**kept, "template": template, **limits}
    try:
        return renderer.render(messages, arguments)
    finally:
        renderer._always = kept


def before(monkeypatch, owner: type, name: str, look) -> None:
    """Call ``look(self, *arguments)`` before each call of a method. Its exceptions propagate."""
    work = getattr(owner, name)

    def watched(self, *arguments, **options):
        look(self, *arguments)
        return work(self, *arguments, **options)

    monkeypatch.setattr(owner, name, watched)


def before_logits(monkeypatch, look) -> None:
    """Call ``look(action)`` before each step of a model's head."""
    before(monkeypatch, Executor, "_head", lambda self, action, *_: look(action))


def before_token_layers(monkeypatch, look) -> None:
    """Call ``look(attentions)`` before each layer of a decode step, with how many have started."""
    before(monkeypatch, DecoderLayers, "_decode_layer",
           lambda self, *_: look(len(self._pending_attention)))


def before_early_attention(monkeypatch, look) -> None:
    """Call ``look()`` before attention starts ahead of its layer, on the CPU beside a GPU."""
    attend = Executor._METHODS[Op.ATTEND]

    def watched(*arguments):
        look()
        attend(*arguments)

    monkeypatch.setitem(Executor._METHODS, Op.ATTEND, watched)


def junk_after_tokens(monkeypatch, count: int) -> None:
    """Let a cache attend from `count` more drafted tokens after each, of random queries and keys.

    Those at the end of a sequence are left out, so that all are taken back.
    """
    attend = getattr(TokenAttention.attend, "original", TokenAttention.attend)

    def with_junk(self, layer, batch, q, k, v, *, token, rope, **options):
        sample = [x.clone() for x in (q, k, v)]
        result = attend(self, layer, batch, q, k, v, token=token, rope=rope, **options)
        generator = torch.Generator().manual_seed(token)
        for ahead in range(1, count + 1):
            if token + count < self._batch_layouts[batch].new:
                junk = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in sample]
                attend(self, layer, batch, *junk, token=token + ahead, rope=rope, drafted=True,
                       **options)
        return result

    with_junk.original = attend
    monkeypatch.setattr(TokenAttention, "attend", with_junk)


def open_devices(monkeypatch, make) -> None:
    """Let each `LLM` compute on a device of ``make()`` in place of the machine's."""
    monkeypatch.setattr(prepare, "open_device", lambda name: make())


def change_configs(monkeypatch, change) -> None:
    """Replace the config of each `LLM`'s model by ``change(config)``."""
    find_model = prepare.find_model

    def changed(*arguments, **options):
        source = find_model(*arguments, **options)
        source.config = change(source.config)
        return source

    monkeypatch.setattr(prepare, "find_model", changed)


def before_blocks(monkeypatch, look) -> None:
    """Call ``look()`` when a block begins."""
    before(monkeypatch, Executor, "run", lambda *_: look())


def before_reads(monkeypatch, look) -> None:
    """Call ``look()`` before each read of the disk, in the thread that does it."""
    before(monkeypatch, Disk, "_read_chunk", lambda *_: look())


def queues_with(transfers, pool) -> list:
    """Let each queue's jobs run in a ``pool()``; these pools."""
    for queue in transfers._queues.values():
        queue._pool = pool()
    return [queue._pool for queue in transfers._queues.values()]


def flush(transfers, queue: str) -> None:
    """Wait for the copies of a queue."""
    transfers._queues[queue].flush()


def under_lock(transfers) -> bool:
    """Return whether the lock of the latest jobs is held."""
    return transfers._lock.locked()


def keep_latest_in(monkeypatch, transfers, latest: dict) -> None:
    """Store the latest job of each queue in this mapping."""
    monkeypatch.setattr(transfers, "_latest", latest)


def hold_first_expert(monkeypatch, llm) -> list:
    """Let the first expert that is loaded come only when another one has been computed.

    Returns the list to which the experts are added as they are computed, the first ones of which
    are a layer's first.
    """
    slots, go, order = llm._engine.runner._experts, threading.Event(), []
    slots.clear()
    load_unit, arrivals = slots._weights.load_unit, slots.arrivals

    def late(queue, buffer, *, unit):
        if unit is slots._weights.experts[0, 0]:
            assert go.wait(60)
        load_unit(queue, buffer, unit=unit)

    def watched():
        if not order:  # by then the second one is there
            second = [key for key in slots._requested if key != (0, 0)][0]
            slots._buffers[slots._policy.slot(second)].loaded.event()
        for group, table in arrivals():
            order.extend(key for key, _ in group)
            yield group, table
            go.set()

    monkeypatch.setattr(slots._weights, "load_unit", late)
    monkeypatch.setattr(slots, "arrivals", watched)
    return order


def before_conversions(monkeypatch, look) -> None:
    """Call ``look()`` before a GGUF file is opened to be converted."""
    convert = gguf_conversion.read_gguf

    def watched(source):
        look()
        return convert(source)

    monkeypatch.setattr(gguf_conversion, "read_gguf", watched)


def quantize_in_a_new_way(monkeypatch) -> None:
    """Change the version of quantized weights, so that cached copies are outdated."""
    monkeypatch.setattr(quantized, "_VERSION", quantized._VERSION + 1)


def plan_with(llm, change) -> None:
    """Let an `LLM` plan with ``change(workload, limits)`` in place of the free memory."""
    plan = llm._memory.plan

    def planned(policy, cache, workload, *, loaded_bytes):
        fitted, limits = plan(policy, cache, workload, loaded_bytes=loaded_bytes)
        return fitted, change(workload, limits)

    llm._memory.plan = planned
