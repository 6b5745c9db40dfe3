"""From the command line to checked settings: Hydra composition, construction, error lines."""
