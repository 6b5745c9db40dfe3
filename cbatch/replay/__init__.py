"""A run's recorded decisions, and the decisions that another policy would have made."""
