"""Fast paged attention: kernels for decodes and for chunks, and the choice between them.

Terms in these files: a *page* is the memory of one KV block (the term of the libraries called here). BLOCK is the number of
tokens that a program of a Triton kernel processes in one step. A *chunk* is a row with several queries.
"""
