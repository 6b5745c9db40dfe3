"""What a record means: metrics, summaries and timelines."""
