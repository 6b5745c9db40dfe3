"""`python -m experiments.compare A B ... [key=value ...]`: ratios and differences with 95% intervals, on the same replications.

A, B, ...: folders of runs or of capacity searches, or one folder of a sweep over both. Or policies, with arguments in
parentheses as in a sweep, which are run first, with 20 seeds unless seeds=N is given: other keys, and --config-dir=FOLDER, go to
`experiments.run`.

    python -m experiments.compare multirun/noise metric=ttft_seconds.p99
    python -m experiments.compare multirun/rates baseline=sarathi_serve runs=rate=8
    python -m experiments.compare orca 'sarathi_serve(chunking=fixed)' workload=open_loop workload.arrivals.rate=25 batch=64 seeds=10

  metric=KEY         a figure of summary.json instead of those of tables; may be given several times
  baseline=POLICY    the policy that others are compared with, at equal chunks, and its other chunks with its first; or a
                     printed label or its settings, as in baseline='pools=4 both'; the first one by default
  csv=FILE           write a CSV file with a row for each figure of each comparison, in the units of summary.json: the ratio and the
                     difference with the ends of their intervals, p, p_holm (corrected for the number of tests), and ratio_error
  runs=TEXT          only runs whose folder names or command lines contain this; values after = are compared whole

Runs that differ only in the seed are replications and share a label. Labels are compared with the baseline that has the same
settings apart from the policy's: in a sweep of rates and batches, in a table for each rate and batch; with a single policy, each
setting at equal values of the others, as chunks at each batch and batches at each chunk. If the workloads differ in nothing but the seed,
both served the same requests: replications are then paired by seed, which removes most of the noise. The interval of the difference
decides what is significant. Among many differences some are significant by chance: a line says how many remain if p values are corrected
for their number by Holm's method. Equal outcomes are one test, and figures that are equal in all replications none. The interval of the
ratio is computed on its logarithm, and may disagree with few seeds. An interval over seeds does not include the error of simulation:
"below 10%" marks a significant difference below the largest error, ratio_error, of such a ratio in comparisons with real runs: a ratio
from 1/1.10 to 1.10. This error depends on whether either run launches iterations with prompts that fit no captured graph.
"""

import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from tabulate import tabulate

from cbatch import ConfigError
from cbatch.validation import nearest
from experiments.keys import key_of
from experiments.report import headings
from experiments.report.conditions import in_graphs, profiles_of, ratio_error
from experiments.report.headings import flat, no_such_figure
from experiments.report.intervals import Compared, compare, few_text, holm, holm_text
from experiments.report.labels import is_baseline
from experiments.report.notes import notes_of, tail_text
from experiments.report.replications import unlike
from experiments.report.text import disagree, intervals_text, values_text
from experiments.run import run_sweep
from experiments.settings.command_line import run
from experiments.settings.option_arguments import option_names
from experiments.settings.overrides import check_given_once, with_search_path
from experiments.setup.measured import check_measured
from experiments.store.claim import check_writable
from experiments.store.provenance import write_text
from experiments.store.replications import read_replications
from experiments.store.runs import ONE_REPLICATION, matching

_OPTIONS = ("metric", "baseline", "runs", "csv")
_WHICH_DECIDES = "where the intervals disagree, the difference's decides; the ratio's is computed from its logarithm"
_BELOW = (
    "below N%: simulated ratios of this figure were off by up to N% of the real ones (N is larger if either run launches "
    "iterations without a graph), so the difference may be an error of simulation: docs/hardware-profiles.md#how-small-a-difference-counts"
)
_UNKNOWN = "no known error: simulated ratios of this figure, with this profile, were not compared with real runs"


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run(_compare, with_search_path(arguments), lambda: str(__doc__))


def _compare(*arguments: str) -> None:
    plain = [text for text in arguments if "=" not in text.partition("(")[0] and not text.startswith("~")]
    names = [text for text in arguments if text in plain or Path(text).exists()]
    options = [text for text in arguments if text not in names]
    values = {name: [text.partition("=")[2] for text in options if key_of(text) == name] for name in _OPTIONS}
    others = [text for text in options if key_of(text) not in _OPTIONS]
    if not names:
        raise ConfigError("compare: give folders of runs, or at least two policies, as in compare orca sarathi_serve")
    check_given_once([text for text in options if not text.startswith("metric=")])
    if path := "".join(values["csv"]):
        check_writable(Path(path).parent, "give csv=FILE in another folder")
    folders, baseline = [Path(name) for name in names if Path(name).is_dir()], "".join(values["baseline"])
    if len(folders) < len(names):
        _check_policies(names, baseline)
        sweep, seeds = f"sweep={datetime.now():%Y-%m-%d_%H-%M-%S}_compare", "seeds=20"
        added = [text for text in (sweep, seeds) if key_of(text) not in map(key_of, others)]
        check = partial(check_measured, values["metric"])
        folders = [run_sweep([f"policy={','.join(names)}", *others, *added], check=check)]
    elif others:
        raise ConfigError(f"compare: {others[0]} is for policies; folders take metric=, baseline=, runs= and csv=")
    rows = read_replications(folders, "".join(values["runs"]))
    print(report(rows, values["metric"], baseline, notes=len(folders) == len(names)))  # else the sweep has printed them
    if path:
        table = table_of(pairs_of(rows, values["metric"], baseline))
        print(f"\n{write_text(Path(path), table.to_csv(index=False))}")


def _check_policies(names: Sequence[str], baseline: str) -> None:
    """Raises ConfigError before the first run for arguments that the comparison after the last run would refuse."""
    missing = next(name for name in names if not Path(name).is_dir())
    folders = any(Path(name).is_dir() for name in names) or "/" in missing.partition("(")[0]
    policies = [] if folders else option_names("policy", ",".join(names))
    if len(set(policies)) < 2:
        raise ConfigError(f"compare {missing}: no such folder, and one policy; give folders of runs, or two policies")
    known = {re.split(r"[(,]", policy)[0].rpartition(".")[2] for policy in policies}
    if baseline and re.split(r"[(,]", baseline)[0] not in known:
        raise ConfigError(f"baseline={baseline}: no run of this policy; {nearest(baseline, known)}")


class Pair(NamedTuple):
    """A label and the baseline that it is compared with.

    same: both served the same requests. profiles, in_graphs: of both, see `conditions`.
    results: by key, in the units of summary.json. unlike: see `unlike`.
    """

    label: str
    over: str
    same: bool
    profiles: Collection[str]
    in_graphs: bool
    results: Mapping[str, Compared]
    unlike: str

    @property
    def number(self) -> int:
        """The replications that have the figure that most have; 1 if they are all equal."""
        return max(result.number for result in self.results.values())

    def error(self, key: str) -> float:
        """Returns the largest known error of such a ratio; 0 if none is known, or nothing is simulated."""
        return ratio_error(key, self.in_graphs, self.profiles)

    @property
    def shared(self) -> str:
        """The settings at the end of both labels."""
        parts = self.label.split(", ")
        ends = (", ".join(parts[place:]) for place in range(1, len(parts)))
        return next((end for end in ends if self.over.endswith(f", {end}") and end.count("(") == end.count(")")), "")

    def short(self, label: str) -> str:
        """Returns a label without the shared settings."""
        return label.removesuffix(f", {self.shared}")


def report(rows: pd.DataFrame, metrics: Sequence[str] = (), baseline: str = "", *, notes: bool = True) -> str:
    """Returns the comparisons as tables of text, with the notes on the runs if `notes`. Otherwise as `pairs_of`."""
    pairs = pairs_of(rows, metrics, baseline)
    compared = {label for pair in pairs for label in (pair.label, pair.over)}
    others = [label for label in rows["label"].unique() if label not in compared]
    results = [result for pair in pairs for result in pair.results.values()]
    alone = [f"not compared: nothing else has the settings of {label}" for label in others]
    policies, settings = rows["policy"].str.partition("(")[0], rows.filter(regex="^but ")
    if policies.nunique() > 1 and settings.size and not any(pair.unlike for pair in pairs):
        alone.append("policies are compared at equal settings: runs=policy=NAME compares the settings of one policy")
    errors = [pair.error(key) for pair in pairs if pair.profiles for key, of in pair.results.items() if of.significant]
    alone += [holm_text(results), few_text(result.number for result in results), _UNKNOWN * (0 in errors)]
    below = notes_of(summary["about"] for summary in rows.drop_duplicates("folder")["summary"]) if notes else []
    if notes and "run.counted_requests" in rows and any("p99" in key for pair in pairs for key in pair.results):
        below.insert(0, tail_text(rows.groupby("label")["run.counted_requests"].agg(list)))
    blocks = [*_blocks(pairs), *("\n".join(filter(None, lines)) for lines in (alone, below))]
    return "\n\n".join(filter(None, blocks))


def table_of(pairs: Sequence[Pair]) -> pd.DataFrame:
    """Returns a row for each figure of each pair. p_holm: corrected for the number of tests, see `holm`."""
    results = [(pair, key, result) for pair in pairs for key, result in pair.results.items()]
    rows = []
    for (pair, key, result), p_holm in zip(results, holm([result for *_, result in results]), strict=True):
        names = {"label": pair.label, "over": pair.over, "settings": pair.shared, "figure": key}
        heading, error = headings.heading_of(key), pair.error(key) or math.nan
        ratio = dict(zip(("ratio", "ratio_low", "ratio_high"), result.ratio, strict=True))
        difference = dict(zip(("difference", "difference_low", "difference_high"), result.difference, strict=True))
        facts = {"p": result.p, "p_holm": p_holm, "apart": result.significant, "paired": result.paired}
        more = {"replications": result.number, "unit": heading.unit, "better": heading.better, "ratio_error": error}
        rows.append({**names, **ratio, **difference, **facts, **more})
    return pd.DataFrame(rows)


def _figures(rows: pd.DataFrame, metrics: Sequence[str]) -> Sequence[str]:
    if rows["label"].nunique() < 2:
        raise ConfigError(f"compare: there is only {rows['label'].iloc[0]}; add the folder of another run")
    summary = {key: value for key, value in rows["summary"].iloc[0].items() if key != "about"}
    figures = [key for key, value in flat(summary) if isinstance(value, int | float)]
    for key in metrics:
        if key not in figures:
            raise ConfigError(no_such_figure(f"metric={key}", figures))
    shown = [key for key in headings.CAPACITIES if key in rows] or headings.COLUMNS
    return metrics or matching(shown, rows, headings.MOST_OF_A_PATTERN)


def pairs_of(rows: pd.DataFrame, metrics: Sequence[str] = (), baseline: str = "") -> list[Pair]:
    """Compares each label with the baseline of the same settings beside the policy's.

    If all labels have one policy, each setting that varies is compared at equal values of all others, as in a sweep of evictions and sizes.
    If all settings differ, the baseline is a label that served the same requests; if there is none, the first of all.

    Args:
        rows: as `read_replications` returns. metrics: keys of figures; by default the figures of tables.
        baseline: a policy or a label; by default the policy of the first row.

    Raises ConfigError: a single label or replication, no such baseline, an unknown figure.
    """
    keys = _figures(rows, metrics)
    is_base = is_baseline(rows, baseline or rows["policy"].iloc[0].partition("(")[0])
    rows = rows.assign(base=is_base).sort_values("base", ascending=False, kind="stable")
    pairs, alone = dict[tuple[str, str], Pair](), [str(column) for column in rows if str(column).startswith("but ")]
    by_column = {
        column: [group for _, group in rows.groupby(column, sort=False) if group["label"].nunique() > 1]
        for column in ("others", *alone, "served")
    }
    one = rows["policy"].str.partition("(")[0].nunique() == 1
    settings = [group for column in ("others", *alone) for group in by_column[column]] if one else []
    for group in settings or next(filter(None, by_column.values()), [rows]):
        first, *others = (label for _, label in group.groupby("label", sort=False))
        for other in others:
            pair = _pair(_counterpart(first, other, group), other, keys)
            pairs.setdefault((pair.label, pair.over), pair)
    return [*pairs.values()]


def _counterpart(first: pd.DataFrame, other: pd.DataFrame, group: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows that a label is compared with: the baseline with the same chunk, or else the first label of the group."""
    if "chunk" in group:
        same = group[group["base"] & (group["chunk"] == other["chunk"].iloc[0])]
        if len(same) and (label := str(same["label"].iloc[0])) != other["label"].iloc[0]:
            return group[group["label"] == label]
    return first


def _pair(first: pd.DataFrame, second: pd.DataFrame, keys: Sequence[str]) -> Pair:
    label, over = str(second["label"].iloc[0]), str(first["label"].iloc[0])
    abouts = [summary["about"] for rows in (first, second) for summary in rows["summary"]]
    same, results = bool(first["served"].iloc[0] == second["served"].iloc[0]), {}
    equal = first["figures"].nunique() == second["figures"].nunique() == 1
    with unlike(first, second) as text:
        for key in keys:
            columns = (rows.set_index("replication")[key].astype(float) for rows in (first, second))
            before, after = (values.dropna().to_dict() for values in columns)
            if before and after:
                result = compare(before, after, same)
                results[key] = result.alone() if equal else result
    if not results:
        raise ConfigError(f"compare: {label} over {over}: no figure in common; give runs of one kind")
    return Pair(label, over, same, profiles_of(abouts), in_graphs(abouts), results, text)


def _blocks(pairs: Sequence[Pair]) -> list[str]:
    """Returns a table for each pair; in a sweep of further settings, one for each of their values and baseline."""
    groups: dict[tuple[str, ...], list[Pair]] = {}
    several = len({pair.shared for pair in pairs}) > 1
    for place, pair in enumerate(pairs):
        key = (pair.shared, pair.short(pair.over), _how(pair)) if several else (str(place),)
        groups.setdefault(key, []).append(pair)
    return [_text(group, several) for group in groups.values()]


def _how(pair: Pair) -> str:
    if pair.number < 2:
        return f"1 replication, on {'the same' if pair.same else 'different'} requests"
    is_paired = any(result.paired for result in pair.results.values())
    paired = "paired, on the same requests" if is_paired else "NOT paired: they served different requests"
    return f"{pair.number} replications, {paired}"


def _text(pairs: Sequence[Pair], several: bool) -> str:
    """Returns the table of comparisons with one baseline, below a title. several: other pairs have other settings, which the title names."""
    first, *others = pairs
    label, over = (first.short(text) if several else text for text in (first.label, first.over))
    at = f" at {first.shared}" * bool(several and first.shared)
    title = f"{'Over' if others else f'{label} over'} {over}{at}: {_how(first)}"
    rows = []
    for key in dict.fromkeys(key for pair in pairs for key in pair.results):
        heading = headings.heading_of(key)
        for pair in pairs:
            if key in pair.results:
                names = [pair.short(pair.label)] if others else []
                result = pair.results[key].scaled(heading.factor)
                texts = values_text(result)
                if first.number > 1:
                    texts = intervals_text(result, heading.limits[1], pair.error(key))
                texts[-1] += ", with launches without a graph" * ("; below " in texts[-1] and not pair.in_graphs)
                texts[-1] += "; no known error" * (result.significant and bool(pair.profiles) and not pair.error(key))
                if result.number < pair.number:
                    texts[-1] += f"; {result.number} replications have it"
                rows.append([heading.text, *names, heading.better, *texts])
    heads = ["figure", *["run"] * bool(others), "better", "ratio", "difference", "remark"][: len(rows[0])]
    disagreement = any(disagree(result) for pair in pairs for result in pair.results.values())
    below = [*dict.fromkeys(pair.unlike for pair in pairs), _BELOW * any("; below " in row[-1] for row in rows)]
    below.append(_WHICH_DECIDES if disagreement else ONE_REPLICATION * (first.number < 2))
    return "\n".join(filter(None, [title, tabulate(rows, heads, disable_numparse=True), *below]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
