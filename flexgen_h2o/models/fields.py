"""Checked access to the values of a config.json. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

from msgspec import Meta

from flexgen_h2o.config.attention_form import AttentionForm
from flexgen_h2o.config.validation import validated
from flexgen_h2o.errors import UserError

# Sizes are held against the checkpoint's tensors, too. What is above these is a damaged file, and
# would make work without end before that: the largest of published models have 126 layers, a
# million words, tens of thousands of features and positions of ten to a hundred million.
MOST_TOKENS, MOST_POSITIONS, _WIDEST = 1 << 24, 1 << 30, 1 << 20
_Token = Annotated[int, Meta(ge=0, le=MOST_TOKENS - 1)]
Positive = Annotated[float, Meta(gt=0)]
_MOST = {"num_hidden_layers": 1 << 12, "vocab_size": MOST_TOKENS,
         "max_position_embeddings": MOST_POSITIONS, "sliding_window": MOST_POSITIONS,
         "original_max_position_embeddings": MOST_POSITIONS, "num_experts": 1 << 10,
         "num_local_experts": 1 << 10, "num_experts_per_tok": 1 << 10}
LAYER_TYPES = ("full_attention", "sliding_attention")


class Rotation(Protocol):
    """Rotary positions: `rope.RopeConfig`, which is read by way of `Fields`."""

    def reach(self, max_positions: int) -> int:
        """The positions that a model of so many in config.json can take."""


class Fields:
    """Checked access to the values of one config.json.

    Parameters
    ----------
    name : str
        What the user called the model; error messages begin with it.
    values : mapping
        The content of config.json.
    defaults : mapping
        What transformers assumes for a key that is missing.
    """

    def __init__(self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.name, self.values, self.defaults = name, values, defaults

    def raw(self, key: str) -> Any:
        """The value as given; null counts as missing, and the default stands in."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def fit(self, kind: Any, value: Any, key: str) -> Any:
        """A value as the type `kind`; UserError where it is none, which says `key`."""
        return validated(kind, value, f"{self.name}: config value {key}")

    def value(self, kind: Any, key: str) -> Any:
        """The value of a key as the type `kind`."""
        return self.fit(kind, self.raw(key), key)

    def number(self, key: str) -> float:
        """The value of a key, a number above 0."""
        return self.value(Positive, key)

    def number_or(self, key: str, default: float) -> float:
        """The value of a key, a number above 0, or a default where there is none; null, unlike a
        missing key, means none."""
        value = self.values.get(key, self.defaults.get(key))
        return default if value is None else self.fit(Positive, value, key)

    def flag(self, key: str) -> bool:
        """The value of a key, true or false."""
        return self.value(bool, key)

    def size(self, key: str, value: Any) -> int:
        """A value as a size of what `key` says."""
        return self.fit(Annotated[int, Meta(ge=1, le=_MOST.get(key, _WIDEST))], value, key)

    def count(self, key: str) -> int:
        """The value of a key, a size."""
        return self.size(key, self.raw(key))

    def count_or(self, key: str, default: int) -> int:
        """The value of a key, a size, or a default where there is none."""
        return default if self.raw(key) is None else self.count(key)

    def tokens(self, key: str) -> tuple[int, ...]:
        """Token ids given as one or as a list; null, unlike a missing key, means none."""
        value = self.values.get(key, self.defaults.get(key))
        ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        return self.fit(tuple[_Token, ...], ids, key)

    def head_dim(self) -> int:
        """head_dim if there is one (null, unlike a missing key, means none), else hidden_size /
        num_attention_heads, which must be whole."""
        given = self.values.get("head_dim", self.defaults.get("head_dim"))
        if given is not None:
            return self.size("head_dim", given)
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            raise UserError(f"{self.name}: config value hidden_size must be a multiple of "
                            f"num_attention_heads = {heads}, got {hidden}")
        return hidden // heads

    def kv_heads(self) -> int:
        """num_key_value_heads if there is one (null, unlike a missing key, means none), else as
        many as there are query heads."""
        key = "num_key_value_heads"
        given = self.values.get(key, self.defaults.get(key))
        return self.count("num_attention_heads") if given is None else self.size(key, given)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """The object that stands under a key; an empty one where there is none."""
        value = self.raw(key) or {}
        if not isinstance(value, Mapping):
            raise UserError(f"{self.name}: config value {key} must be an object")
        return value

    def inside(self, key: str) -> Fields:
        """The object that stands under a key, with what it lacks and this one has; this one's end
        tokens count."""
        ends = {name: value for name, value in self.values.items() if name == "eos_token_id"}
        values = {**self.values, **self.mapping(key), **ends}
        return Fields(self.name, values, self.defaults)

    def refuse(self, key: str) -> None:
        """Raise `UserError` where a key is neither missing, null, 0 nor false."""
        if self.raw(key):
            raise UserError(f"{self.name}: {key} = {self.raw(key)} is not supported in a "
                            f"{self.values.get('model_type')} model")

    def common(self, family: str, *, grouped: bool = True) -> dict[str, Any]:
        """The ModelConfig fields that every model type spells alike.

        grouped: there may be fewer key heads than query heads.
        """
        dtype = first(self.values.get("dtype"), self.values.get("torch_dtype"))
        return {
            "name": self.name,
            "family": family,
            "vocab_size": self.count("vocab_size"),
            "hidden_size": self.count("hidden_size"),
            "num_layers": self.count("num_hidden_layers"),
            "num_heads": self.count("num_attention_heads"),
            "num_kv_heads": self.kv_heads() if grouped else self.count("num_attention_heads"),
            "head_dim": self.head_dim(),
            "max_positions": self.count("max_position_embeddings"),
            "tie_word_embeddings": self.flag("tie_word_embeddings"),
            "eos_token_ids": self.tokens("eos_token_id"),
            "bos_token_id": next(iter(self.tokens("bos_token_id")), None),
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        }

    def decoder(self, family: str, rope: Rotation, *, activation: str = "hidden_act",
                eps: str = "rms_norm_eps") -> dict[str, Any]:
        """`common` of a model with rotary positions, and what such models spell alike: the width
        of the MLP, its activation and the smallest variance under the keys of these names."""
        common = self.common(family)
        return common | {
            "max_positions": rope.reach(common["max_positions"]),
            "rope": rope,
            "ffn_size": self.count("intermediate_size"),
            "activation": self.value(str, activation),
            "norm_eps": self.number(eps),
        }

    def window(self) -> int | None:
        """sliding_window, or None where it is null (a missing key has the default)."""
        if self.values.get("sliding_window", 0) is None or self.raw("sliding_window") is None:
            return None
        return self.count("sliding_window")

    def local_layers(self, is_local: Callable[[int], bool]) -> tuple[bool, ...]:
        """True for each layer of sliding_attention: as layer_types says, or `is_local` (number)
        where there is no such key."""
        layers, types = self.count("num_hidden_layers"), self.raw("layer_types")
        if types is None:
            return tuple(map(is_local, range(layers)))
        types = self.fit(list[str], list(types) if isinstance(types, tuple) else types,
                         "layer_types")
        if len(types) != layers or not set(types) <= set(LAYER_TYPES):
            raise UserError(f"{self.name}: config value layer_types must say {LAYER_TYPES[0]} or "
                            f"{LAYER_TYPES[1]} for each of {layers} layers")
        return tuple(each == LAYER_TYPES[1] for each in types)

    def forms(self, local: tuple[bool, ...], *, scale: float | None = None, softcap: float = 0.0,
              sinks: bool = False) -> tuple[AttentionForm, ...]:
        """The attention of each layer, of which the local ones have the window; empty where all
        are of the default form."""
        window = self.window() if any(local) else None
        forms = tuple(AttentionForm(scale=scale, softcap=softcap, sinks=sinks,
                                    window=window if each else None) for each in local)
        return () if set(forms) == {AttentionForm()} else forms


def first(*values: Any) -> Any:
    """The first that is not None (0 and false are values, and have to be seen to be refused)."""
    return next((value for value in values if value is not None), None)
