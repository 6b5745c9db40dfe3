"""Real tokens on one GPU or several.

build                    puts an executor together
devices, memory          the GPUs of each stage and rank, their streams, events and clocks, and what fits into them
ranks, shards            how the ranks of a tensor-parallel group take turns, and one rank's share of a model; also on a CPU
exchange, peers          how ranks, and consecutive stages, store in each other's memory
"""
