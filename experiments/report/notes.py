"""Notes on results, below each run, table, plot and comparison: the origin of times, and the limits of the figures."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any

from cbatch.described import with_arguments
from experiments.keys import key_of
from experiments.report.conditions import About, beyond_text
from experiments.report.session_notes import Note, of_several, session_notes
from experiments.store.sources import mixed

FEWEST_IN_TAIL = 10
"""Requests that a P99 should rest on, a hundredth of a run's. With fewer, the percentile is close to the maximum, and biased."""

LACKS = {
    "prefix_cache": Note("the policy or router relies on the prefix cache, which is off", "give prefix_cache=true"),
    "clients": Note("the policy distinguishes clients, but no request names its client"),
    "sessions": Note("the policy, eviction or router follows sessions, but no request names its session"),
    "turns": Note("the eviction expects further turns of sessions, but each session has one request"),
    "objectives": Note(
        "the policy orders requests by their objectives, but none has any", "give workload.slo or workload.tiers"
    ),
    "ttft": Note("the policy orders requests by slo.ttft, but none has it: its default stands for all of them"),
    "tbt": Note("the policy times decodes by slo.tbt, but no request has it: its default stands for all of them"),
    "slack": Note("the policy's chunks do not follow its deadlines", "give chunking=slack"),
    "priorities": Note("the policy orders requests by priority, but all have the same", "give workload.tiers"),
    "future": Note(
        "the eviction reads the future, but not all requests are known beforehand: it knows only those that have arrived"
    ),
    "places": Note("the policy pauses requests, but there is no place for paused ones", "give max_running above batch"),
    "hidden_lengths": Note(
        "the policy estimates output lengths, which max_new_tokens states", "give workload.max_new_tokens"
    ),
    "drafts": Note("drafter has no effect, as the policy asks for no drafts", "give drafting=goodput, or policy=joint"),
    "drafter": Note(
        "the policy asked for drafts, and drafter=none makes none",
        "give drafter=glm_dspark in simulation, else drafter=ngram",
    ),
    "max_drafts": Note(
        "more drafts were asked for than the drafter makes of a request: they are cut to drafter.max_drafts"
    ),
    "replicas": Note("backend.router has no effect, as there is one replica", "give backend.replicas"),
    "more_replicas": Note(
        "the autoscaler wanted more replicas than there are: they are cut to backend.replicas, or to those of the pool"
    ),
    "between_nodes": Note(
        "backend.network has no effect, as nothing is sent from one node to another", "see backend.gpus_per_node"
    ),
    "reports": Note(
        "backend.staleness has no effect, as the router reads no reports",
        "give backend.replicas and another backend.router",
    ),
}
"""Notes on features that a policy, an eviction or a router depends on and a run lacks, by names in `depends_on` and `about.lacks`."""

MOST_SECONDS = {"ttft": 100, "tbt": 10, "tpot": 10, "total": 3600}
"""Objectives from which on they may have been given in milliseconds."""

PLANNING = ("num_plans", "planning_seconds", "delay_seconds")
"""Keys of the planning times on this machine (`cbatch.sim.PlanningExecutor`)."""


def notes_of(abouts: Iterable[About]) -> list[str]:
    """Returns the notes on results, one line each: the origins of times, then `limits_of`."""
    known = list(abouts)
    limits = (": ".join(filter(None, note)) for note in limits_of(known))
    return [*_counted([origin_of(about) for about in known]), *limits]


def _counted(texts: Sequence[str]) -> list[str]:
    """Returns the texts of runs in order, once each, after the number of runs if not all have a text; empty ones are left out."""
    numbers = {
        text: of_several([text == other for other in texts]).removeprefix(", ") for text in sorted({*texts} - {""})
    }
    return [": ".join(filter(None, (number, text))) for text, number in numbers.items()]


def limits_of(known: Sequence[About]) -> list[Note]:
    """Returns notes on the limits of figures."""
    of_sizes = [*session_notes(known), _sizes_note(known)]
    notes = [Note(beyond_text(known)), *_notes_on_times(known), *_notes_on_requests(known), *of_sizes]
    return [note for note in [*notes, *_notes_on_ends(known)] if note.fact]


def _notes_on_times(known: Sequence[About]) -> Iterator[Note]:
    """Yields notes on predicted times, for the device and for policies."""
    outside = [about["execution"]["iterations_outside_measured_range"] for about in known if about["simulated"]]
    if any(outside):
        total = sum(about.get("iterations", 0) for about in known)
        share = f" of {total:,}" if total >= sum(outside) else ""  # unknown of a search
        counted = f"{sum(outside):,}{share}{of_several(outside)}"
        yield Note(f"iterations outside the measured range: {counted}; their times are extrapolated")
    if planning := [about["execution"]["planning"] for about in known if "planning" in about["execution"]]:
        plans, seconds, late = (sum(each[key] for each in planning) for key in PLANNING)
        per_plan = f"planning took {1e3 * seconds / max(plans, 1):.2g} ms per plan here"
        yield Note(f"{per_plan}, {late:.2g} s of it beyond the device's slack")
    predictions = [of for about in known if (of := about["execution"].get("predictions", {})).get("asked")]
    for profile, error in sorted({(of["profile"], of["error"]) for of in predictions}):
        yield Note(f"view.cost predicts with profile {profile} ({error})")


def _notes_on_requests(known: Sequence[About]) -> Iterator[Note]:
    """Yields notes on what policies know and lack, and on which requests count."""
    if any(seen := [about.get("output_lengths_known") is True for about in known]):
        yield Note(f"true output lengths available to the policy, as max_new_tokens{of_several(seen)}")
    if any(prefixes := [about.get("prefixes", False) for about in known]):
        yield Note(f"prefixes are not reused: every prompt is computed in full{of_several(prefixes)}")
    if long := dict.fromkeys(text for about in known for text in _long_objectives(about)):
        yield Note(f"objectives are in seconds: {', '.join(long)}", "give 0.5 for 500 ms")
    if unread := {with_arguments(about["policy"], sizes) for about in known if (sizes := sizes_beside_chunk(about))}:
        yield Note(f"chunk: not read by {', '.join(sorted(unread))}")
    for name, note in LACKS.items():
        if any(lacking := [_lacks(about, name) for about in known]):
            yield Note(f"{note.fact}{of_several(lacking)}", note.remedy)
    if early := [turns for about in known if (turns := about.get("early_turns"))]:
        turns, arrived, answered = (sum(each[key] for each in early) for key in ("turns", "arrived", "answered"))
        if arrived:
            share = f"{arrived / turns:.0%} of the {turns:,} later turns"
            even = f"{answered / turns:.0%} even get tokens before (open loop)"
            yield Note(f"{share} arrive before the previous answer has ended, {even}")
    if closing := [number for about in known if (number := about.get("closing", 0)) > _drained(about)]:
        most, fewest = max(closing), min(about["requests"] for about in known)
        counted = f"{most:,} requests at the end are counted, although fewer and fewer sessions are left"
        remedies = [f"give metrics.drain_requests={most}"] * (most < fewest) + ["serve more"] * (2 * most > fewest)
        yield Note(counted, ", and ".join(remedies))
    if fact := next(filter(None, map(_left_out_text, known)), ""):
        yield Note(f"{fact}{of_several([_left_out_text(about) != '' for about in known])}", "lower them")


def _notes_on_ends(known: Sequence[About]) -> Iterator[Note]:
    """Yields notes on requests and runs that did not end as the others, and on different code."""
    for key, what in (
        ("outputs_cut", "outputs cut at max_new_tokens"),
        ("cancelled", "requests whose client left"),
        ("never_came", "turns that never came, as their sessions ended early"),
        ("cut", "requests cut as the server ended"),
        ("refused", "requests refused beyond max_open, and in no figure"),
    ):
        counts = [about.get(key, 0) for about in known]
        if any(counts):
            total = sum(about["requests"] + about.get(key, 0) * (key in ("refused", "never_came")) for about in known)
            yield Note(f"{what}: {sum(counts):,} of {total:,}{of_several(counts)}")
    if errors := [about["error"] for about in known if "error" in about]:
        yield Note(f"ended by an error, see about.traceback in summary.json: {'; '.join(errors)}")
    if different := mixed(about["code"] for about in known if "code" in about):
        yield Note(f"made by different versions of {', '.join(different)}; see about.code in summary.json")


def _sizes_note(known: Sequence[About]) -> Note:
    """Returns a note if runs that differ only in seeds chose KV caches of different sizes: the sizes of those that differ most."""
    sizes: dict[str, set[int]] = {}
    for about in known:
        same = [item for item in about.get("identity", {}).items() if item[0].rpartition(".")[2] != "seed"]
        for key, text in about.get("chosen", {}).items():
            if key.rpartition(".")[2] == "kv_tokens" and same:
                sizes.setdefault(f"{key} {same}", set()).add(int(text.partition(" ")[0]))
    most = max(sizes.values(), key=lambda of: max(of) - min(of), default=set())
    if len(most) < 2:
        return Note("")
    remedy = "give kv_tokens, or max_tokens, which follows the longest request drawn"
    return Note(f"seeds differ in the KV cache, {min(most):,} to {max(most):,} tokens", remedy)


def _long_objectives(about: About) -> Iterator[str]:
    """Yields the settings of objectives that are at least `MOST_SECONDS`."""
    for key, value in about.get("identity", {}).items():
        of, _, name = key.rpartition(".")
        if of.endswith(("slo", "objectives")) and value is not None and value >= MOST_SECONDS.get(name, inf):
            yield f"{key}={value:g}"


def _left_out_text(about: About) -> str:
    """Returns the settings by which no served request of a run counts; empty if some do."""
    keys, settings = ("metrics.warmup_requests", "metrics.drain_requests"), about.get("identity", {})
    given = " and ".join(f"{key}={settings.get(key, 0)}" for key in keys)
    given_any = about.get("left_out") and any(settings.get(key) for key in keys)
    return f"{given} leave none of {about['left_out']:,} served requests" if given_any else ""


def _drained(about: About) -> int:
    number: int = about.get("identity", {}).get("metrics.drain_requests", 0)
    return number


def _lacks(about: About, name: str) -> bool:
    """Returns whether a run lacks one of `LACKS`, unless it makes no drafts because it was told so."""
    is_told = name == "drafts" and any("drafting=none" in text for text in about.get("overrides", ()))
    return name in about.get("lacks", ()) and not is_told


def unread_chunk(about: About) -> list[str]:
    """Returns the override of `chunk` if a user's policy does not read it and has whole-number arguments, none equal to it; else an empty list."""
    own = {f"chunk={number}" for number in about.get("whole_numbers", {}).values()}
    unread = [text for text in about.get("overrides", ()) if text.startswith("chunk=")]
    return [] if about.get("chunk") is not None or not own or own & {*unread} else unread


def sizes_beside_chunk(about: About) -> dict[str, int]:
    """Returns the whole-number arguments of a policy that does not read the given `chunk`: those that the command line gives it, or else all."""
    sizes: dict[str, int] = about["whole_numbers"] if unread_chunk(about) else {}
    given = " ".join(text for text in about.get("overrides", ()) if key_of(text).partition(".")[0] == "policy")
    return {name: size for name, size in sizes.items() if re.search(rf"\b{name}=", given)} or sizes


def made_text(abouts: Iterable[About], digits: int = 12) -> str:
    """Returns the dates and commits of results on one line; empty if not recorded. digits: of a commit."""
    known = [about for about in abouts if about.get("date")]
    days = sorted({str(about["date"])[:10] for about in known})
    trees = {str(about.get("commit")) for about in known}
    commits = sorted({tree[:digits] + " + changes" * ("+" in tree) for tree in trees})
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, commit {', '.join(commits)}" if known else ""


def footer_of(abouts: Sequence[About], below: Sequence[str]) -> list[str]:
    """Returns the notes below a figure, shorter than `notes_of` and most important first. below: notes on the figure itself."""
    simulated = [about["execution"] if about["simulated"] else None for about in abouts]
    names = sorted({_profile_text(of) if of else origin_of(about) for of, about in zip(simulated, abouts, strict=True)})
    errors = _counted(["; ".join(_limits_of_profile(of)) if of else "" for of in simulated])
    if len({of["profile"] for of in simulated if of}) > 1:
        names, errors = _counted([*map(origin_of, abouts)]), []  # each profile with its error
    texts = [*names, made_text(abouts, digits=8), *errors, *below, *(note.fact for note in limits_of(abouts))]
    return [text for text in texts if text]


def origin_of(about: About) -> str:
    """Returns the origin of times on one line: the hardware, or the profile that simulates it, with its error."""
    if not about["simulated"]:
        return f"measured on {about['hardware']}"
    return simulated_text(about["execution"])


def simulated_text(profile: Mapping[str, Any]) -> str:
    """Returns a profile's name and its limits."""
    return f"{_profile_text(profile)} ({'; '.join(_limits_of_profile(profile))})"


def _limits_of_profile(profile: Mapping[str, Any]) -> list[str]:
    """Returns a profile's error, and the names or the number of its entries that are not measured, such as derived ones."""
    limits, others = [profile["error"]], list(profile.get("not_measured", ()))  # as in `captured_rows (derived)`
    if len(others) > 2:
        kinds = Counter(other.rstrip(")").rpartition(" (")[2] for other in others)
        others = [f"{number} {kind}" for kind, number in kinds.items()]
    limits += [f"entries not measured: {', '.join(others)}"] * bool(others)
    if source := profile.get("times_of"):
        limits.append(f"times of {source}, fitted to the model's shape")
    return limits


def given_text(abouts: Iterable[About], stated: Collection[str] = ()) -> str:
    """Returns the settings of the workload that the command lines of all runs gave, but seeds and those stated elsewhere; paths by their last part."""
    first, *others = (about.get("overrides", ()) for about in abouts)
    shared = [text for text in first if "=" in text and all(text in other for other in others)]
    given = {key_of(text): text.partition("=")[2].rpartition("/")[2] for text in shared}
    names = [key for key in given if key.startswith("workload.") and key not in ("workload.seed", *stated)]
    texts = [f"{key.removeprefix('workload.')}={given[key]}" for key in names]
    texts += [given.get("workload", "").strip("'").partition("(")[2].removesuffix(")")]  # open_loop(arrivals.rate=4)
    texts = [*filter(None, texts)]
    return f"workload: {', '.join(texts)}" if texts else ""


def chosen_text(abouts: Iterable[About]) -> str:
    """Returns the sizes that runs chose by themselves, each with its least and largest value, such as `chosen: kv_tokens=891,298`."""
    values: dict[str, list[int]] = {}
    for key, text in chain.from_iterable(about.get("chosen", {}).items() for about in abouts):
        if (number := text.partition(" ")[0]).isdecimal():
            values.setdefault(key, []).append(int(number))
    ends = {key: dict.fromkeys(f"{end:,}" for end in (min(of), max(of))) for key, of in values.items()}
    sizes = [f"{key}={' to '.join(texts)}" for key, texts in ends.items()]
    return f"chosen: {', '.join(sizes)}" if sizes else ""


def _profile_text(profile: Mapping[str, Any]) -> str:
    card = f" at the speed of {text}" if (text := profile.get("card")) else ""
    return f"SIMULATED with profile {profile['profile']}{card}"


def tail_text(counted: Iterable[Sequence[int]], part: str = "", advise: bool = True) -> str:
    """Says if the P99 of a run, or of a part of it, rests on fewer than `FEWEST_IN_TAIL` requests.

    counted: counted requests of each, for each group of runs that share a table's row, a point or a side of a comparison.
    part: the part of a run that they are, such as " in pool p". advise: whether to say how many to serve.
    """
    fewest = min(chain.from_iterable(counted), default=100 * FEWEST_IN_TAIL)
    if fewest >= 100 * FEWEST_IN_TAIL:
        return ""
    if fewest < 100:
        return f"a P99 of {fewest} request{'s' * (fewest != 1)} is nearly the maximum{'; serve more requests' * advise}"
    advice = f"; serve {100 * FEWEST_IN_TAIL:,} or more" * advise
    return f"P99s over requests are unreliable: only {fewest} requests{part}{advice}"
