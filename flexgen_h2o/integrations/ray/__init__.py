"""A step of a Ray Data pipeline that generates text with replicas of an `LLM`.

`build_processor` returns the step for a `ProcessorConfig`, as in ``ray.data.llm``. `BatchGenerator`
is the class of its replicas, for a ``map_batches`` of your own.
"""

from flexgen_h2o.integrations.ray.generator import (
    BatchGenerator,
    Processor,
    ProcessorConfig,
    build_processor,
)

__all__ = ["BatchGenerator", "Processor", "ProcessorConfig", "build_processor"]
