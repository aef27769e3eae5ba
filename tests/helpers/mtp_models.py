"""Tiny models with a layer for multi-token prediction, and what it predicts in plain PyTorch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from helpers.mixture_cases import LATENT, MIXTURES
from helpers.tiny_models import make_tiny


@dataclass(frozen=True)
class MtpModel:
    """A saved model and its layer for multi-token prediction.

    `extra` has the layer's tensors beside those of a decoder layer, by name.
    """

    folder: Path
    model: nn.Module
    layer: nn.Module
    extra: dict[str, Tensor]

    def drafts(self, text: list[int], count: int) -> Tensor:
        """Return the logits [count, vocab] of greedy drafts after a text.

        arXiv 2412.19437, section 2.2, with one module: it continues by its own hidden states.
        """
        inner, tokens, logits = self.model.model, list(text), []
        hidden = inner(torch.tensor([text])).last_hidden_state[:, :-1]  # normed
        for _ in range(count):
            embedded = inner.embed_tokens(torch.tensor([tokens[1:]]))
            x = linear(torch.cat([self._norm("enorm", embedded), self._norm("hnorm", hidden)], -1),
                       self.extra["eh_proj"])
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((1, 1, x.shape[1], x.shape[1]), float("-inf")).triu(1)
            x = self.layer(x, attention_mask=mask, position_ids=positions,
                           position_embeddings=inner.rotary_emb(x, positions))
            logits.append(self.model.lm_head(self._norm("shared_head.norm", x[:, -1]))[0])
            tokens.append(int(logits[-1].argmax()))
            hidden = torch.cat([hidden, x[:, -1:]], 1)
        return torch.stack(logits)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.extra[name]


def make_mtp(key: str, folder: Path, **changes: Any) -> MtpModel:
    """Build the model of a key with one layer more, which becomes the layer for prediction.

    `changes` are values of its config.
    """
    layers = (LATENT | MIXTURES)[key]().num_hidden_layers
    tiny = make_tiny(key, folder, num_hidden_layers=layers + 1, **changes)
    hidden, generator = tiny.config.hidden_size, torch.Generator().manual_seed(0)
    extra = {name: 1 + 0.2 * torch.randn(hidden, generator=generator)
             for name in ("enorm", "hnorm", "shared_head.norm")}
    extra["eh_proj"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    save_mtp(folder, layers, extra | {"embed_tokens": tiny.model.model.embed_tokens.weight,
                                      "shared_head.head": tiny.model.lm_head.weight})
    *kept, layer = tiny.model.model.layers
    tiny.model.model.layers = nn.ModuleList(kept)
    tiny.config.num_hidden_layers, tiny.config.num_nextn_predict_layers = layers, 1
    return MtpModel(folder, tiny.model, layer, extra)


def save_mtp(folder: Path, layers: int, extra: dict[str, Tensor]) -> None:
    """Add tensors to layer number `layers` of a saved model, which has as many others."""
    weights = load_file(folder / "model.safetensors")
    weights |= {f"model.layers.{layers}.{name}.weight": tensor.clone()
                for name, tensor in extra.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
