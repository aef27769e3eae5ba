"""The algorithm of the heavy-hitter oracle (arXiv 2306.14048), without storage and kernels."""
