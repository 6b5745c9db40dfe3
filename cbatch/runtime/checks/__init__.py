"""What only checks the runtime: races, ownership of KV blocks and table rows, poisoned buffers."""
