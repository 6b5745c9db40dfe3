"""Executors that compute real tokens. To read in order:

    streams, slots, executor         how iterations overlap: streams, events, the buffers of each iteration
    batch, carry, sampling           an iteration's inputs, tokens carried over on the device, and how tokens are chosen
    iteration, graphs                one iteration, operation by operation or as one captured CUDA graph
    attention, model, weights        the paged KV cache, attention over it, and `transformers`' modules using both
    options, cpu                     building an executor; on GPUs: `gpu.build`

`gpu` holds what runs on GPUs only or on several devices, `fast` what only makes it fast. Nothing outside this package imports
torch, except experiments that measure it.
"""
