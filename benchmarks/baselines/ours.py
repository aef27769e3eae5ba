"""This engine, with a full, evicting or retrieving cache, and 16 bits or fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baselines import Baseline, BaselineSettings, Timings, installed
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.policy import Policy, format_percent
from flexgen_h2o.config.validation import Fraction
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.errors import UserError


def ratio_of_text(settings: BaselineSettings) -> float | None:
    """Return the ``--hh-ratio`` that keeps `cache_share` of prompt and generated tokens.

    The ratio is a share of the prompt, for heavy hitters and for recent tokens each; the paper
    counts both as a share of the whole text. Prompts of different lengths count by their mean.
    None means the full cache.
    """
    share = settings.options["cache_share"]
    if share is None or share >= 1:
        return None
    text = settings.mean_prompt_len + settings.gen_len
    return min(1.0, share * text / 2 / settings.mean_prompt_len)


def by_step(seconds: Sequence[float], steps: int) -> tuple[float, ...]:
    """Return seconds of each step of all sequences, from the steps of consecutive blocks."""
    return tuple(sum(seconds[step::steps]) for step in range(steps))


class Ours(Baseline):
    """This engine.

    `cache_share` is the share of prompt and generated tokens that stays cached or, with `recall`,
    that a new token attends to. The other options are as in `flex_opt`; `percent` is planned
    for the batch size by default.
    """

    documented = "README.md, --percent auto"
    options: Mapping[str, Any] = {
        "cache_share": None, "weight_bits": 16, "activation_bits": 16, "cache_bits": 16,
        "recall": False, "index_bits": 4, "selective_fetch": False, "hot_set": None,
        "percent": AUTO, "gpu_batch_size": None, "num_gpu_batches": None, "hh_long_seq": False}
    kinds: Mapping[str, Any] = {"cache_share": Fraction | None}
    same_load = False  # plans depend on the batch size
    _llm = None

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().check(name, options)
        try:
            cls.config(Path("model"), BaselineSettings(
                dtype="bfloat16", batch=1, prompt_len=512, mean_prompt_len=512, gen_len=32,
                scratch="scratch", options=settings))
        except UserError as error:
            raise UserError(f"system {name}: {error}") from None
        return settings

    def refusal(self) -> str | None:
        return None

    def version(self) -> str:
        return installed("flexgen_h2o", "torch")

    def ready(self, model: Path) -> None:
        from flexgen_h2o.planning.calibrate import load_or_calibrate
        from flexgen_h2o.storage.device import open_device

        config = self.config(model, self.settings)
        if config.percent == AUTO:
            load_or_calibrate(open_device(config.device), config.offload_dir,
                              progress=lambda words: None)
        if config.resolved_weight_bits != 16:  # fills the cache of quantized weights
            open_llm(config, policy=Policy(weights=Placement(0, 0, 100)), progress=False).close()

    def prepare(self, model: Path) -> str:
        from flexgen_h2o.cli import planner
        from flexgen_h2o.cli.launch import workload

        config, implementations = self.config(model, self.settings), None
        if config.percent == AUTO:
            plan = planner.plan(config, workload(config, ()), self.settings.batch)
            config, implementations = plan.config, plan.implementations
        policy = config.policy()
        self._llm = open_llm(config, workload=workload(config, ()),
                             implementations=implementations, progress=False)
        return (f"--percent {format_percent(policy)} --gpu-batch-size {policy.gpu_batch_size} "
                f"--num-gpu-batches {policy.num_gpu_batches}")

    @staticmethod
    def config(model: Path, settings: BaselineSettings) -> RunConfig:
        """Return the configuration of this run. Raises `UserError`."""
        options = dict(settings.options)
        del options["cache_share"]  # becomes a ratio
        ratio = ratio_of_text(settings)
        if ratio is not None:
            options["hh_ratio"] = ratio
        if options["percent"] != AUTO and options["gpu_batch_size"] is None:
            options["gpu_batch_size"] = settings.batch
        return RunConfig(model=str(model), dtype=settings.dtype, num_prompts=settings.batch,
                         prompt_len=settings.prompt_len, gen_len=settings.gen_len,
                         offload_dir=settings.scratch,
                         device_memory_limit=settings.device_memory, **options)

    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int) -> Timings:
        outputs = self._llm.generate(list(map(list, prompts)), eos_token_id=-1,
                                     max_new_tokens=self.settings.gen_len, cut_gen_len=gen_len)
        stats = self._llm.stats
        return Timings(stats.prefill_seconds, by_step(stats.step_seconds, gen_len - 1),
                       tuple(tuple(output.token_ids) for output in outputs))

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
