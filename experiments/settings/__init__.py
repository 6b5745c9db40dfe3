"""From the command line to checked settings: Hydra composition, construction, error lines."""

import yaml

# Hydra reads conf/ with it: a run is composed in 3/4 of the time; not every build of PyYAML has the other
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]
