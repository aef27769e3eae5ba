"""A model before its weights are loaded: found, checked, and given its place in a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import windowed
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.distributed.control_messages import ControlChannel
from flexgen_h2o.distributed.pipeline import RankContext
from flexgen_h2o.engine.calibration import calibrate
from flexgen_h2o.engine.load_options import LoadOptions
from flexgen_h2o.engine.progress import byte_bar
from flexgen_h2o.engine.runner import RunnerSettings
from flexgen_h2o.engine.source import ModelSource, find_model
from flexgen_h2o.engine.tokenizer import Prompts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.positions import check_cache, check_experts, check_halves, longest_prompt
from flexgen_h2o.storage.tiers import Device, open_device


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model that is ready to be loaded.

    Attributes
    ----------
    source : ModelSource
    device : Device
    prompts : Prompts
    cache : CacheOptions
        Of all its layers.
    settings : RunnerSettings
        Of those that are run here: in a pipeline their cache is a part of `cache`.
    rank : RankContext or None
        The place in a pipeline.
    workload : Workload or None
        What is expected to be run.
    """

    source: ModelSource
    device: Device
    prompts: Prompts
    cache: CacheOptions
    settings: RunnerSettings
    rank: RankContext | None
    workload: Workload | None


def open_model(given: RunnerSettings, control: ControlChannel, *, device: str, dtype: str,
               weight_bits: int | str) -> OpenedModel:
    """Find a model, open its device, and hold it against the options of an `LLM`.

    Parameters
    ----------
    given : RunnerSettings
        As the user set them.
    control : ControlChannel
    device, dtype, weight_bits : str, str, int or str
        As of `LLM`.

    Raises
    ------
    UserError
        The model can't be had, or does not go with the options or with other ranks' models.
    """
    load, policy, h2o = given.load, given.policy, given.cache.h2o
    opened = open_device(control.device_name(device))
    opened.limit(load.device_memory_limit)
    with byte_bar("converting", off=load.no_bars) as bar:
        source = find_model(given.name, path=load.path, dtype=dtype, bits=weight_bits,
                      activation_bits=load.activation_bits, device=opened, progress=bar,
                      generation_config=load.generation_config)
    check_cache(source.config, h2o)
    cache = replace(given.cache, h2o=windowed(h2o, source.config.attention))
    settings = replace(given, cache=cache)
    check_halves(source.config, policy)
    check_experts(source.config, policy)
    prompts = Prompts(source, given.name, h2o)
    if load.calibration is not None:
        calibrate(source, prompts, opened, settings)
    workload = _expected(prompts, load, longest_prompt(source.config, h2o))
    rank = control.rank_context(
        policy, opened, layer_costs=_layer_costs(source.config), bounds=load.bounds,
        workload=workload,
        form=f"{source.config}, {source.dtype}, {weight_bits} bits, {load.activation_bits} of "
        f"activations, calibration {source.calibration or None}, {cache}, {policy}")
    if rank is not None:
        workload = rank.workload
        settings = replace(settings, cache=replace(cache, h2o=rank.stage.h2o(cache.h2o)))
    return OpenedModel(source, opened, prompts, cache, settings, rank, workload)


def _layer_costs(model: ModelConfig) -> list[float]:
    """Return the active parameters of each decoder layer; the last one includes the head."""
    costs = [float(model.layer_parameters(layer)) for layer in range(model.num_layers)]
    costs[-1] += model.vocab_size * model.embed_dim
    return costs


def _expected(prompts: Prompts, load: LoadOptions, longest: int | None) -> Workload | None:
    """The workload that an `LLM` is loaded for, once the texts for it are checked."""
    prompts.check_longest(load.texts, 1 if load.workload is None else load.workload.gen_len)
    if load.workload is None or not load.texts:
        return load.workload
    # The length of texts is an estimate, and may be of more than was let pass.
    return load.workload.cut(longest)
