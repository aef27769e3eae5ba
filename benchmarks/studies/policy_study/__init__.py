"""What benchmarks/studies/policies.py is made of."""
