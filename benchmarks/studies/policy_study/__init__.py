"""The parts of benchmarks/studies/policies.py."""
