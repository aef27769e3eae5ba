"""An lm-evaluation-harness model, named ``flexgen_h2o`` there once `model` is imported.

The harness (0.4.13) looks for no models outside of itself, so that its plain ``lm_eval`` command
can't know this one. ``python -m flexgen_h2o.integrations.lm_eval`` is that command with the same
arguments; from Python, import `model`, and ``lm_eval.simple_evaluate`` takes the name too.
"""
