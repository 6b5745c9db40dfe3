"""Which runs of a frame are replications of each other, and which differ in one setting alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd

from cbatch import ConfigError
from experiments.keys import key_of
from experiments.report.labels import OBJECTS, OF_POLICY, is_seed, label_runs, settings_of

_FEW = 3  # settings that a note on unlike runs names


def with_replications(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns runs with labels that differ between sources, and columns that pair runs: `served`, `others`, `but SETTING`, `seed`, `replication`.

    Equal `replication` and `served`, the workload without its seed, mean that the same requests were served. `others` are the
    settings except seeds and settings of the policy, as (key, value). For each setting that varies beside policy and workload, `but SETTING` are all others,
    or, where policies differ, the rest of `others`; objects come before numbers. rows: runs with `source`, the folder that they were read from.
    """
    labels, sources = label_runs(rows), rows["source"]
    settings = settings_of(rows).fillna("")
    keys = [key for key in map(str, settings) if not is_seed(key)]
    others = [key for key in keys if key != "policy" and not key.startswith(("policy.", "code"))]
    among = keys if rows["policy"].str.partition("(")[0].nunique() == 1 else others
    several = sources.where(sources.groupby(labels).transform("nunique") > 1, "")
    but = {f"but {key}": settings[[*rest]] for key, rest in _but(rows, settings, among)}
    requests = rows.get("capacity.requests", pd.Series(0, rows.index))
    workload = [key for key in keys if key.startswith("workload.")]
    rows = rows.assign(
        label=labels.where(several == "", labels + " in " + sources),
        served=settings[workload].assign(requests=requests).apply(tuple, axis=1),
        others=settings[others].apply(lambda row: tuple(row.items()), axis=1),
        **{name: columns.assign(source=several).apply(tuple, axis=1) for name, columns in but.items()},
        seed=settings.get("workload.seed", ""),
    )
    again = rows.groupby(["label", "seed"]).cumcount()  # repeated measurements, or replications of a search
    return rows.assign(replication=rows["seed"] + " " + again.astype(str))


@contextmanager
def unlike(first: pd.DataFrame, second: pd.DataFrame) -> Iterator[str]:
    """Yields a few of the settings beside the policy's in which the second of two labels differs; empty if none, or for one policy, whose labels say it.

    A ConfigError inside gets this text as a note.
    """
    one = first["policy"].iloc[0].partition("(")[0] == second["policy"].iloc[0].partition("(")[0]
    pairs = zip(second["others"].iloc[0], first["others"].iloc[0], strict=True)
    texts = [f"{key}={value or 'null'} over {other or 'null'}" for (key, value), (_, other) in pairs if value != other]
    more = f", and {len(texts) - _FEW} more" * (len(texts) > _FEW)
    text = f"they differ beside the policy: {', '.join(texts[:_FEW])}{more}" if texts and not one else ""
    try:
        yield text
    except ConfigError as error:
        error.add_note(text)
        raise


def _but(rows: pd.DataFrame, settings: pd.DataFrame, among: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each setting that varies beside policy and workload, with the keys of `among` that do not belong to it.

    A setting is what the command line gave, such as all of `backend.pools`, or else a key. The keys below it belong to it, and so do those
    that no command line gave and that follow from it, as `backend.replicas` from `backend.pools`.
    """
    texts = [{key_of(text): text for text in summary["about"]["overrides"]} for summary in rows["summary"]]
    given = pd.DataFrame(texts, rows.index).fillna("")
    vary = [key for key in map(str, given) if given[key].nunique() > 1 and not is_seed(key)]
    of = {key: next((name for name in sorted(vary) if f"{key}.".startswith(f"{name}.")), "") for key in among}
    vary += [key for key in among if not of[key] and settings[key].nunique() > 1]
    for name in sorted(vary, key=lambda name: name not in (*OBJECTS, "backend.pools")):
        if name.partition(".")[0] in ("workload", "chunk", "code", *OF_POLICY):
            continue
        belongs = {key for key in among if of[key] == name or f"{key}.".startswith(f"{name}.")}
        if name in given:
            number = settings.groupby(given[name]).nunique().max()
            belongs |= {key for key in vary if key in among and not of[key] and number[key] == 1}
        if belongs:
            yield name, [key for key in among if key not in belongs]
