"""What only checks the runtime: data races, happens-before, ownership of pages and rows."""
