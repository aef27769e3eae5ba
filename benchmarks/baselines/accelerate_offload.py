"""Accelerate's big model inference: decoder layers on disk or in host memory, by a device map.

On disk they are read from the checkpoint's own safetensors file, through its memory map, again for
every token. Of its ways this was the fastest: `load_checkpoint_and_dispatch` writes a copy first.
Without a GPU, layers in host memory are used where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baselines.base import installed, missing
from baselines.hf_generate import HuggingFaceBaseline, empty_model
from flexgen_h2o.config.validation import check_choice, check_int

PLACES = ("disk", "cpu")


def device_map(model, layers: int, *, near: str, far: str, near_layers: int = 0
               ) -> dict[str, str]:
    """The device map of a transformers model: its `layers` decoder layers `far`, but for the
    first `near_layers`.
    """
    from torch.nn import ModuleList

    def placed(module, prefix: str) -> Iterator[tuple[str, str]]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, ModuleList) and len(child) == layers:
                yield from ((f"{path}.{layer}", near if layer < near_layers else far)
                            for layer in range(layers))
            elif any(isinstance(inner, ModuleList) for inner in child.modules()):
                yield from placed(child, f"{path}.")
            else:
                yield path, near

    return dict(placed(model, ""))


class AccelerateOffload(HuggingFaceBaseline):
    """See `baselines.base.Baseline`.

    The option `offload` is one of `PLACES`; so many `near_layers` stay where they are computed.
    """

    documented = "https://huggingface.co/docs/accelerate/usage_guides/big_modeling"
    options: Mapping[str, Any] = {"offload": "disk", "near_layers": 0}

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        found = super().check(name, options)
        check_choice(f"system {name}: offload", found["offload"], PLACES)
        check_int(f"system {name}: near_layers", found["near_layers"], low=0)
        return found

    def refusal(self) -> str | None:
        return missing("accelerate", "bench-accelerate")

    def version(self) -> str:
        return installed("accelerate", "transformers", "torch")

    def prepare(self, model: Path) -> str:
        import torch
        from transformers import AutoModelForCausalLM

        far, kept = self.settings.options["offload"], self.settings.options["near_layers"]
        near = "cuda:0" if torch.cuda.is_available() else "cpu"
        empty = empty_model(model)
        places = device_map(empty, empty.config.num_hidden_layers, near=near, far=far,
                            near_layers=kept)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, self.settings.dtype), device_map=places,
            offload_folder=self.settings.scratch).eval()
        return f"decoder layers {f'but {kept} ' if kept else ''}on {far}, the rest on {near}"
