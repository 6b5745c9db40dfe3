"""Converts the command line to validated settings: Hydra composition, construction, error lines."""

import yaml

# Hydra reads conf/ with this loader: in C it saves a quarter of the time of a composition; some builds of PyYAML lack it
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]
