"""Model families, a module for each lineage. No torch: the memory plan reads only their sizes.

To add a family:

1. Write a subclass of `decoder.Decoder` (`mixture.MixtureDecoder` with experts). It has the
   `DEFAULTS` of config.json and `read`; where the model differs from LLaMA, it overrides names
   (`norms`), tables of tensors (`attention_specs`, `mlp_specs`) or steps of the forward pass.
2. Add a line for each `model_type` to `registry.FAMILIES`.
3. Add a tiny config to `TINY` in tests/helpers/tiny_models.py, and its key to
   tests/models/test_families.py: logits, tokens, sizes and eviction are compared with transformers.

docs/contributing.md has a complete example, and docs/families.md lists all families.
"""
