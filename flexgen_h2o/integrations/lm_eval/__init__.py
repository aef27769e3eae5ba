"""A model for lm-evaluation-harness, registered as ``flexgen_h2o`` when `model` is imported.

The ``lm_eval`` command of the harness (0.4.13) does not load models of other packages. Use
``python -m flexgen_h2o.integrations.lm_eval`` with the same arguments. From Python, import `model`
and call ``lm_eval.simple_evaluate`` with the name.
"""
