"""Fast paged attention: kernels for decodes and for chunks, and the choice between them.

Words of these files: a *page* is the memory of one KV block (the word of the libraries called here), and BLOCK is the
part of a page that a program of a Triton kernel takes in one step. A *chunk* is a row with several queries.
"""
