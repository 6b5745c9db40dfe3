"""Strategies for what users get wrong: values of settings, files, and fields of JSON."""

import gzip
import json
from typing import Any

from hypothesis import strategies as st

NUMBERS = ["0", "-1", "1", "2", "3.5", "-0.0", "1e-300", "1e308", "nan", "inf", "-inf"]
NUMBERS += ["2147483648", "1000000000000000000", "1_000", "0x10", "007"]
WORDS = ["' '", "'a b'", "x" * 300, "null", "true", "off", "auto", "''", "error", "file", "nothing", "ä漢😀"]
WORDS += ["\\,", "a=b", "'\\n'"]
NESTED = ["[]", "[1,2]", "[[1],{a:2}]", "{}", "{a:1}", "{1:2}"]
NESTED += ["{_target_:builtins.dict}", "{_target_:nowhere.Nothing}"]
REFERENCES = ["${chunk}", "${nothing}", "${now:%Y}", "${oc.env:NOTHING}", "${", "???", "${policy}", "${seed}${seed}"]
PATHS = ["/", ".", "..", "/dev/null", "no/such/file", "'*'", "~", "file/below", "cbatch", "math.pi"]
PATHS += ["builtins.print", "builtins.int", "cbatch.Plan", "policies.orca.Orca", "experiments.workloads.AllAtOnce"]

values = st.one_of(*map(st.sampled_from, (NUMBERS, NUMBERS, WORDS, NESTED, REFERENCES, PATHS)))
"""Values as they are written on a command line."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from((1.5, float("nan"), float("inf"), 1e308, 2**31, 2**63, 10**30)),
    st.text(max_size=4),
)
jsons: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
"""Anything that JSON can hold, and what Python's writes beyond it."""


@st.composite
def spoiled_json(draw: st.DrawFn, whole: Any) -> Any:
    """A value in which something, at any depth, is another, missing or too much."""
    if not (isinstance(whole, (dict, list)) and whole) or draw(st.integers(0, 5)) == 0:
        return draw(jsons)
    key = draw(st.sampled_from(sorted(whole) if isinstance(whole, dict) else range(len(whole))))
    copy = whole.copy()
    how = draw(st.sampled_from(("below", "below", "below", "missing", "more")))
    if how == "missing":
        del copy[key]
    elif how == "more" and isinstance(copy, dict):
        copy[draw(st.text(max_size=3))] = draw(jsons)
    elif how == "more":
        copy.insert(key, draw(jsons))
    else:
        copy[key] = draw(spoiled_json(whole[key]))
    return copy


BYTES = [b"", b"\n", b",", b'"', b"\0", b"-1", b"nan", b"1e999", b"9" * 25, "ä漢".encode(), b"\xff\xfe", b"\r\n\r\n"]
BYTES += [b"{", b"[[[[", b"!!python/object:os.system x", b"&a [*a]", b"\t"]


@st.composite
def spoiled_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file of which a part is missing, there twice, or something else; or another file altogether."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(whole)))
        end = min(begin + draw(st.sampled_from((0, 1, 4, 40, 10**9))), len(whole))
        other = draw(st.just(whole[begin:end] * 2) | st.binary(max_size=8) | st.sampled_from(BYTES))
        whole = whole[:begin] + other + whole[end:]
    return whole


@st.composite
def spoiled_lines(draw: st.DrawFn, lines: list[str]) -> bytes:
    """JSON lines, one of which is changed, missing or repeated."""
    number = draw(st.integers(0, len(lines) - 1))
    changed = json.dumps(draw(spoiled_json(json.loads(lines[number]))))
    kept = draw(st.sampled_from(([changed], [], [changed, changed], [lines[number], changed])))
    return "\n".join([*lines[:number], *kept, *lines[number + 1 :], ""]).encode()


@st.composite
def spoiled_gzip(draw: st.DrawFn, content: st.SearchStrategy[bytes]) -> bytes:
    """Compressed content, which is then cut off or spoiled in a quarter of the cases."""
    packed = gzip.compress(draw(content), compresslevel=1, mtime=0)
    return draw(spoiled_bytes(packed)) if draw(st.integers(0, 3)) == 0 else packed
