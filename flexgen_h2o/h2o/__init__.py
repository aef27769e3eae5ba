"""The heavy-hitter oracle (arXiv 2306.14048) alone: no storage, no kernels."""
