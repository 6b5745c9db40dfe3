"""Scheduling policies, one per file, and the chunk selectors that chunked policies share.

Each file imports only the public names of `cbatch`. Your own policy needs no entry here: give its import path,
`policy=my_package.MyPolicy`.
"""
