"""Results on disk: run folders, tables, provenance, crash reports."""
