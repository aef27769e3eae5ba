"""Write a Hugging Face folder of seeded random weights in a published shape, for benchmarks.

    python benchmarks/make_checkpoint.py --model facebook/opt-1.3b --out /tmp/opt-1.3b

The weights equal those of ``--path _DUMMY_`` with the same seed. Any system that reads a Hugging
Face folder can run them. There is no tokenizer: benchmarks give token ids. ``--layers`` keeps only
the first layers, if the disk is too small for all.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import catch_write_errors
from flexgen_h2o.models import family
from flexgen_h2o.models.checkpoint_files import DummyCheckpoint
from flexgen_h2o.models.convert import natural_key, torch_dtype
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.registry import published
from flexgen_h2o.models.safetensors_io import write_safetensors


def hf_config(cfg: ModelConfig, dtype: str) -> dict:
    """Return the config.json of an OPT, LLaMA, Qwen2 or Qwen3-MoE shape."""
    if cfg.family not in _CONFIGS:
        raise UserError(f"{cfg.name}: benchmark checkpoints are made of OPT, LLaMA, Qwen2 and "
                        "Qwen3-MoE shapes only")
    return {"dtype": dtype, "vocab_size": cfg.vocab_size, "hidden_size": cfg.hidden_size,
            "num_hidden_layers": cfg.num_layers, "num_attention_heads": cfg.num_heads,
            "max_position_embeddings": cfg.max_positions, **_CONFIGS[cfg.family](cfg)}


def _opt(cfg: ModelConfig) -> dict:
    return {
        "architectures": ["OPTForCausalLM"], "model_type": "opt",
        "ffn_dim": cfg.ffn_size, "word_embed_proj_dim": cfg.embed_dim,
        "do_layer_norm_before": cfg.pre_norm, "activation_function": cfg.activation,
        "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    }


def _llama(cfg: ModelConfig) -> dict:
    rope = {"rope_type": cfg.rope.rope_type, "rope_theta": cfg.rope.theta}
    if cfg.rope.rope_type == "llama3":
        rope |= {"factor": cfg.rope.factor, "low_freq_factor": cfg.rope.low_freq_factor,
                 "high_freq_factor": cfg.rope.high_freq_factor,
                 "original_max_position_embeddings": cfg.rope.original_max_positions}
    if cfg.rope.rope_type not in ("default", "llama3") or cfg.attention or cfg.attention_bias:
        raise UserError(f"{cfg.name}: benchmark checkpoints of LLaMA shapes have neither biases "
                        "nor windows, and rotate plainly or as LLaMA 3")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "intermediate_size": cfg.ffn_size, "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim, "rms_norm_eps": cfg.norm_eps, "hidden_act": cfg.activation,
        "tie_word_embeddings": cfg.tie_word_embeddings, "rope_parameters": rope,
        "bos_token_id": cfg.bos_token_id, "eos_token_id": list(cfg.eos_token_ids),
    }


def _qwen2(cfg: ModelConfig) -> dict:
    if cfg.qk_norm or cfg.mlp_bias:
        raise UserError(f"{cfg.name}: of Qwen's dense shapes, only those of Qwen2 can be made")
    return _llama(replace(cfg, attention_bias=False)) | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3_moe(cfg: ModelConfig) -> dict:
    return _llama(cfg) | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_experts": cfg.experts.count, "num_experts_per_tok": cfg.experts.per_token,
        "moe_intermediate_size": cfg.experts.ffn_size,
        "norm_topk_prob": cfg.experts.router.normalize,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }


_CONFIGS = {"opt.Opt": _opt, "llama.Llama": _llama, "qwen.Qwen": _qwen2,
            "qwen.Qwen3Moe": _qwen3_moe}


def shape_of(model: str, layers: int | None = None) -> ModelConfig:
    """Return a published shape, or its first `layers`. Raises `UserError` for an unknown one."""
    cfg = published(model)
    if cfg is None:
        raise UserError(f"no published shape is called {model!r}")
    if layers is not None and not 1 <= layers <= cfg.num_layers:
        raise UserError(f"--layers must be between 1 and the {cfg.num_layers} of {model}, got "
                        f"{layers}")
    return cfg if layers is None else cfg.slice_layers(0, layers)


def stacks_of(cfg: ModelConfig, names: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the checkpoint's tensors and the engine's tensors that each is made of, in order.

    All experts of a layer are one tensor, as in transformers' modules. Accelerate would copy
    separate ones to new files at each start.
    """
    places = {} if cfg.experts is None else family(cfg).views(cfg)
    stacks: dict[str, list[str]] = {}
    for name in names:
        stacks.setdefault(places[name][0].tensor if name in places else name, []).append(name)
    return stacks


def make(model: str, out: Path, *, dtype: str = "bfloat16", seed: int = 0,
         layers: int | None = None) -> None:
    """Write config.json and model.safetensors; the folder appears whole or not at all.

    Raises `UserError` if the shape or dtype is unknown, or the folder or leftovers of an earlier
    run exist.
    """
    exists = "exists: remove it or choose another --out"
    if out.exists():
        raise UserError(f"{out} {exists}")
    building = out.with_name(f"{out.name}.building")
    if building.exists():
        raise UserError(f"{building} {exists}")
    cfg = shape_of(model, layers)
    config = hf_config(cfg, dtype)
    number = torch_dtype(dtype)
    shapes = {name: spec.shape for name, spec in cfg.weights.by_name().items()}
    stacks = stacks_of(cfg, list(shapes))
    checkpoint = DummyCheckpoint(shapes, number, seed)
    layout = {name: (number, _stacked([shapes[part] for part in stacks[name]], cfg))
              for name in sorted(stacks, key=natural_key)}

    def chunks(name: str) -> Iterator[torch.Tensor]:
        for part in stacks[name]:
            tensor = torch.empty(shapes[part], dtype=number)
            checkpoint.read(part, tensor)
            yield tensor

    with catch_write_errors("--out", str(out)), tqdm(desc=model, unit="B", unit_scale=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        building.mkdir(parents=True)
        try:
            (building / "config.json").write_text(json.dumps(config, indent=2))
            write_safetensors(building / "model.safetensors", layout, chunks, progress=show)
            building.rename(out)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


def _stacked(shapes: Sequence[tuple[int, ...]], cfg: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a tensor made of these: a single one, or all experts of a layer."""
    if len(shapes) == 1:
        return shapes[0]
    count, inputs = cfg.experts.count, shapes[0][-1]
    return count, sum(map(math.prod, shapes)) // (count * inputs), inputs


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="facebook/opt-1.3b",
                        help="published OPT, LLaMA, Qwen2 or Qwen3-MoE shape")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--layers", type=int, help="number of layers to keep (default: all)")
    args = parser.parse_args(argv)
    make(args.model, args.out, dtype=args.dtype, seed=args.seed, layers=args.layers)


if __name__ == "__main__":
    sys.exit(exit_status(main))
