"""vLLM with and without a policy, on one engine in one session."""
