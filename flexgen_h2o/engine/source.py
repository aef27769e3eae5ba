"""From a model's name to an open checkpoint: configuration, dtype, weight bits, tensor names."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexgen_h2o.config.policy import DUMMY
from flexgen_h2o.config.weight_layout import (
    AUTO,
    DTYPES,
    INTEGER_BITS,
    WEIGHT_BITS,
    WeightOptions,
)
from flexgen_h2o.engine.args import EngineArgs
from flexgen_h2o.engine.weight_files import PersistentOffloadFile
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.disk_cache import (
    CacheFolder,
    SourceFiles,
    build_once,
    cache_dir,
    find_copy,
    model_title,
)
from flexgen_h2o.files.terminal import ByteProgress, byte_bar
from flexgen_h2o.kernels.dispatch import gpu_of, has_tensor_cores
from flexgen_h2o.models import family
from flexgen_h2o.models.checkpoint import Checkpoint, View, resolve, unstacked
from flexgen_h2o.models.checkpoint_files import DummyCheckpoint, open_checkpoint
from flexgen_h2o.models.convert import converted_folder, weight_files
from flexgen_h2o.models.gguf.checkpoint import GgufCheckpoint
from flexgen_h2o.models.gguf.config import unify_layouts
from flexgen_h2o.models.gguf.conversion import describe_gguf
from flexgen_h2o.models.gguf.header import GgufHeader, read_header
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.quantization import Quantization, quantization, weight_options
from flexgen_h2o.models.quantized import (
    QuantizingCheckpoint,
    WeightFormat,
    open_weight_cache,
    weight_cache_key,
)
from flexgen_h2o.models.registry import (
    MULTIMODAL,
    GenerationDefaults,
    from_transformers,
    published,
    published_quantization,
    read_config,
    read_generation_config,
)
from flexgen_h2o.models.sources import checkpoint_folder, gguf_of
from flexgen_h2o.models.tensors import ModelWeights, TensorSpec
from flexgen_h2o.storage.device import Device

_log = logging.getLogger(__name__)

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_COMPARED = 1 << 20  # elements of two tensors at a time
SMALL_SHARE = 0.01
"""Tensors of this share of a model's bytes are converted for each run instead of kept as a copy."""

MIN_KEPT_SECONDS = 1.0
"""Constants that are measured in less time are not kept in the weight cache."""


@dataclass
class ModelSource:
    """A model to load: its configuration, and the files of its tensors and its tokenizer.

    Attributes
    ----------
    config : ModelConfig
    weights : ModelWeights
    dtype : torch.dtype
    folder : Path or None
        Folder of configuration and tokenizer, and of the weights unless `gguf` has them. None for
        random weights of a published shape.
    dummy : bool
        The weights are random.
    generation : GenerationDefaults
    gguf : GgufHeader or None
        The GGUF file of the weights. With 16 bits the folder has a converted copy instead.
    bits : int or "auto"
        Bits of weights; "auto" only if `codes` has matrices.
    activation_bits : int
        Bits of activations in quantized matmuls.
    quantization : Quantization or None
        The quantized format of the folder's weights.
    codes : WeightOptions
        The options that keep the quantized values of `gguf`.
    on_gpu : bool
        Whether a GPU computes.
    weight_cache : str, path or None
        Folder for quantized weights. "auto": a folder in the user's cache. None: quantize in each
        run.
    seed : int
        Seed of random weights.
    calibration : str
        Hash of the calibration text; empty without calibration.
    has_mtp_layers : bool
        The checkpoint has layers for multi-token prediction.
    measure : callable, optional
        Returns the importance of each matrix's inputs, float32 [inputs], by canonical name.
    """

    config: ModelConfig
    weights: ModelWeights
    dtype: torch.dtype
    folder: Path | None
    dummy: bool
    generation: GenerationDefaults
    gguf: GgufHeader | None = None
    bits: int | str = 16
    activation_bits: int = 16
    quantization: Quantization | None = None
    codes: WeightOptions = WeightOptions()
    on_gpu: bool = False
    weight_cache: str | os.PathLike | None = AUTO
    seed: int = 0
    calibration: str = ""
    has_mtp_layers: bool = False
    measure: Callable[[], Mapping[str, torch.Tensor]] | None = None

    @cached_property
    def weight_format(self) -> WeightFormat:
        """Format of the loaded tensors. Groups are the checkpoint's if it has the same bits."""
        options = weight_options(self.codes, self.bits, self.config, self.quantization,
                                 on_gpu=self.on_gpu)
        options = replace(options, activation_bits=self.activation_bits)
        float32 = frozenset(name for name, spec in self.weights.by_name().items() if spec.float32)
        return WeightFormat(self.dtype, options, frozenset(self.config.never_quantized), float32)

    @property
    def writes_weights(self) -> bool:
        """True if the disk tier writes the weights: no file has them in `weight_format`."""
        return self.dummy if self.bits == 16 else self.weight_cache is None

    @property
    def offload_file(self) -> PersistentOffloadFile | None:
        """The file that keeps random weights for later runs.

        None for weights of a checkpoint, for 16-bit weights, and without a weight cache.
        """
        if not self.dummy or self.bits == 16 or self.weight_cache is None:
            return None
        weight_format = self.weight_format
        sizes = {name: weight_format.nbytes(spec) for name, spec in self.weights.by_name().items()}
        shapes = [spec.shape for spec in self.weights.by_name().values()]
        title = f"{self.config.name.replace('/', '--')}-dummy-{self.bits}bit"
        key = [self.seed, str(self.dtype), self.bits, weight_format.options.group, shapes]
        key += [sorted(weight_format.options.mxfp4)] if weight_format.options.mxfp4 else []
        return PersistentOffloadFile(self._cache_folder, title, key, sizes)

    @property
    def _cache_folder(self) -> CacheFolder:
        """The folder of the weight cache, which is not None."""
        root = (cache_dir() / "weights" if self.weight_cache in (AUTO, None)
                else Path(os.path.expanduser(self.weight_cache)))
        return CacheFolder(root, "choose another --weight-cache, or --no-weight-cache")

    def open(self, *, on_disk: bool, progress: ByteProgress
             ) -> tuple[Checkpoint, dict[str, str]]:
        """Open the checkpoint in `weight_format`. Return it with its name for each canonical name.

        Weights on disk are read from the checkpoint's bytes at every step. If the dtype of more
        than `SMALL_SHARE` of them differs, a converted copy is made once. Quantized weights come
        from the weight cache. The quantized values of a GGUF file are repacked in a second, so they
        come from the file unless they are on disk.

        Parameters
        ----------
        on_disk : bool
            Some weights are placed on disk.
        progress : callable
            Called with (bytes done, all bytes) while a copy is made.

        Raises
        ------
        UserError
            A shard is missing or damaged, a tensor is missing or has a wrong shape.
        """
        specs = self.weights.by_name()
        if self.dummy:
            shapes = {name: tuple(spec.shape) for name, spec in specs.items()}
            checkpoint: Any = DummyCheckpoint(shapes, self.dtype, self.seed)
            names = {name: name for name in specs}
        else:
            checkpoint, names = self._resolve(specs, self.folder)
        if self.bits != 16:
            checkpoint = QuantizingCheckpoint(checkpoint, names, self.weight_format)
            # Random weights are generated when they are read: see `offload_file`.
            if self.weight_cache is not None and (on_disk or self.bits != AUTO) and not self.dummy:
                checkpoint = open_weight_cache(
                    checkpoint, self._files, cache=self._cache_folder, title=self._title,
                    calibration=self._variant, measure=self.measure, progress=progress)
            elif self.measure is not None:
                checkpoint.importance = self.measure()
            return checkpoint, {name: name for name in specs}
        if self.dummy:
            return checkpoint, names
        if on_disk and self.gguf is None and self._converts(specs, checkpoint, names):
            with closing(checkpoint):
                for name in names.values():  # the copy has floating-point tensors only
                    checkpoint.check_dtype(name)
            dtype = str(self.dtype).removeprefix("torch.")
            folder = converted_folder(self.folder, dtype, progress=progress,
                                      views=_views(self.config),
                                      float32={names[name] for name in self.weight_format.float32})
            checkpoint, names = self._resolve(specs, folder)
        return checkpoint, names

    @property
    def is_cached(self) -> bool:
        """True if the weight cache has the quantized weights."""
        return self.weight_cache is not None and find_copy(
            self._files, weight_cache_key(self.weight_format, self._variant),
            self._cache_folder) is not None

    @property
    def _variant(self) -> str:
        """Part of the key of quantized copies, beside the files and the format."""
        return "mtp" if self.config.first_layer else self.calibration

    @property
    def _files(self) -> list[Path]:
        """The files of the weights."""
        return weight_files(self.folder) if self.gguf is None else list(self.gguf.files)

    @property
    def _title(self) -> str:
        """The beginning of folder names in the weight cache."""
        return model_title(self.folder) if self.gguf is None else self.gguf.source.stem

    def cached_constants(self, measure: Callable[[], np.ndarray], description: str) -> np.ndarray:
        """Return constants of the model from the weight cache, or measure and cache them.

        `description` names the constants. It must change if their measurement changes.
        """
        if self.weight_cache is None:
            return measure()
        dtype = str(self.dtype).removeprefix("torch.")
        key = f"{description}-{self.bits}bit-{self.activation_bits}-{dtype}"
        cache = self._cache_folder
        if (folder := find_copy(self._files, key, cache)) is not None:
            with suppress(OSError, ValueError):  # damaged
                return np.load(folder / "constants.npy", allow_pickle=False)
        began = time.perf_counter()
        constants = measure()
        if time.perf_counter() - began > MIN_KEPT_SECONDS:
            with suppress(UserError):  # an unwritable folder must not end the run
                build_once(self._files, key, self._title, lambda folder: np.save(
                    folder / "constants.npy", constants, allow_pickle=False), cache=cache)
        return constants

    @property
    def expert_counts_file(self) -> Path | None:
        """The file for `engine.expert_counts`; None for random weights and without a weight cache.

        Its name has the key of the weights' files. Equal samples suffice: counts affect speed only.
        """
        if self.dummy or self.config.experts is None or self.weight_cache is None:
            return None
        key = SourceFiles(self._files, "experts").key
        return cache_dir() / "experts" / f"{self._title}-{key}.json"

    def _resolve(self, specs, folder: Path) -> tuple[Checkpoint, dict[str, str]]:
        checkpoint = unstacked(_opened(folder, self.gguf), _views(self.config))
        try:
            return checkpoint, resolve(checkpoint, specs.values(), family(self.config).aliases)
        except BaseException:
            checkpoint.close()
            raise

    def _converts(self, specs: Mapping[str, TensorSpec], checkpoint: Checkpoint,
                  names: Mapping[str, str]) -> bool:
        """Return True if more than a small share of the bytes is of another dtype in the file."""
        total = other = 0
        for name, spec in specs.items():
            nbytes, (dtype, _) = self.weight_format.nbytes(spec), self.weight_format.stored(spec)
            info = checkpoint.info(names[name])
            plain = info.extent is not None and info.extent.offset % dtype.itemsize == 0
            total += nbytes
            other += nbytes * (not plain or info.dtype != dtype)
        return other > SMALL_SHARE * total


def _opened(folder: Path, gguf: GgufHeader | None) -> Checkpoint:
    """Open the checkpoint of a folder, or of the GGUF file that the folder describes."""
    return open_checkpoint(folder) if gguf is None else GgufCheckpoint(gguf)


def find_model(args: EngineArgs, device: Device) -> ModelSource:
    """Find a model by name, download or convert it if necessary, and read its configuration.

    `dtype` "auto" is bfloat16 on a CPU. On a GPU it is the checkpoint's dtype if it has 16 bits and
    the GPU supports it, else float16.

    Raises
    ------
    UserError
        The model is unknown or cannot be downloaded, its architecture is not supported, or bits are
        out of range or not supported on the device.
    """
    model, dtype, bits = args.model, args.dtype, args.weight_bits
    path = None if args.path is None else os.fspath(args.path)
    dummy = path == DUMMY
    config = published(model) if dummy else None
    name = model if path is None or dummy else path
    folder, file = None, None if config is not None else gguf_of(name)
    gguf = None if file is None or bits == 16 else read_header(file)
    if bits == AUTO and (gguf is None or not _has_codes(gguf)):
        bits = 16
    _check_bits(bits, args.activation_bits, device)
    stored = published_quantization(model) if dummy else None
    if config is None:
        copy_dtype = None if dtype == "auto" and device.torch_device.type == "cuda" else dtype
        copy_dtype = "bfloat16" if copy_dtype == "auto" else copy_dtype
        if gguf is None or bits == 16:
            gguf = None
            with byte_bar("converting", progress=args.progress) as update:
                folder = checkpoint_folder(name, dtype=copy_dtype, progress=update)
        else:
            folder = describe_gguf(gguf)
        _check_adapter(folder)
        raw_config = read_config(folder)
        config, stored = from_transformers(raw_config, model), quantization(raw_config, model)
        if raw_config["model_type"] in MULTIMODAL:
            _log.warning("%s: only the text model is loaded, not its vision tower", folder)
    codes, has_mtp_layers = WeightOptions(), False
    if dummy:
        weights = family(config).weights(config)
    else:
        weights, codes, has_mtp_layers = _weights(config, _opened(folder, gguf))
    generation = read_generation_config(folder, config.eos_token_ids,
                                        end_tokens_alone=not args.generation_config)
    return ModelSource(config, weights, _dtype(dtype, config, device), folder, dummy, generation,
                       gguf, bits, args.activation_bits, stored, codes,
                       device.torch_device.type == "cuda", args.weight_cache, args.seed,
                       has_mtp_layers=has_mtp_layers)


def mtp_source(source: ModelSource) -> ModelSource:
    """Return the source of a model's layer for multi-token prediction: see `mtp_model`.

    Raises
    ------
    UserError
        The checkpoint lacks the layer, or a part of it.
    """
    config = source.config.mtp_model
    assert config is not None  # or `check_speculation` raises
    weights, codes = config.weights, WeightOptions()
    if source.folder is not None:
        if not source.has_mtp_layers:
            raise UserError(f"{source.folder} lacks the layer for multi-token prediction that its "
                            "config.json names: use --speculate ngram or --draft-model")
        with unstacked(_opened(source.folder, source.gguf), _views(config)) as checkpoint:
            codes = _codes(config, weights, checkpoint)
    return replace(source, config=config, weights=weights, codes=codes, calibration="",
                   measure=None)


def _check_adapter(folder: Path) -> None:
    """Warn of a LoRA adapter beside a model, and refuse an adapter without a model."""
    name = next((name for name in _ADAPTER if (folder / name).exists()), None)
    advice = "merge it into the model, as peft's merge_and_unload does, and give that folder"
    if name is not None and not (folder / "config.json").exists():
        raise UserError(f"{folder} holds a LoRA adapter ({name}) and no model: {advice}")
    if name is not None:
        _log.warning("%s: the LoRA adapter beside the model (%s) is not applied: %s", folder, name,
                     advice)


def _has_codes(gguf: GgufHeader) -> bool:
    """Return True if a GGUF file has quantized matrices."""
    return any(tensor.ggml_type.bits != 16 and len(tensor.shape) > 1
               for tensor in gguf.tensors.values())


def _check_bits(bits: int | str, activation_bits: int, device: Device) -> None:
    if bits not in (AUTO, *WEIGHT_BITS):
        raise UserError(f"weight_bits must be auto, 16, 12, 8 or 4, got {bits!r}")
    if activation_bits not in (8, 16):
        raise UserError(f"activation_bits must be 16 or 8, got {activation_bits!r}")
    if activation_bits == 8 and bits not in (AUTO, *INTEGER_BITS):
        raise UserError(f"activation_bits 8 has no effect on weights of {bits} bits: "
                        f"{'add' if bits == 16 else 'use'} weight_bits 4")
    if activation_bits == 8 and device.torch_device.type != "cpu":
        raise UserError("activation_bits 8 works on a CPU only: leave it out, or compute on the "
                        "device cpu")


def _weights(config: ModelConfig, plain: Checkpoint) -> tuple[ModelWeights, WeightOptions, bool]:
    """Return a model's tensors, and the options that keep the checkpoint's quantized values.

    Also return whether the checkpoint has layers for multi-token prediction.

    The checkpoint is closed. Raise `UserError` if config.json does not belong to it, before memory
    is allocated by numbers of config.json.
    """
    decoder = family(config)
    with plain:
        names = plain.names()
        if config.num_layers > len(names):  # each layer has at least one tensor
            raise UserError(f"{plain.source} has {len(names)} tensors, but config.json calls "
                            f"for {config.num_layers} layers; do the two belong together?")
        checkpoint = unstacked(plain, _views(config))
        names = checkpoint.names()
        weights = decoder.weights(config)
        codes = _codes(config, weights, checkpoint)
        extended = decoder.weights(config.with_extra_layer())
        beyond = [name for spec in extended.layers[-1].values()
                  for name in decoder.aliases(spec.name)]
        extra = next((name for name in beyond if name in names), None)
        if extra is not None and not config.extra_layers:
            raise UserError(f"{checkpoint.source} has a tensor {extra}, but config.json calls for "
                            f"{config.num_layers} layers; do the two belong together?")
        if config.tie_word_embeddings:
            _refuse_own_head(config, checkpoint)
        has_mtp_layers = extra is not None or any(name.startswith("mtp.") for name in names)
        return weights, codes, has_mtp_layers


def _codes(config: ModelConfig, weights: ModelWeights, checkpoint: Checkpoint) -> WeightOptions:
    """Return the options that keep each matrix's quantized layout, or else the run's dtype.

    Raises
    ------
    UserError
        A tensor is missing or of another shape.
    """
    names = resolve(checkpoint, weights.by_name().values(), family(config).aliases)
    layouts = {name: checkpoint.stored_layout(names[name]) for name in weights.by_name()}
    stored = {name: layout for name, layout in layouts.items() if layout is not None}
    for specs in chain.from_iterable(weights.experts):
        unify_layouts(stored, specs["gate"].name, specs["up"].name)
    never = config.never_quantized
    stored = {name: layout for name, layout in stored.items()
              if (layout.outputs, layout.inputs) not in never}
    plain = tuple((spec.shape[0], spec.shape[1]) for name, spec in weights.by_name().items()
                  if len(spec.shape) == 2 and name not in stored and spec.shape not in never
                  and not spec.float32)
    return WeightOptions(layouts=stored, unquantized_shapes=plain) if stored else WeightOptions()


def _refuse_own_head(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise `UserError` if a tied checkpoint also has an output matrix with other values.

    transformers 4 uses the token table then, and transformers 5 the output matrix.
    """
    decoder, names = family(config), checkpoint.names()
    specs = (decoder.weights(replace(config, tie_word_embeddings=tied)).head["lm_head"]
             for tied in (True, False))
    table, head = (next((name for name in decoder.aliases(spec.name) if name in names), None)
                   for spec in specs)
    if head is not None and not _same(checkpoint, table, head):
        raise UserError(f"{checkpoint.source}: tensor {head} differs from {table}, but config.json "
                        "ties them: set tie_word_embeddings to false to use it, or take it out")


def _same(checkpoint: Checkpoint, *names: str) -> bool:
    """Return True if two tensors have equal shapes and values. Reads a few MB at a time."""
    shapes = [checkpoint.info(name).shape for name in names]
    size, parts = math.prod(shapes[0]), torch.empty(2, _COMPARED)
    for start in range(0, size if shapes[0] == shapes[1] else 0, _COMPARED):
        pair = parts[:, : size - start]
        for name, part in zip(names, pair, strict=True):
            checkpoint.read_part(name, start, part)
        if not torch.equal(*pair):
            return False
    return shapes[0] == shapes[1]


def _views(config: ModelConfig) -> Mapping[str, Sequence[View]]:
    """Return the parts of a checkpoint's tensors that are tensors of the model."""
    return family(config).views(config)


def _dtype(name: str, config: ModelConfig, device: Device) -> torch.dtype:
    if name == "auto":
        gpu = gpu_of(device.torch_device)
        native = config.dtype in ("float16", "bfloat16") and (
            gpu is None or has_tensor_cores(gpu, torch.bfloat16))
        name = "bfloat16" if gpu is None else config.dtype if native else "float16"
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: use auto, float16, bfloat16 or float32")
    return getattr(torch, name)
