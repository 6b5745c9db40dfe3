"""Whether a policy has the properties that the field speaks of, and the smallest schedule that shows it where it has not."""
