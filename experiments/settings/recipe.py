"""The recipe of a run's policy, read from the section that describes the policy."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cbatch import ConfigError, Policy
from cbatch.described import arguments_of, describe
from cbatch.policy import copy_policy
from experiments.settings.construct import build_arguments, check_section, construct, locate, parameters_of
from policies.drafting import WithDrafts


@dataclass(frozen=True, repr=False)
class Recipe:
    """Makes a new policy for each run, since policies keep state. Prints itself like its policies: `sarathi(chunk=256)`.

    A user's policy without a `__repr__` is printed as its class with the arguments that differ from their defaults.

    section: the class and its arguments, and as `drafting` a drafting rule, if any. made: an object from Python, which is copied instead.
    """

    section: Mapping[str, Any]
    made: Policy | None = None
    _unused: list[Policy] = field(default_factory=list, init=False, compare=False)

    def __call__(self) -> Policy:
        """Returns a new policy. Raises ConfigError if the section describes no policy, CbatchError if the policy raises it."""
        if self.made is not None:
            return copy_policy(self.made)
        return self._unused.pop() if self._unused else self._construct()

    def with_arguments(self, arguments: Mapping[str, Any]) -> "Recipe":
        """Returns a recipe with other arguments, or parts of them: {chunking: {chunk: 512}}. Raises ConfigError for an object from Python."""
        if arguments and self.made is not None:
            problem = f"{self!r} is an object, whose arguments are fixed"
            raise ConfigError(f"backend.pools: {problem}; give the policy by name")
        section = dict(self.section)
        for key, value in arguments.items():
            parts = isinstance(value, Mapping) and isinstance(section.get(key), Mapping)
            section[key] = {**section[key], **value} if parts else value
        return Recipe(section) if arguments else self

    def __repr__(self) -> str:
        return self._text

    def whole_numbers(self) -> dict[str, int]:
        """Returns the whole-number arguments of a user's class, such as a budget of tokens, defaults included; without a seed."""
        kind = None if self.made is not None else locate("policy", self.section["_target_"])
        if kind is None or kind.__module__.startswith("policies."):
            return {}
        arguments = {key: parameter.default for key, parameter in parameters_of(kind).items()} | {**self.section}
        return {key: value for key, value in arguments.items() if type(value) is int and key != "seed"}

    def __reduce__(self) -> tuple[Any, ...]:
        return Recipe, (self.section, self.made)  # an unused policy may not be picklable

    def _construct(self) -> Policy:
        section = {key: value for key, value in self.section.items() if key != "drafting"}
        policy: Policy = construct("policy", section, needs=("plan",))
        if (drafting := self.section.get("drafting")) is None:
            return policy
        return WithDrafts(policy, construct("drafting", drafting, needs=("num_drafts", "observe")))

    @cached_property
    def _text(self) -> str:
        if self.made is not None:
            kind = type(self.made)
            own = kind.__repr__ is not object.__repr__
            return repr(self.made) if own else describe(kind.__name__, arguments_of(self.made))
        kind = locate("policy", self.section["_target_"])
        if kind.__module__.startswith("policies.") or "__repr__" in vars(kind):
            with suppress(Exception):  # a failing `__repr__` counts as missing
                self._unused.append(self._construct())  # for the next run
                return repr(self._unused[-1])
        defaults = {key: parameter.default for key, parameter in parameters_of(kind).items()}
        arguments = build_arguments("policy", self.section)
        others = {key: value for key, value in arguments.items() if key != "seed" and value != defaults.get(key)}
        return describe(kind.__name__, others)


def recipe_of(section: object, chunk: int | str, chosen: dict[str, str], drafting: object = None) -> Recipe:
    """Returns the recipe that a section describes. With chunk=auto, `PDAware` replaces a chunk selector with an argument `chunk`.

    drafting: section of a drafting rule, unless the policy's section has one of its own, as in policy=orca(drafting=ema).
    """
    if isinstance(section, Mapping) and "drafting" in section:
        section, drafting = {key: value for key, value in section.items() if key != "drafting"}, section["drafting"]
    section = check_section("policy", section)
    chunking = section.get("chunking")
    if isinstance(chunking, Mapping) and chunking.get("chunk", chunk) != chunk:
        size = chunking["chunk"]
        remedy = f"give chunk={size} in place of it; policy=NAME(chunk={size}) for one policy of a sweep"
        raise ConfigError(f"chunk={chunk}: has no effect beside chunking.chunk={size}; {remedy}")
    if chunk == "auto" and isinstance(chunking, Mapping) and "chunk" in chunking:
        section = {**section, "chunking": {"_target_": "policies.chunking.PDAware"}}
        chosen["chunking"] = "pd_aware (chunk=auto)"
    if isinstance(chunking, str):
        raise ConfigError(f"policy.chunking={chunking}: is a name; choose the size of chunks with chunking={chunking}")
    if chunking is None and "chunking" in section and str(section.get("_target_")).startswith("policies."):
        raise ConfigError("policy.chunking=null: this policy needs one; choose the size of chunks with chunking=NAME")
    return Recipe(section if not drafting else {**section, "drafting": check_section("drafting", drafting)})
