"""The configuration of a run: frozen dataclasses that check every value. Torch-free.

A bad value raises `UserError` in one line when the object is made.
"""

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.sampling import SamplingParams

__all__ = ["H2OConfig", "Placement", "Policy", "SamplingParams", "Workload"]
