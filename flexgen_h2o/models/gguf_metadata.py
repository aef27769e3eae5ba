"""Checked access to the values of a GGUF file. No torch."""

from __future__ import annotations

import math

from flexgen_h2o.errors import UserError, shown
from flexgen_h2o.models.gguf_header import GgufHeader, StoredTensor, Value

_MOST = (1 << 31) - 1


class Metadata:
    """The values of a GGUF file by their keys, without the architecture in front.

    Every method takes the value for a missing key; without one a missing key is refused. A value of
    another type, or out of all reason, is refused by its key.

    Parameters
    ----------
    header : GgufHeader

    Attributes
    ----------
    architecture : str
        What `general.architecture` says; "unknown" where there is none.
    tensors : mapping of str to StoredTensor
    """

    def __init__(self, header: GgufHeader):
        self.source, self.tensors = header.source, header.tensors
        self._values = header.values
        self.architecture = str(self._values.get("general.architecture", "unknown"))

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` to 2^31 - 1."""
        value = self._value(key, default)
        if isinstance(value, tuple) and len(set(value)) == 1:  # one number for each layer
            value = value[0]
        if isinstance(value, tuple) and all(type(each) is int for each in value):
            raise UserError(f"{self.source}: its layers differ in {key}; one number for all layers "
                            "is needed")
        if type(value) is not int or not least <= value <= _MOST:
            raise self._wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, (bool, str, tuple)) or not (math.isfinite(value) and value > 0):
            raise self._wrong(key, value)
        return decimal(float(value))

    def flag(self, key: str, default: bool) -> bool:
        """Yes or no."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value)
        return value

    def text(self, key: str, default: str) -> str:
        """A text of some words."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value)
        return value

    def flags(self, key: str, length: int) -> tuple[bool, ...] | None:
        """One yes or no for each of `length` layers; None for a missing key, or a single number."""
        value = self._values.get(self._full(key))
        if value is None or type(value) is int:
            return None
        if not isinstance(value, tuple) or len(value) != length or set(value) - {0, 1}:
            raise self._wrong(key, value)
        return tuple(map(bool, value))

    def token(self, name: str) -> int | None:
        """The id of a special token, such as "eos"; None where the file names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        return self.count(key, least=0) if key in self._values else None

    def has(self, key: str) -> bool:
        """True if there is a value of this key."""
        return self._full(key) in self._values

    def tensor(self, name: str) -> StoredTensor:
        """A tensor that the file must have."""
        if name not in self.tensors:
            raise UserError(f"{self.source} has no tensor {name}; it is incomplete")
        return self.tensors[name]

    def _full(self, key: str) -> str:
        whole = key.startswith(("general.", "tokenizer.", "split."))
        return key if whole else f"{self.architecture}.{key}"

    def _value(self, key: str, default: Value | None) -> Value:
        value = self._values.get(self._full(key), default)
        if value is None:
            raise UserError(f"{self.source} has no value {self._full(key)}; it is incomplete")
        return value

    def _wrong(self, key: str, value: object) -> UserError:
        return UserError(f"{self.source}: its value {self._full(key)} makes no sense: "
                         f"{shown(value)}")


def decimal(value: float) -> float:
    """The decimal number of few digits that a float32 stands for, such as 1e-06."""
    return float(f"{value:.7g}")
