"""Executors that compute real tokens. To read in order:

    streams, slots, executor         how iterations overlap: streams, events, the buffers of each iteration
    batch, carry, sampling           an iteration's inputs, tokens carried over on the device, and how tokens are chosen
    iteration, graphs                one iteration, operation by operation or as one captured CUDA graph
    attention, model, weights        the paged KV cache, attention over it, and `transformers`' modules using both
    ranks, shards                    how the ranks of a tensor-parallel group take turns; one rank's share of a model
    options, cpu, gpu, devices, memory   building an executor on a CPU, a GPU, or GPUs for stages and ranks

`fast` holds what only makes this fast. Nothing outside this package imports torch, except
experiments that measure it.
"""
