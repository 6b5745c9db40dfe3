"""Executors that compute real tokens. Reading order:

    streams, slots, executor         how iterations overlap: streams, events, the buffers of each iteration
    batch, carry, sampling           an iteration's inputs, tokens carried over on the device, and how tokens are chosen
    iteration, graphs                one iteration, operation by operation or as one captured CUDA graph
    attention, model, weights        the paged KV cache, attention over it, and the modules of `transformers` using both
    options, cpu                     building an executor on a CPU; `gpu.build` builds one on GPUs

`gpu` holds the code for GPUs and for several devices. `fast` holds the optimizations. Outside this package only
experiments that measure torch import it.
"""
