"""Readers of request traces and of clients' statistics. The repository contains no trace files."""
