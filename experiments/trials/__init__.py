"""Independent replications of a workload, at any rate or at a share of the highest rate that any policy can sustain."""
