"""Parts shared by several policies: queues of waiting requests, deadlines, measured step times, and the future of the KV cache."""
