"""The heavy-hitter oracle alone (arXiv 2306.14048): no storage and no kernels."""
