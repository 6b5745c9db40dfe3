"""Selection of cases by the beginnings of their names, for commands that measure some of many."""

from collections.abc import Iterable

from cbatch import ConfigError


def beginning_with(key: str, beginnings: str, known: Iterable[str]) -> list[str]:
    """The known names that begin with one of `beginnings`, which are separated by ";"; an empty text selects all.

    Raises ConfigError, naming the option `key`, if no name begins with one of them.
    """
    names, wanted = list(known), tuple(beginnings.split(";"))
    for beginning in wanted:
        if not any(name.startswith(beginning) for name in names):
            raise ConfigError(f"{key}: none begins with {beginning!r}; known: {'; '.join(names)}")
    return [name for name in names if name.startswith(wanted)]
