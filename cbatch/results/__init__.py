"""What a record means: metrics, summaries, timelines, and the conservation of requests and KV blocks."""
