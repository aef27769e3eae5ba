"""Checked access to the values of a config.json. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta

from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.config.validation import validate
from flexgen_h2o.errors import UserError

# Upper bounds of sizes, so that a damaged file fails at once. Sizes are also compared with the
# checkpoint's tensors. The largest published models have 126 layers, a million tokens, tens of
# thousands of features and ten to a hundred million positions.
MAX_TOKENS, MAX_POSITIONS, _WIDEST = 1 << 24, 1 << 30, 1 << 20
_Token = Annotated[int, Meta(ge=0, le=MAX_TOKENS - 1)]
Positive = Annotated[float, Meta(gt=0)]
_MAX_VALUES = {"num_hidden_layers": 1 << 12, "vocab_size": MAX_TOKENS,
               "max_position_embeddings": MAX_POSITIONS, "sliding_window": MAX_POSITIONS,
               "original_max_position_embeddings": MAX_POSITIONS, "num_experts": 1 << 10,
               **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts",
                                "num_experts_per_tok", "moe_k"), 1 << 10)}
LAYER_TYPES = ("full_attention", "sliding_attention")

LLAMA: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False})
"""The values that transformers assumes for keys missing in the config.json of a LLaMA."""


class Fields:
    """Checked access to the values of one config.json.

    Parameters
    ----------
    name : str
        The user's name of the model; error messages begin with it.
    values : mapping
        The content of config.json.
    defaults : mapping
        transformers' defaults for missing keys, where they differ from `LLAMA`.
    family : str
        Module and class in `families`.
    """

    def __init__(self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any],
                 family: str):
        self.name, self.values, self.family = name, values, family
        self.defaults: Mapping[str, Any] = {**LLAMA, **defaults}

    def raw(self, key: str) -> Any:
        """Return the unchecked value of a key; the default if it is missing or null."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def fit(self, kind: Any, value: Any, key: str) -> Any:
        """Return a value converted to the type `kind`; raise `UserError` if it does not fit."""
        return validate(kind, value, f"{self.name}: config value {key}")

    def value(self, kind: Any, key: str) -> Any:
        """Return the value of a key as the type `kind`."""
        return self.fit(kind, self.raw(key), key)

    def number(self, key: str) -> float:
        """Return the value of a key, a number above 0."""
        return self.value(Positive, key)

    def number_or(self, key: str, default: float) -> float:
        """Return the value of a key, a number above 0; `default` if it is null or has none."""
        value = self.values.get(key, self.defaults.get(key))
        return default if value is None else self.fit(Positive, value, key)

    def flag(self, key: str) -> bool:
        """Return the value of a key, a boolean."""
        return self.value(bool, key)

    def size(self, key: str, value: Any) -> int:
        """Return a value as an integer from 1 to the bound of `key`."""
        return self.fit(Annotated[int, Meta(ge=1, le=_MAX_VALUES.get(key, _WIDEST))], value, key)

    def count(self, key: str) -> int:
        """Return the value of a key, an integer above 0."""
        return self.size(key, self.raw(key))

    def count_or(self, key: str, default: int) -> int:
        """Return the value of a key, an integer above 0; `default` if it has none."""
        return default if self.raw(key) is None else self.count(key)

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return token ids, from a single id or a list; null means none."""
        value = self.values.get(key, self.defaults.get(key))
        ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        return self.fit(tuple[_Token, ...], ids, key)

    def head_dim(self) -> int:
        """Return head_dim; if it is null or has no default, hidden_size / num_attention_heads."""
        head_dim = self.values.get("head_dim", self.defaults.get("head_dim"))
        if head_dim is not None:
            return self.size("head_dim", head_dim)
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            raise UserError(f"{self.name}: config value hidden_size must be a multiple of "
                            f"num_attention_heads = {heads}, got {hidden}")
        return hidden // heads

    def kv_heads(self) -> int:
        """Return num_key_value_heads; if it is null or has no default, num_attention_heads."""
        key = "num_key_value_heads"
        value = self.values.get(key, self.defaults.get(key))
        return self.count("num_attention_heads") if value is None else self.size(key, value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the JSON object of a key; an empty one if there is none."""
        value = self.raw(key) or {}
        if not isinstance(value, Mapping):
            raise UserError(f"{self.name}: config value {key} must be an object")
        return value

    def refuse(self, key: str) -> None:
        """Raise `UserError` unless a key is missing, null, 0 or false."""
        if self.raw(key):
            raise UserError(f"{self.name}: {key} = {self.raw(key)} is not supported in a "
                            f"{self.values.get('model_type')} model")

    def sizes(self, *, grouped: bool = True) -> dict[str, Any]:
        """Return the `ModelConfig` fields that have the same keys in every model type.

        Parameters
        ----------
        grouped : bool
            Whether num_key_value_heads is read.
        """
        dtype = first(self.values.get("dtype"), self.values.get("torch_dtype"))
        extra = first(self.raw("num_nextn_predict_layers"), self.raw("num_mtp_layers"), 0)
        return {
            "name": self.name,
            "family": self.family,
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
            "extra_layers": self.fit(Annotated[int, Meta(ge=0)], extra, "num_nextn_predict_layers"),
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        }

    def window(self) -> int | None:
        """Return sliding_window; None if it is null or has no default."""
        if self.values.get("sliding_window", 0) is None or self.raw("sliding_window") is None:
            return None
        return self.count("sliding_window")

    def local_layers(self, is_local: Callable[[int], bool],
                     types: tuple[str, str] = LAYER_TYPES) -> tuple[bool, ...]:
        """Return for each layer whether it has the second of two types: sliding windows.

        It follows from layer_types or, without this key, from `is_local` (layer number).
        """
        layers, kinds = self.count("num_hidden_layers"), self.raw("layer_types")
        if kinds is None:
            return tuple(map(is_local, range(layers)))
        kinds = self.fit(list[str], list(kinds) if isinstance(kinds, tuple) else kinds,
                         "layer_types")
        if len(kinds) != layers or not set(kinds) <= set(types):
            raise UserError(f"{self.name}: config value layer_types must say {types[0]} or "
                            f"{types[1]} for each of {layers} layers")
        return tuple(kind == types[1] for kind in kinds)

    def attention_variants(self, local: tuple[bool, ...] | bool, *, scale: float | None = None,
                           softcap: float = 0.0, sinks: bool = False
                           ) -> tuple[AttentionVariant, ...]:
        """Return the variant of attention of each layer. Local layers have the window.

        Parameters
        ----------
        local : tuple of bool, or bool
            Whether a layer is local, or whether all are.
        """
        if isinstance(local, bool):
            local = (local,) * self.count("num_hidden_layers")
        window = self.window() if any(local) else None
        return tuple(AttentionVariant(scale=scale, softcap=softcap, sinks=sinks,
                                      window=window if is_local else None) for is_local in local)


def first(*values: Any) -> Any:
    """Return the first value that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)
