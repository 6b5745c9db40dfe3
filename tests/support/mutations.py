"""Mutants of a source file: mutmut's operators, and those of figures that stand under each other's names.

What has no meaning for a result is left alone: annotations, imports, docstrings, error messages, the look of plots.
"""

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise, takewhile
from random import Random
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

LOOK = re.compile(
    "alpha|bbox_to_anchor|clip_on|colalign|color|decimals|dtype|edgecolors?|encoding|facecolors?|figsize|fontsize|ha|hatch|"
    "height_ratios|layout|linewidth|loc|markeredgewidth|markersize|markevery|ncols|ratios|strict|subs|title_fontsize|"
    "transform|va|visible|width|zorder"
)
"""Keywords, parameters and keys of styles whose values are not changed: the look of a figure, and what only checks."""

OBVIOUS = (mutators.operator_arg_removal, mutators.operator_assignment, mutators.operator_dict_arguments)
"""Operators whose mutants nearly all raise an exception: they would only make the share of those that survive look small."""

OTHER = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max", "median": "mean", "mean": "median"}
OTHER |= {"floor": "ceil", "ceil": "floor", "maximum": "minimum", "minimum": "maximum"}
"""Functions that stand for each other."""

SYMMETRIC = m.OneOf(*map(m.Name, ("min", "max", "minimum", "maximum")))
"""Functions whose arguments may be swapped."""


@dataclass(frozen=True)
class Mutant:
    line: int
    before: str  # the lines that are changed
    after: str
    source: str  # of the whole file


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a file, each with one change, in the order of their lines."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    finder = _Finder(wrapper.module)
    wrapper.visit(finder)
    return finder.mutants


class _Finder(cst.CSTVisitor):
    """attributes, keys: the attributes that a file reads, by name, and its string keys: what one could be mistaken for."""

    METADATA_DEPENDENCIES = (PositionProvider, ByteSpanPositionProvider)

    def __init__(self, module: cst.Module) -> None:
        self.module, self.source = module, module.code
        self.mutants: list[Mutant] = []
        self._left_alone: set[cst.CSTNode] = set()
        self._called: set[Any] = {call.func for call in m.findall(module, m.Call()) if isinstance(call, cst.Call)}
        self._attributes: dict[str, dict[str, None]] = {}
        read: list[Any] = [each for each in m.findall(module, m.Attribute(value=m.Name())) if each not in self._called]
        for node in read:
            self._attributes.setdefault(node.value.value, {})[node.attr.value] = None
        self._keys = dict.fromkeys(filter(None, map(_string_key, m.findall(module, m.Subscript()))))

    def on_visit(self, node: cst.CSTNode) -> bool:
        kinds = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Raise, cst.Assert)
        if isinstance(node, kinds) or node in self._left_alone or _is_docstring(node) or _is_look(node):
            return False
        if isinstance(node, cst.ClassDef):
            self._left_alone.update(node.bases)
        if isinstance(node, cst.Module):
            self._left_alone.update(line for line in node.body if _is_type(line))
        if isinstance(node, cst.Call) and m.matches(node, m.Call(func=m.Name("new_figure"))):
            self._left_alone.update(node.args[2:3])  # inches
        for changed in self._changes(node):
            line = self.get_metadata(PositionProvider, node).start.line
            source = self._with(node, changed)
            if source != self.source:
                self.mutants.append(Mutant(line, *_difference(self.source, source), source))
        return True

    def _with(self, node: cst.CSTNode, changed: cst.CSTNode) -> str:
        """The file with a changed node: by its text, which is fast, unless the node owns blanks around it."""
        span, text = self.get_metadata(ByteSpanPositionProvider, node), self.source.encode()
        end = span.start + span.length
        if self.module.code_for_node(node).encode() != text[span.start : end]:
            return self.module.deep_replace(node, changed).code  # type: ignore[arg-type, union-attr]
        return (text[: span.start] + self.module.code_for_node(changed).encode() + text[end:]).decode()

    def _changes(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        for kind, operator in mutators.mutation_operators:
            if isinstance(node, kind) and operator not in OBVIOUS:
                yield from list(operator(node))[: 1 if operator is mutators.operator_string else None]
        yield from self._other_name(node)
        if isinstance(node, cst.If | cst.IfExp | cst.CompIf):
            yield node.with_changes(test=_negated(node.test))
        if m.matches(node, m.Expr(value=m.Call())):
            yield cst.Pass()
        yield from _swapped_neighbours(node, self._left_alone)
        yield from _without_keyword(node)
        yield from _other_function(node)

    def _other_name(self, node: Any) -> Iterator[cst.CSTNode]:
        """Another attribute or key that the file reads stands in its place."""
        read = m.matches(node, m.Attribute(value=m.Name())) and node not in self._called
        if read and (other := _next(node.attr.value, list(self._attributes[node.value.value]))):
            yield node.with_changes(attr=cst.Name(other))
        if (key := _string_key(node)) and (other := _next(key, list(self._keys))):
            text = node.slice[0].slice.value
            text = text.with_changes(value=text.value.replace(key, other))
            yield node.with_changes(slice=[cst.SubscriptElement(cst.Index(text))])


def _next(name: str, names: Sequence[str]) -> str:
    return names[(names.index(name) + 1) % len(names)] if name in names and len(names) > 1 else ""


def _string_key(node: Any) -> str:
    literal = m.Subscript(slice=[m.SubscriptElement(m.Index(value=m.SimpleString()))])
    return str(node.slice[0].slice.value.raw_value) if m.matches(node, literal) else ""


def _negated(test: cst.BaseExpression) -> cst.UnaryOperation:
    return cst.UnaryOperation(cst.Not(), test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))


def _swapped_neighbours(node: cst.CSTNode, left_alone: Set[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """One value stands where its neighbour should: elements, arguments, values of a dictionary, parts of a text."""
    field = {cst.Tuple: "elements", cst.List: "elements", cst.Dict: "elements", cst.Call: "args"}.get(type(node), "")
    if m.matches(node, m.Call(func=SYMMETRIC | m.Attribute(attr=SYMMETRIC))):
        return
    parts: Sequence[Any] = getattr(node, field or "parts", ()) if field or isinstance(node, cst.FormattedString) else ()
    name = "expression" if isinstance(node, cst.FormattedString) else "value"
    changed = [place for place, part in enumerate(parts) if part not in left_alone and not _is_look(part)]
    places = [place for place in changed if hasattr(parts[place], name)]
    for one, two in pairwise(places):
        first, second = getattr(parts[one], name), getattr(parts[two], name)
        changed = list(parts)
        changed[one] = parts[one].with_changes(**{name: second})
        changed[two] = parts[two].with_changes(**{name: first})
        yield node.with_changes(**{field or "parts": changed})


def _without_keyword(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """An option is ignored: the default is taken."""
    for arg in node.args if isinstance(node, cst.Call) else ():
        if arg.keyword is not None and not _is_look(arg):
            yield node.with_changes(args=[other for other in node.args if other is not arg])


def _other_function(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if not isinstance(node, cst.Call):
        return
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if isinstance(name, cst.Name) and name.value in OTHER:
        other = cst.Name(OTHER[name.value])
        yield node.with_changes(func=other if name is node.func else node.func.with_changes(attr=other))
    if m.matches(node, m.Call(func=m.Name("abs"), args=[m.Arg()])):
        yield node.args[0].value


def _is_docstring(node: cst.CSTNode) -> bool:
    return m.matches(node, m.Expr(value=m.SimpleString() | m.ConcatenatedString()))


def _is_type(line: cst.CSTNode) -> bool:
    """Whether it names a type, as in `Floats = NDArray[np.float64]` or `T = TypeVar("T")`."""
    named = m.Assign(value=m.Subscript() | m.Call(func=m.Name("TypeVar")))
    return m.matches(line, m.SimpleStatementLine(body=[named]))


def _is_look(node: cst.CSTNode) -> bool:
    if m.matches(node, m.Expr(value=m.Call(func=m.Attribute(attr=m.Name("grid") | m.Name("margins"))))):
        return True
    key = {cst.Arg: "keyword", cst.Param: "name", cst.DictElement: "key"}.get(type(node), "")
    name = getattr(node, key, None)
    text = name.value if isinstance(name, cst.Name) else name.raw_value if isinstance(name, cst.SimpleString) else ""
    return LOOK.fullmatch(text) is not None


def _difference(one: str, two: str) -> tuple[str, str]:
    """The lines of each that differ, without their indentation."""
    first, second = one.splitlines(), two.splitlines()
    start = _num_equal(first, second)
    first, second = first[start:], second[start:]
    rest = _num_equal(first[::-1], second[::-1])
    before, after = (" ".join(line.strip() for line in lines[: len(lines) - rest]) for lines in (first, second))
    return before, after


def _num_equal(first: list[str], second: list[str]) -> int:
    """How many lines both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def sample(mutants: Sequence[Mutant], number: int, draw: int = 0) -> list[Mutant]:
    """One of each n in a row, drawn from the seed `draw`, so that about `number` are left, from all parts of the file; 0: all."""
    step, random = max(len(mutants) / number, 1.0) if number else 1.0, Random(draw)
    return [
        random.choice(mutants[int(place * step) : int((place + 1) * step)]) for place in range(int(len(mutants) / step))
    ]
