"""From the command line to checked settings: Hydra composition, construction, error lines."""

import yaml

yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc, assignment]  # Hydra reads conf/ with it: a run is composed in 3/4 of the time
