"""Reads request traces and statistics of clients. The repository contains no trace files."""
