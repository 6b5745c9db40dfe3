"""Real tokens on one GPU or several.

build                    builds an executor
devices, memory          the GPUs of each stage and rank, their streams, events and clocks, and the memory that an executor takes
ranks, shards            how the ranks of a tensor-parallel group take turns, and one rank's share of a model; also on a CPU
exchange, peers          how ranks, and consecutive stages, store data in each other's memory
"""
