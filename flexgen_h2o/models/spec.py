"""From a config.json, or the name of a published model, to what the engine knows of a model.

Imports neither torch nor transformers: the memory plan needs the sizes before those load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from flexgen_h2o.config.attention_form import AttentionForm
from flexgen_h2o.config.schema import checked
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import checkpoint_json
from flexgen_h2o.models.checkpoint_formats.settings import quantization
from flexgen_h2o.models.model_config import (
    ACTIVATIONS,
    ROPE_KINDS,
    ModelConfig,
    ModelWeights,
    RopeConfig,
    TensorSpec,
    renamed,
)
from flexgen_h2o.models.shapes import DEFAULTS, PUBLISHED, SAME_AS

__all__ = ["ACTIVATIONS", "ROPE_KINDS", "ModelConfig", "ModelWeights", "RopeConfig",
           "TensorSpec", "from_transformers", "published", "read_config", "renamed"]


# Sizes are held against the checkpoint's tensors, too. What is above these is a damaged file, and
# would make work without end before that: the largest of published models have 126 layers, a
# million words, tens of thousands of features and positions of ten to a hundred million.
MOST_TOKENS, _MOST_POSITIONS, _WIDEST = 1 << 24, 1 << 30, 1 << 20
_Token = Annotated[int, Meta(ge=0, le=MOST_TOKENS - 1)]
_Positive = Annotated[float, Meta(gt=0)]
_MOST = {"num_hidden_layers": 1 << 12, "vocab_size": MOST_TOKENS,
         "max_position_embeddings": _MOST_POSITIONS, "sliding_window": _MOST_POSITIONS,
         "original_max_position_embeddings": _MOST_POSITIONS}


def published(name: str) -> ModelConfig | None:
    """The shape of a published model, without any network.

    Parameters
    ----------
    name : str
        Such as "facebook/opt-30b" or "opt-30b"; case does not matter.

    Returns
    -------
    ModelConfig or None
        None for a name that is not in `shapes.PUBLISHED`.
    """
    for full in (*PUBLISHED, *SAME_AS):
        if name.lower() in (full.lower(), full.lower().split("/")[1]):
            return from_transformers(PUBLISHED[SAME_AS.get(full, full)], name)
    return None


def read_config(folder: Path) -> dict:
    """The `config.json` of a Hugging Face folder.

    Raises
    ------
    UserError
        If it is missing, not a file or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        raise UserError(f"there is no {path}: give a folder with a Hugging Face model")
    config = checkpoint_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object")
    return config


def from_transformers(config: Any, name: str) -> ModelConfig:
    """Read a transformers config, in the spelling of transformers 4 or 5.

    Parameters
    ----------
    config : dict or transformers.PretrainedConfig
        The content of config.json, or the object made from it.
    name : str
        What the user called the model; error messages begin with it.

    Raises
    ------
    UserError
        For an architecture or option that is not supported, and for values that make no sense.
    """
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise UserError(f"{name}: config.json must hold an object, not {type(values).__name__}")
    _refuse_unsupported(values, name)
    model_type = values["model_type"]
    return _READERS[model_type](_Fields(name, values, DEFAULTS[model_type]))


def _refuse_unsupported(values: Mapping[str, Any], name: str) -> None:
    attention = values.get("attn_config")
    nested = attention if isinstance(attention, Mapping) else {}
    if (values.get("alibi") or nested.get("alibi")
            or values.get("position_embedding_type") == "alibi"):
        raise UserError(f"{name}: ALiBi attention biases are not supported")
    for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        if values.get(key):
            raise UserError(f"{name}: mixture of experts ({key}) is not supported")
    quantization(values, name)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise UserError(f"{name}: model type {model_type!r} is not supported "
                        f"(supported: {', '.join(_READERS)})")


class _Fields:
    """Checked access to the values of one config.json."""

    def __init__(self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.name, self.values, self.defaults = name, values, defaults

    def raw(self, key: str) -> Any:
        """The value as given; null counts as missing, and the default stands in."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def fit(self, kind: Any, value: Any, key: str) -> Any:
        return checked(kind, value, f"{self.name}: config value {key}")

    def value(self, kind: Any, key: str) -> Any:
        return self.fit(kind, self.raw(key), key)

    def size(self, key: str, value: Any) -> int:
        return self.fit(Annotated[int, Meta(ge=1, le=_MOST.get(key, _WIDEST))], value, key)

    def count(self, key: str) -> int:
        return self.size(key, self.raw(key))

    def count_or(self, key: str, default: int) -> int:
        return default if self.raw(key) is None else self.count(key)

    def tokens(self, key: str) -> tuple[int, ...]:
        """Token ids given as one or as a list; null, unlike a missing key, means none."""
        value = self.values.get(key, self.defaults.get(key))
        ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        return self.fit(tuple[_Token, ...], ids, key)

    def head_dim(self) -> int:
        """hidden_size / num_attention_heads, which must be whole."""
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            raise UserError(f"{self.name}: config value hidden_size must be a multiple of "
                            f"num_attention_heads = {heads}, got {hidden}")
        return hidden // heads

    def common(self) -> dict[str, Any]:
        """The ModelConfig fields that every model type spells alike."""
        dtype = _first(self.values.get("dtype"), self.values.get("torch_dtype"))
        return {
            "name": self.name,
            "vocab_size": self.count("vocab_size"),
            "hidden_size": self.count("hidden_size"),
            "num_layers": self.count("num_hidden_layers"),
            "num_heads": self.count("num_attention_heads"),
            "max_positions": self.count("max_position_embeddings"),
            "tie_word_embeddings": self.value(bool, "tie_word_embeddings"),
            "eos_token_ids": self.tokens("eos_token_id"),
            "bos_token_id": next(iter(self.tokens("bos_token_id")), None),
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        }


def _first(*values: Any) -> Any:
    """The first that is not None (0 and false are values, and have to be seen to be refused)."""
    return next((value for value in values if value is not None), None)


def _opt(f: _Fields) -> ModelConfig:
    pre_norm, bias = f.value(bool, "do_layer_norm_before"), f.value(bool, "enable_bias")
    return ModelConfig(
        **f.common(),
        family="opt",
        num_kv_heads=f.count("num_attention_heads"),
        head_dim=f.head_dim(),
        ffn_size=f.count("ffn_dim"),
        activation=f.value(str, "activation_function"),
        attention_bias=bias,
        mlp_bias=bias,
        pre_norm=pre_norm,
        final_norm=pre_norm and not f.value(bool, "_remove_final_layer_norm"),
        norm_affine=f.value(bool, "layer_norm_elementwise_affine"),
        embed_dim=f.count_or("word_embed_proj_dim", f.count("hidden_size")),
    )


def _llama(f: _Fields) -> ModelConfig:
    mistral = f.values["model_type"] == "mistral"  # differs in its window, and never has a bias
    head_dim = f.count("head_dim") if f.raw("head_dim") is not None else f.head_dim()
    return ModelConfig(
        **f.common(),
        family="llama",
        num_kv_heads=f.count_or("num_key_value_heads", f.count("num_attention_heads")),
        head_dim=head_dim,
        ffn_size=f.count("intermediate_size"),
        activation=f.value(str, "hidden_act"),
        norm_eps=f.value(_Positive, "rms_norm_eps"),
        attention_bias=not mistral and f.value(bool, "attention_bias"),
        mlp_bias=not mistral and f.value(bool, "mlp_bias"),
        rope=_rope(f, head_dim, theta=f.raw("rope_theta")),
        attention=_windows(f) if mistral else (),
    )


def _gpt_neox(f: _Fields) -> ModelConfig:
    head_dim = f.head_dim()
    # transformers 4 wrote both keys; rotary_emb_base is the one that counted.
    theta = _first(f.values.get("rotary_emb_base"), f.values.get("rope_theta"))
    return ModelConfig(
        **f.common(),
        family="gpt_neox",
        num_kv_heads=f.count("num_attention_heads"),
        head_dim=head_dim,
        ffn_size=f.count("intermediate_size"),
        activation=f.value(str, "hidden_act"),
        norm_eps=f.value(_Positive, "layer_norm_eps"),
        attention_bias=f.value(bool, "attention_bias"),
        mlp_bias=True,
        rope=_rope(f, head_dim, theta=_first(theta, f.raw("rotary_emb_base"))),
        parallel_residual=f.value(bool, "use_parallel_residual"),
    )


_READERS: dict[str, Callable[[_Fields], ModelConfig]] = {
    "opt": _opt, "llama": _llama, "mistral": _llama, "gpt_neox": _gpt_neox,
}


def _windows(f: _Fields) -> tuple[AttentionForm, ...]:
    """The same window in all layers, unless no text can be as long."""
    if f.values.get("sliding_window", 0) is None:  # null switches it off; a missing key does not
        return ()
    window = f.count("sliding_window")
    if window >= f.count("max_position_embeddings"):
        return ()
    return (AttentionForm(window=window),) * f.count("num_hidden_layers")


def _rope(f: _Fields, head_dim: int, *, theta: Any) -> RopeConfig:
    """Rope options from `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
    given = f.values.get("rope_scaling") or f.values.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise UserError(f"{f.name}: rope parameters that are not one flat object are not supported")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UserError(f"{f.name}: rope type {kind!r} is not supported "
                        f"(supported: {', '.join(ROPE_KINDS)})")
    partial = f.fit(Annotated[float, Meta(gt=0, le=1)], _first(
        given.get("partial_rotary_factor"), f.raw("partial_rotary_factor"),
        f.raw("rotary_pct"), 1.0), "partial_rotary_factor")
    if f.values["model_type"] != "gpt_neox" and partial != 1.0:
        raise UserError(f"{f.name}: partial_rotary_factor = {partial} is not supported "
                        f"in a {f.values['model_type']} model")
    scaling: dict[str, Any] = {}
    if kind != "default":
        scaling["factor"] = f.fit(_Positive, given.get("factor"), "rope factor")
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            scaling[key] = f.fit(_Positive, given.get(key), f"rope {key}")
        if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
            raise UserError(f"{f.name}: config value rope high_freq_factor must be above "
                            f"low_freq_factor, got {scaling['high_freq_factor']}")
        # As transformers: a key beside the rope parameters wins over one inside.
        original = _first(f.raw("original_max_position_embeddings"),
                          given.get("original_max_position_embeddings"),
                          f.count("max_position_embeddings"))
        scaling["original_max_positions"] = f.size("original_max_position_embeddings", original)
    return RopeConfig(theta=f.fit(_Positive, _first(given.get("rope_theta"), theta), "rope_theta"),
                      rotary_dim=int(head_dim * partial), kind=kind, **scaling)
