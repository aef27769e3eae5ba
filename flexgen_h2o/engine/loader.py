"""From a model's name to an open checkpoint: configuration, dtype, names, tokenizer. No weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from flexgen_h2o.config import DUMMY, Placement
from flexgen_h2o.errors import UserError
from flexgen_h2o.models import family
from flexgen_h2o.models.checkpoint import Checkpoint, open_checkpoint, resolve
from flexgen_h2o.models.convert import Keep, cache_dir, weight_files
from flexgen_h2o.models.dummy import DummyCheckpoint
from flexgen_h2o.models.from_gguf import gguf_types
from flexgen_h2o.models.gguf_blocks import KINDS, GgufBlocks
from flexgen_h2o.models.quantized import QuantizingCheckpoint, cached
from flexgen_h2o.models.sources import checkpoint_folder, converted_folder, gguf_of, read_config
from flexgen_h2o.models.spec import ModelConfig, ModelWeights, from_transformers, published
from flexgen_h2o.models.weight_format import WeightFormat
from flexgen_h2o.storage.tiers import Device

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Progress = Callable[[int, int], None]


@dataclass
class Source:
    """A model that can be loaded: its shape, and where its tensors and its tokenizer are.

    folder is None for dummy weights of a published shape, which have no tokenizer either; gguf is
    the file that the folder was made from, if it was one; bits are those of a matrix's elements.
    """

    config: ModelConfig
    weights: ModelWeights
    dtype: torch.dtype
    folder: Path | None
    dummy: bool
    gguf: Path | None = None
    bits: int = 16

    @cached_property
    def form(self) -> WeightFormat:
        """How the tensors are held: in groups as a GGUF's, where it has any of so many bits."""
        if self._keeps_groups:
            return WeightFormat(self.dtype, self.bits, GgufBlocks.GROUP)
        return WeightFormat(self.dtype, self.bits)

    @property
    def _keeps_groups(self) -> bool:
        quantized = self.gguf is not None and self.bits != 16
        return quantized and not KINDS[self.bits].isdisjoint(gguf_types(self.folder))

    def open(self, placement: Placement, *, seed: int, weight_cache: str | None,
             progress: Progress) -> tuple[Checkpoint, dict[str, str]]:
        """The checkpoint in `form`, and its own name for each tensor that the model needs.

        Weights on disk are read straight from the checkpoint's bytes at every step; when these are
        of another dtype a converted copy is made, once, and reused. Quantized weights come from
        the weight cache.

        Parameters
        ----------
        placement : Placement
        seed : int
            Of dummy weights.
        weight_cache : str or None
            Folder for quantized weights; "auto": in the user's cache; None: they are made anew,
            as dummy weights always are.
        progress : callable
            Called with (bytes done, bytes in all) while a copy is made.

        Raises
        ------
        UserError
            A shard is missing or damaged, a tensor is missing or has a wrong shape.
        """
        groups = (self.weights.embed, *self.weights.layers, self.weights.head)
        specs = {spec.name: spec for group in groups for spec in group.values()}
        if self.dummy:
            shapes = {name: tuple(spec.shape) for name, spec in specs.items()}
            checkpoint = DummyCheckpoint(shapes, self.dtype, seed)
            names = {name: name for name in specs}
        else:
            checkpoint, names = self._resolve(self.folder, specs)
        if self.bits != 16:
            checkpoint = self._quantized(checkpoint, names, weight_cache, progress)
            return checkpoint, {name: name for name in specs}
        if self.dummy:
            return checkpoint, names
        if placement.disk > 0 and not all(self._direct(checkpoint, n) for n in names.values()):
            checkpoint.close()
            dtype = str(self.dtype).removeprefix("torch.")
            folder = converted_folder(self.folder, dtype, progress=progress)
            checkpoint, names = self._resolve(folder, specs)
        return checkpoint, names

    def _quantized(self, checkpoint: Checkpoint, names: dict[str, str], weight_cache: str | None,
                   progress: Progress) -> Checkpoint:
        """The checkpoint in `form`, by canonical names: from the cache, or quantized when read."""
        quantizing = QuantizingCheckpoint(checkpoint, names, self.form,
                                          gguf=self.gguf if self._keeps_groups else None)
        if self.dummy or weight_cache is None:
            return quantizing
        sources = [*weight_files(self.folder), *([self.gguf] if self.gguf else [])]
        return cached(quantizing, sources, keep=_weight_cache(weight_cache),
                      title=self.folder.name, progress=progress)

    def _resolve(self, folder: Path, specs) -> tuple[Checkpoint, dict[str, str]]:
        checkpoint = open_checkpoint(folder)
        try:
            return checkpoint, resolve(checkpoint, specs.values(), family(self.config).aliases)
        except BaseException:
            checkpoint.close()
            raise

    def _direct(self, checkpoint: Checkpoint, name: str) -> bool:
        info = checkpoint.info(name)
        plain = info.extent is not None and info.extent.offset % self.dtype.itemsize == 0
        return plain and info.dtype == self.dtype


def _weight_cache(chosen: str) -> Keep:
    advice = "choose another --weight-cache, or --no-weight-cache"
    root = cache_dir() / "weights" if chosen == "auto" else Path(os.path.expanduser(chosen))
    return Keep(root, advice)


def find(model: str, *, path: str | None, dtype: str, bits: int, device: Device,
         progress: Progress) -> Source:
    """Find a model by name, download or convert it if need be, and read its configuration.

    Parameters
    ----------
    model : str
        Repo id, local folder, `.gguf` file, ``smollm2-135m``, or a published shape's name.
    path : str, optional
        Folder or `.gguf` file of the weights; ``_DUMMY_`` for random weights of the shape.
    dtype : str
        auto, float16, bfloat16 or float32. auto is bfloat16 on a CPU, and on a GPU the
        checkpoint's own if it has 16 bits, else float16.
    bits : int
        Of the weights: 16 (as `dtype` says), 8 or 4.

    Raises
    ------
    UserError
        The model is unknown or not to be had, or its architecture is not supported.
    """
    dummy = path == DUMMY
    config = published(model) if dummy else None
    name = model if path is None or dummy else path
    folder = gguf = None
    if config is None:
        wanted = None if dtype == "auto" and device.torch.type == "cuda" else dtype
        wanted = "bfloat16" if wanted == "auto" else wanted
        gguf = gguf_of(name)
        folder = checkpoint_folder(name, dtype=wanted, progress=progress)
        config = from_transformers(read_config(folder), model)
    return Source(config, family(config).weights(config), _dtype(dtype, config, device), folder,
                  dummy, gguf, bits)


def _dtype(name: str, config: ModelConfig, device: Device) -> torch.dtype:
    if name == "auto":
        on_gpu = config.dtype if config.dtype in ("float16", "bfloat16") else "float16"
        name = on_gpu if device.torch.type == "cuda" else "bfloat16"
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: use auto, float16, bfloat16 or float32")
    return DTYPES[name]


def load_tokenizer(folder: Path | None):
    """The tokenizer of a folder, or None where it has none (dummy weights)."""
    if folder is None or not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # the libraries raise anything over a damaged file
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the tokenizer in {folder} can't be read ({type(error).__name__}: "
                        f"{reason}); get its files again") from error


def end_tokens(source: Source) -> tuple[int, ...]:
    """Token ids that end a text, as transformers' generate takes them."""
    path = source.folder and source.folder / "generation_config.json"
    if not path or not path.exists():
        return source.config.eos_token_ids
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise ValueError("eos_token_id is not a token id")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} can't be used ({error}): mend or remove it") from error
    return tuple(tokens) or source.config.eos_token_ids
