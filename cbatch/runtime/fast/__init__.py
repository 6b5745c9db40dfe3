"""What only makes the runtime fast: fused model and kernels, attention kernels, small-batch matrix products."""
