"""Executors that compute real tokens. To read in order:

    streams, slots, executor         how iterations overlap: streams, events, the buffers of each iteration
    batch, carry, sampling           an iteration's inputs, tokens carried over on the device, and how tokens are chosen
    iteration, graphs                one iteration, operation by operation or as one captured CUDA graph
    attention, model, weights        the paged KV cache, attention over it, and `transformers`' modules using both
    options, cpu                     building an executor; on GPUs: `gpu.build`

`gpu` holds the code for GPUs and for several devices, `fast` the optimizations. Nothing outside this package imports
torch, except experiments that measure it.
"""
