"""Capacity: the highest request rate at which objectives are met, with an interval. See docs/capacity.md."""
