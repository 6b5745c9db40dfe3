"""Reads the keys of overrides, for settings and for stored results."""


def key_of(override: str) -> str:
    """Returns the key of an override."""
    return override.lstrip("+~").partition("=")[0]
