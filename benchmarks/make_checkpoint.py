"""Write a Hugging Face folder of seeded random weights in a published shape, for benchmarks.

    python benchmarks/make_checkpoint.py --model facebook/opt-1.3b --out /tmp/opt-1.3b

The weights are those of ``--path _DUMMY_`` with the same seed; any system that reads a Hugging
Face folder can run them. There is no tokenizer: benchmarks give token ids.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from flexgen_h2o.errors import UserError
from flexgen_h2o.models import family
from flexgen_h2o.models.convert import natural_key, torch_dtype
from flexgen_h2o.models.dummy import DummyCheckpoint
from flexgen_h2o.models.safetensors_io import write_safetensors
from flexgen_h2o.models.spec import ModelConfig, published


def hf_config(cfg: ModelConfig, dtype: str) -> dict:
    """config.json of an OPT or LLaMA shape, in transformers' words."""
    if cfg.family not in _CONFIGS:
        raise UserError(f"{cfg.name}: benchmark checkpoints are made of OPT and LLaMA shapes only")
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
    rope = {"rope_type": cfg.rope.kind, "rope_theta": cfg.rope.theta}
    if cfg.rope.kind == "llama3":
        rope |= {"factor": cfg.rope.factor, "low_freq_factor": cfg.rope.low_freq_factor,
                 "high_freq_factor": cfg.rope.high_freq_factor,
                 "original_max_position_embeddings": cfg.rope.original_max_positions}
    if cfg.rope.kind not in ("default", "llama3") or cfg.attention or cfg.attention_bias:
        raise UserError(f"{cfg.name}: benchmark checkpoints of LLaMA shapes have neither biases "
                        "nor windows, and rotate plainly or as LLaMA 3")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "intermediate_size": cfg.ffn_size, "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim, "rms_norm_eps": cfg.norm_eps, "hidden_act": cfg.activation,
        "tie_word_embeddings": cfg.tie_word_embeddings, "rope_parameters": rope,
        "bos_token_id": cfg.bos_token_id, "eos_token_id": list(cfg.eos_token_ids),
    }


_CONFIGS = {"opt": _opt, "llama": _llama}


def make(model: str, out: Path, *, dtype: str = "bfloat16", seed: int = 0) -> None:
    """Write config.json and model.safetensors; the folder appears whole or not at all."""
    cfg = published(model)
    if cfg is None:
        raise UserError(f"no published shape is called {model!r}")
    config = hf_config(cfg, dtype)
    weights = family(cfg).weights(cfg)
    groups = (weights.embed, *weights.layers, weights.head)
    shapes = {spec.name: tuple(spec.shape) for group in groups for spec in group.values()}
    checkpoint = DummyCheckpoint(shapes, torch_dtype(dtype), seed)
    layout = {name: (torch_dtype(dtype), shapes[name]) for name in sorted(shapes, key=natural_key)}

    def chunks(name: str):
        tensor = torch.empty(shapes[name], dtype=torch_dtype(dtype))
        checkpoint.read(name, tensor)
        yield tensor

    building = out.with_name(f"{out.name}.building")
    building.mkdir(parents=True)
    (building / "config.json").write_text(json.dumps(config, indent=2))
    with tqdm(desc=model, unit="B", unit_scale=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        write_safetensors(building / "model.safetensors", layout, chunks, progress=show)
    building.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="facebook/opt-1.3b", help="published OPT or LLaMA shape")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args()
    if args.out.exists():
        print(f"error: {args.out} exists: remove it or choose another --out", file=sys.stderr)
        return 2
    try:
        make(args.model, args.out, dtype=args.dtype, seed=args.seed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
