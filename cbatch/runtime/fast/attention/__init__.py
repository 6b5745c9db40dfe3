"""Paged attention kernels, and the choice between them."""
