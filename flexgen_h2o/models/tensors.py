"""The tensors of a model by short names, and their sizes. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint.

    Attributes
    ----------
    name : str
        The canonical name, as transformers saves it.
    shape : tuple of int
    float32 : bool
        Keep it in float32 in runs of any dtype, and never quantize it.
    """

    name: str
    shape: tuple[int, ...]
    float32: bool = False


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model, by short names.

    Attributes
    ----------
    embed, head : dict of str to TensorSpec
        Tensors before the first and after the last layer. A tied head has the embedding's tensor.
    layers : tuple of dict of str to TensorSpec
        One dict per decoder layer, with matrices in the order of their use.
    tables : tuple of str
        Keys of `embed` that are lookup tables. Rows are gathered on the table's tier.
    mlp : tuple of str
        Keys of a layer that belong to its MLP half. A bias belongs to the half of its matrix.
    experts : tuple of tuple of dict of str to TensorSpec
        The tensors of each expert of each decoder layer; empty if there are none.
    """

    embed: dict[str, TensorSpec]
    layers: tuple[dict[str, TensorSpec], ...]
    head: dict[str, TensorSpec]
    tables: tuple[str, ...]
    mlp: tuple[str, ...] = ()
    experts: tuple[tuple[dict[str, TensorSpec], ...], ...] = ()

    def by_name(self) -> dict[str, TensorSpec]:
        """Return all tensors by canonical name: of embedding, layers, experts, head."""
        tables = (self.embed, *self.layers, *chain.from_iterable(self.experts), self.head)
        return {spec.name: spec for table in tables for spec in table.values()}

    def slice_layers(self, first: int, last: int) -> ModelWeights:
        """Return the same tables with the tensors of layers first:last only.

        Embedding and head are kept with the first and the last layer. `experts` has only these
        layers, `layers` an empty dict for each other layer.
        """
        layers = tuple(layer if first <= number < last else {}
                       for number, layer in enumerate(self.layers))
        return replace(self, layers=layers, experts=self.experts[first:last],
                       embed=self.embed if first == 0 else {},
                       head=self.head if last == len(self.layers) else {},
                       tables=self.tables if first == 0 else ())

    def split_halves(self) -> ModelWeights:
        """Return the same tables with each layer split in two: attention, then MLP."""
        halves = []
        for layer in self.layers:
            mlp = {name: spec for name, spec in layer.items()
                   if name.removesuffix("_bias") in self.mlp}
            halves += [{name: layer[name] for name in layer if name not in mlp}, mlp]
        return replace(self, layers=tuple(halves))


@dataclass(frozen=True)
class WeightShapes:
    """Sizes of the weights of a unit: embedding, layer or half of one, expert, or head.

    Attributes
    ----------
    matrices : tuple of (outputs, inputs)
        Shapes of matrices, and of tables as [rows, width].
    vectors : int
        Total elements of norms, biases, convolutions and stacks of matrices.
    float32 : int
        Total elements of tensors in float32: see `TensorSpec`.
    """

    matrices: tuple[tuple[int, int], ...]
    vectors: int = 0
    float32: int = 0

    @classmethod
    def from_specs(cls, specs: Mapping[str, TensorSpec],
                   never_quantized: Collection[tuple[int, ...]] = ()) -> WeightShapes:
        """Return the sizes of tensors by short name.

        Stacks of matrices, and matrices with a shape in `never_quantized`, count as vectors.
        """
        shapes = [spec.shape for spec in specs.values() if not spec.float32]
        plain = [shape for shape in shapes if len(shape) != 2 or shape in never_quantized]
        return cls(tuple((shape[0], shape[1]) for shape in shapes
                         if len(shape) == 2 and shape not in never_quantized),
                   sum(map(math.prod, plain)),
                   sum(math.prod(spec.shape) for spec in specs.values() if spec.float32))

    @property
    def parameters(self) -> int:
        """Total elements."""
        matrices = sum(outputs * inputs for outputs, inputs in self.matrices)
        return matrices + self.vectors + self.float32

    def vector_bytes(self, itemsize: int) -> int:
        """Return the bytes of all but the matrices, for a run whose dtype has `itemsize`."""
        return self.vectors * itemsize + self.float32 * 4
