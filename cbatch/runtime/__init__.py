"""Executors that compute real tokens: streams and events, I/O slots, carry-over, the paged model, sampling.

Imports torch; nothing outside this package does.
"""
