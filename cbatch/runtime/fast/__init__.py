"""Optimizations of the runtime: fused model and kernels, attention, matrix products, graph shapes."""
