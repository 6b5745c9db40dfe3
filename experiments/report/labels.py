"""Labels of runs, by one rule: the policy, and key=value of each setting that varies and is not shown in another way."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import pandas as pd

from cbatch import ConfigError
from cbatch.described import class_name, describe, merge_orders, with_arguments, without_shared
from cbatch.validation import nearest
from experiments.keys import key_of
from experiments.report.intervals import significant
from experiments.report.notes import sizes_beside_chunk

_QUESTION = ("model", "workload")
"""Settings that are in all labels if they differ: figures with different models or workloads do not compare policies."""

_FEW = 4  # labels in an error

OBJECTS = ("backend.router", "eviction", "autoscale")
"""Settings whose value is the name of an object, followed in labels by its arguments."""

_LAYOUT = "backend.pools"  # the column of the roles of replicas, as in `1 prefill + 3 decode`

OF_POLICY = ("policy", "chunking", "drafting", "predictor")
"""Keys and groups of the command line whose values are a policy's arguments."""

_INSIDE = re.compile(r"[({,]\s*(\w+)[=:]")  # the names of the arguments in an option, as in policy=vllm_v1(budget=512)


def label_runs(runs: pd.DataFrame, shown: Collection[str] = (), *, apart: bool = False) -> "pd.Series[str]":
    """Returns the label of each run. Runs that differ only in seeds share a label.

    A setting appears only where it tells apart runs that the policy, `shown` and the label so far do not. The model and the workload
    come first and appear in all labels if they differ; settings from the command line follow.

    Args:
        runs: a frame of `read_runs`.
        shown: columns that are shown in another way, such as on an axis.
        apart: whether to give each run a unique label, with seeds and folder if necessary.
    """
    labels = runs["policy"]
    if any(map(is_argument, shown)):
        labels = labels.str.partition("(")[0]
    for column in _parts(runs, labels, shown, apart).values():
        labels = labels + (", " + column).fillna("")
    return labels


def with_given(runs: pd.DataFrame) -> "pd.Series[str]":
    """Returns the policy of each run with the arguments that vary or were given for its policy, also those equal to their defaults.

    A policy that does not read the given `chunk` has its own whole-number arguments, those that were given or else all; an argument that follows `chunk` is called so.
    """
    policies = runs["policy"].copy()
    for _, rows in runs.groupby(policies.str.partition("(")[0]):
        abouts = [summary["about"] for summary in rows["summary"]]
        sections = [_arguments(about) for about in abouts]
        names = [_given_for_policy(about) for about in abouts]
        given = set[str]().union(*names)
        absent = {"drafting": "none"} if "drafting" in given else {}  # where a section has no rule
        further = list[dict[str, Any]]()
        for place, section, about, named in zip(rows.index, sections, abouts, names, strict=True):
            differ = {key for key, value in section.items() if any(other.get(key) != value for other in sections)}
            shown = [key for key in section if key in differ or key.rpartition(".")[2] in given]
            own = absent | {key: section[key] for key in shown}
            for key in _following_chunk(about, section, named):
                own.pop(key, None)
                policies[place] = re.sub(rf"\b(?<!\.){key}=(?={section[key]}\b)", "chunk=", policies[place])
            further.append(own | sizes_beside_chunk(about))
        order = merge_orders(policies[rows.index])
        texts = zip(policies[rows.index], further, strict=True)
        policies[rows.index] = [with_arguments(text, own, order) for text, own in texts]
    return policies


def _arguments(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a run's policy by name, without seeds."""
    own = {key.removeprefix("policy."): value for key, value in about["identity"].items() if key.startswith("policy.")}
    return {key: value for key, value in own.items() if not key.endswith("_target_") and not is_seed(key)}


def _following_chunk(about: Mapping[str, Any], section: Mapping[str, Any], named: set[str]) -> list[str]:
    """Returns the arguments that have the value of the `chunk` that the policy reads and were not given themselves; none if one is named so."""
    if any(key.rpartition(".")[2] == "chunk" for key in section):
        return []
    numbers = [key for key, value in section.items() if type(value) is int and value == about.get("chunk")]
    return [key for key in numbers if key not in named]


def _given_for_policy(about: Mapping[str, Any]) -> set[str]:
    """Returns the last parts of the keys that the command line gave for a run's policy."""
    texts = [text for text in about["overrides"] if key_of(text).split(".")[0] in OF_POLICY]
    return {name for text in texts for name in [key_of(text).rpartition(".")[2], *_INSIDE.findall(text)]}


def chosen_settings(runs: pd.DataFrame, chosen: pd.DataFrame) -> dict[str, str]:
    """Returns key=value, by key, for settings that differ between the runs and are equal in the chosen runs."""
    shared = {}
    for key, column in _parts(runs, runs["policy"], (), False).items():
        values = column[chosen.index]
        if values.notna().all() and values.nunique() == 1 and not is_seed(key):
            shared[key] = values.iloc[0]
    return shared


def _parts(
    runs: pd.DataFrame, policies: "pd.Series[str]", shown: Collection[str], apart: bool
) -> "dict[str, pd.Series[str]]":
    """Returns key=value of each run, by key; NaN for runs that the key does not tell apart."""
    overrides = {text for row in runs["summary"] for text in row["about"]["overrides"]}
    given = {key_of(text) for text in overrides}
    inside = {f"{key_of(text)}.{name}" for text in overrides for name in _INSIDE.findall(text)}
    texts = _with_arguments(settings_of(runs), shown, given | inside).assign(**layouts(runs, shown))
    seeds = [key for key in map(str, texts) if is_seed(key)]
    keys = [key for key in map(str, texts) if key not in {*shown, *seeds} and texts[key].nunique(dropna=False) > 1]
    last = {"policy"} if any(map(is_argument, shown)) else set[str]()  # its text repeats the argument that is shown
    keys.sort(key=lambda key: (key not in _QUESTION, key != _LAYOUT, key in last, key not in given))
    if apart:
        texts["folder"] = runs["folder"]
        keys += [*seeds, "folder"]
    else:  # runs with and without a seed are not replications of each other
        texts[seeds] = texts[seeds].notna().replace({True: "any", False: "none"})
        keys += seeds
    known: list[pd.Series[Any]] = [policies, *(runs[key].map(_as_text) for key in shown if key in runs)]
    groups = _numbered(*known)  # runs that the label so far does not tell apart
    parts: dict[str, pd.Series[str]] = {}
    for key in keys:
        tells = texts[key].groupby(groups).transform("nunique", dropna=False) > 1
        if tells.any() or (key in _QUESTION and texts[key].nunique() > 1):
            shown_of = tells | (key in _QUESTION)
            groups, parts[key] = _numbered(groups, texts[key]), _shorten(key, texts[key]).where(shown_of)
    return {key: head + parts[key] for head, key in zip(_heads(list(parts)), parts, strict=True)}


def settings_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the settings that the runs depend on, as text, [runs, keys]; NaN if a run has no such key.

    Further keys are the options of workload, objectives and drafter, and `code`, a hash of the user's modules and files that differ between runs.
    """
    rows, abouts = [], [summary["about"] for summary in runs["summary"]]
    versions = Counter(name for name, _ in {item for about in abouts for item in _own(about).items()})
    for about in abouts:
        options = {key: about[key] for key in ("workload", "slo", "drafter") if key in about}
        own = {name: of for name, of in _own(about).items() if versions[name] > 1}
        code = sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:6]
        settings = {**about["identity"], **options, "code": code}
        rows.append({key: _as_text(value) for key, value in settings.items()})
    return pd.DataFrame(rows, runs.index, dtype=object)


def _with_arguments(texts: pd.DataFrame, shown: Collection[str], given: Collection[str]) -> pd.DataFrame:
    """Moves an object's arguments that vary or were given into its text, `Aging(free=0.1)`, unless one of these settings is shown.

    Arguments that all objects of a name share are left out, as of policies.
    """
    for key in OBJECTS:
        arguments = {name: name.removeprefix(f"{key}.") for name in map(str, texts) if name.startswith(f"{key}.")}
        if arguments and not {key, *arguments} & {*shown}:
            most = {name: texts.groupby(key)[name].nunique(dropna=False).max() for name in arguments}
            vary = [name for name in arguments if name in given or most[name] > 1]
            rows = texts[[key, *vary]].rename(columns=arguments).to_dict("records")
            named = [
                describe(row.pop(key), {str(name): value for name, value in row.items() if value == value})
                for row in rows
            ]
            short = without_shared(text for text in {*named} if isinstance(text, str))
            texts = texts.assign(**{key: [short.get(text, text) for text in named]}).drop(columns=[*arguments])
    return texts


def layouts(runs: pd.DataFrame, shown: Collection[str] = ()) -> dict[str, list[str]]:
    """Returns the replicas of each role by `_LAYOUT` if any pool has a role, unless numbers of replicas or roles are shown."""
    whole, shows = [], re.compile(r"backend\.(pools\..+\.)?(replicas|role)").fullmatch
    for identity in (summary["about"]["identity"] for summary in runs["summary"]):
        pools = [key.removesuffix("role") for key in identity if re.fullmatch(r"backend\.pools\..+\.role", key)]
        roles = [(identity[f"{pool}replicas"] or 1, identity[f"{pool}role"] or "both") for pool in pools]
        whole.append(" + ".join(f"{n} {role}" for n, role in roles or [(identity.get("backend.replicas", 1), "both")]))
    divided = any("prefill" in text or "decode" in text for text in whole)
    return {_LAYOUT: whole} if divided and not any(map(shows, shown)) else {}


def whole_key(key: str, runs: pd.DataFrame) -> str:
    """Returns the key of a setting that is given by its last part, as router for backend.router; the key itself if that is unclear."""
    known = {name for summary in runs["summary"] for name in summary["about"]["identity"]}
    ends = [name for name in known if name.endswith(f".{key}") and not is_argument(name)]
    return ends[0] if key not in runs and len(ends) == 1 else key


def code_text(about: Mapping[str, Any]) -> str:
    """Returns the names and hashes of the user's modules and files in a run, on one line."""
    return " ".join(f"{name}:{of}" for name, of in sorted(_own(about).items()))


def _own(about: Mapping[str, Any]) -> Mapping[str, str]:
    own: Mapping[str, str] = about.get("code", {}).get("own", {})
    return own


def merge_equal(runs: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """Merges labels whose runs have equal values in these columns. Returns the first label's runs, labeled `first = second`."""
    same: dict[str, list[str]] = {}
    values = runs[list(columns)].map(lambda value: significant(value) if isinstance(value, float) else value)
    for label, rows in values.groupby(runs["label"], sort=False):
        same.setdefault(rows.to_json(orient="values", double_precision=15), []).append(str(label))
    merged = {labels[0]: " = ".join(labels) for labels in same.values()}
    return runs[runs["label"].isin(merged)].assign(label=runs["label"].replace(merged))


def is_baseline(runs: pd.DataFrame, text: str) -> "pd.Series[bool]":
    """Returns which runs `baseline=` names, by label, settings that follow each other in a label, or policy with or without arguments. Raises ConfigError if it names no run."""
    policies = runs["policy"].str.partition("(")[0]
    written = runs.get("written", runs["policy"])  # with the arguments that all lines of a plot share
    abouts = [summary["about"] for summary in runs["summary"]]
    texts = [[f"policy={about['policy']}", *about["overrides"]] for about in abouts]  # as titles or progress lines say
    given = pd.Series([f"policy={text}" in [name.replace("'", "") for name in names] for names in texts], runs.index)
    within = pd.Series([f", {text}, " in f", {label}, " for label in runs["label"]], runs.index)  # as tables print it
    named = within | (runs["policy"] == text) | (policies == text) | (written == text) | given
    if not named.any():
        labels = "; ".join(sorted({*runs["label"]} - {*policies})[:_FEW])
        known = nearest(text, {*policies}) + f"; or a label: {labels}" * bool(labels)
        raise ConfigError(f"baseline={text}: no run of this policy; {known}")
    return named


def is_argument(key: str) -> bool:
    """Returns whether a setting is an argument of the policy, which not every policy has."""
    return key == "chunk" or key.startswith("policy.") or (key.startswith("backend.pools.") and ".policy." in key)


def is_seed(key: str) -> bool:
    """Returns whether a setting is a seed. Runs that differ only in seeds are replications."""
    return key.rpartition(".")[2] == "seed"


def _as_text(value: object) -> str | float:
    """Returns a value as text; NaN for a missing value."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _numbered(*columns: "pd.Series[Any]") -> "pd.Series[int]":
    """Numbers rows from 0. Rows with equal values get equal numbers."""
    return columns[0].groupby(list(columns), dropna=False, sort=False).ngroup()


def _shorten(key: str, column: "pd.Series[str]") -> "pd.Series[str]":
    """Shortens paths to their last part, and classes to their name, if the short texts differ as well."""
    mark = "." if key.endswith("_target_") else "/"
    path = column.str.rstrip(mark).str.rpartition(mark)[2]
    short = column.map(class_name, na_action="ignore") if key in OBJECTS else path
    return short if short.nunique() == column.nunique() else column


def _heads(keys: Sequence[str]) -> list[str]:
    """Returns the shortest unique end of each key, with "="; of a pool's key with the pool. An empty text for `folder`."""
    whole = [key.removesuffix("._target_").split(".") for key in keys]
    heads = []
    for parts in whole:
        least = max(len(parts) - 2, 1) if parts[:2] == ["backend", "pools"] else 1
        tails = [parts[-size:] for size in range(least, len(parts) + 1)]
        unique = (tail for tail in tails if sum(other[-len(tail) :] == tail for other in whole) == 1)
        heads.append("" if parts == ["folder"] else f"{'.'.join(next(unique, parts))}=")
    return heads
