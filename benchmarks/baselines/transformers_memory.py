"""transformers with all weights in memory: sdpa attention and its dynamic cache, the defaults."""

from __future__ import annotations

from pathlib import Path

from baselines.base import installed
from baselines.hf_generate import HuggingFaceBaseline


class TransformersMemory(HuggingFaceBaseline):
    """See `baselines.base.Baseline`."""

    documented = "https://huggingface.co/docs/transformers/llm_optims"

    def refusal(self) -> str | None:
        return None

    def version(self) -> str:
        return installed("transformers", "torch")

    def prepare(self, model: Path) -> str:
        import torch
        from transformers import AutoModelForCausalLM

        near = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, self.settings.dtype)).to(near).eval()
        return f"weights in memory of {near}, sdpa"
