"""Scheduling policies, one per file, and the chunk selectors that the chunked ones share.

Each imports the public face of `cbatch` alone. A policy of your own needs no entry here: name it by its import path,
`policy=my_package.MyPolicy`.
"""
