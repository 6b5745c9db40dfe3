"""What several policies share: queues of waiting requests, deadlines, measured step times, and the future of the KV cache."""
