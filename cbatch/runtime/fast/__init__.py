"""What only makes the runtime fast: fused model and kernels, attention, matrix products, graph shapes."""
