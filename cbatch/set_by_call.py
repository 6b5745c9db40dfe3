"""Fields of an object that are set in a call of one of its methods, never by assignment."""

from typing import NoReturn


class SetByCall:
    """A field of `Plan` that `PlanBuilder` takes in a call: reading or assigning it names the call."""

    def __init__(self, call: str) -> None:
        self._call = call

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, builder: object, owner: type) -> NoReturn:
        raise AttributeError(f"a PlanBuilder has no attribute {self._name}; give {self._call}")

    def __set__(self, builder: object, value: object) -> NoReturn:
        self.__get__(builder, type(builder))
