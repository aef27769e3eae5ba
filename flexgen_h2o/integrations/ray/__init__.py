"""A step of a Ray Data pipeline that generates text: replicas of an `LLM` behind ``map_batches``.

`build_processor` makes the step from a `ProcessorConfig`, as ``ray.data.llm`` does for its engines;
`BatchGenerator` is the class whose copies do the work, for a ``map_batches`` of one's own.
"""

from flexgen_h2o.integrations.ray.generator import BatchGenerator
from flexgen_h2o.integrations.ray.processor import Processor, ProcessorConfig, build_processor

__all__ = ["BatchGenerator", "Processor", "ProcessorConfig", "build_processor"]
