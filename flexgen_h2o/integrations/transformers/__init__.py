"""H2O for ``transformers``: `generate` of an unmodified model with a KV cache of fixed size."""

from flexgen_h2o.integrations.transformers.cache import CACHE_NAME, EnabledH2O, H2OCache, enable_h2o

__all__ = ["CACHE_NAME", "EnabledH2O", "H2OCache", "enable_h2o"]
