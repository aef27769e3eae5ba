"""transformers' own `generate` with an H2O cache: the same model, the same call, less memory.

    python examples/transformers_h2o.py
    python examples/transformers_h2o.py --model facebook/opt-125m --hh-ratio 0.05 --gen-len 64
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from flexgen_h2o import H2OConfig
from flexgen_h2o.cli.entry_point import command
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.models import checkpoint_folder

PROMPT = (
    "In 1928 Alexander Fleming came back from a holiday and saw that a mould had grown on one of "
    "his dishes. Around it, the bacteria were dead. He kept the mould, grew more of it, and found "
    "that its juice killed many kinds of bacteria that make people ill, but did no harm to the "
    "cells of animals. He called it penicillin. It took ten more years until others made a "
    "medicine of it. The lesson of this story is that"
)


def parse_args(argv: Sequence[str] | None) -> tuple[Namespace, H2OConfig]:
    """Flags, all of them checked; torch is not loaded for them."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m",
                        help="a name, a repo id or a local folder (smollm2-135m)")
    parser.add_argument("--prompt", default=PROMPT, help="the text to go on with (a short story)")
    parser.add_argument("--gen-len", type=int, default=32, help="tokens to generate (32)")
    parser.add_argument("--hh-ratio", type=float, default=0.1,
                        help="share of the prompt to keep as heavy hitters, and as recent (0.1)")
    args = parser.parse_args(argv)
    check_int("--gen-len", args.gen_len, ge=1)
    if not args.prompt:
        raise UserError("--prompt must be text that is not empty")
    return args, H2OConfig(heavy_ratio=args.hh_ratio)


def run(args: Namespace, h2o: H2OConfig) -> None:
    """Generate twice, with transformers' full cache and with H2O, and compare the caches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer

    from flexgen_h2o.integrations.transformers import CACHE_NAME, enable_h2o

    folder = checkpoint_folder(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(args.prompt, return_tensors="pt")
    options = {"max_new_tokens": args.gen_len, "do_sample": False,
               "pad_token_id": tokenizer.eos_token_id,
               "streamer": TextStreamer(tokenizer, skip_prompt=True)}

    print("The full cache:")
    full = DynamicCache()
    model.generate(**inputs, **options, **{CACHE_NAME: full})
    with enable_h2o(model, h2o) as enabled:
        print("H2O:")
        cache = enabled.new_cache()  # made here to ask its size; generate makes one by itself
        model.generate(**inputs, **options, **{CACHE_NAME: cache})

    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
    print(f"{nbytes:,} bytes of keys and values with the full cache, {cache.nbytes():,} with H2O")


@command
def main(argv: Sequence[str] | None = None) -> None:
    run(*parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
