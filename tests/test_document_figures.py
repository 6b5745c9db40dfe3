"""Figures that stand in sentences of the documents: each is that of the stored results, with their date and commit."""

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from experiments.bench.tables import stamp
from experiments.fidelity.cases import SERVE
from experiments.fidelity.compare import TARGETS, is_within
from experiments.paper.closure import closure_claims

ROOT = Path(__file__).parents[1]
Json = dict[str, Any]


def stored(path: str) -> Json:
    return dict(json.loads((ROOT / "results" / path).read_text()))


def simulator_speed() -> str:
    file = stored("cpu/sim.json")

    def extremes(name: str, long: bool) -> tuple[float, float]:
        found = [way[name] for key, way in file["figures"].items() if key.endswith("long outputs") == long]
        values = [value["median"] if isinstance(value, dict) else value for value in found]
        return min(values), max(values)

    (low, high), (low_long, high_long) = (extremes("iterations_per_second", long) for long in (False, True))
    (least, most), (least_long, most_long) = (extremes("gain", long) for long in (False, True))
    batches = f"{extremes('mean_batch', False)[0]:.0f} to {extremes('mean_batch', False)[1]:.0f}"
    speeds = f"{round(low, -2):,.0f} to {round(high, -2):,.0f} iterations per second with outputs of 300 to 900 tokens"
    long_speeds = f"{round(low_long, -2):,.0f} to {round(high_long, -2):,.0f} with 2,000 to 6,000"
    gains = f"{least:.1f} to {most:.1f} and {least_long:.1f} to {most_long:.1f} times"
    where = (
        f"at {batches} running requests on one core of an AMD EPYC, and {long_speeds}, {gains} as many as without leaps"
    )
    return f"{speeds} {where} ({stamp(file)};"


def a_million_requests() -> str:
    file = stored("cpu/million.json")
    figures = file["figures"]
    assert figures["requests"] == 1_000_000
    work = f"{figures['iterations']:,} iterations and {figures['generated_tokens'] / 1e6:.0f} million generated tokens"
    cost = f"{figures['cpu_seconds']:.0f} s of a core and {figures['peak_memory_mb'] / 1e3:.1f} GB"
    return f"{work} took {cost} ({stamp(file)}, `results/cpu/million.json`)"


def whole_process() -> str:
    file = stored("cpu/vidur.json")
    run = file["figures"]["tables"]
    ours = f"{run['wall_seconds']['median']:.1f} s and {run['peak_memory_mb']['median']:.0f} MB, result tables included"
    return f"is one process of {ours} ({stamp(file)}; the same machine, `python -m experiments.bench vidur`)"


def checks() -> str:
    file, gpu = stored("cpu/checks.json"), stored("h200/checks.json")
    cost = [found["wall"]["races over off"]["median"] - 1 for found in file["figures"].values()]
    [on_gpu] = [found["wall"] for found in gpu["figures"].values()]
    races, again = (on_gpu[f"{name} over off"]["median"] for name in ("races", "off again"))
    assert abs(races - 1) < 0.01
    small = f"{min(cost):.0%} to {max(cost):.0%} of an iteration of the smallest model on a CPU".replace("% to", " to")
    times = f"{races:.3f} times the time, {again:.3f} of another server without it"
    large = f"nothing that shows on an H200 with Llama-3.1-8B and 32 requests ({times}; {stamp(gpu)})"
    return f"{small}, depending on the batch ({stamp(file)}), and {large}"


def plans() -> str:
    """The dearest policy by its median plan, and that of the longest single one, beside each number of waiting requests."""
    file = stored("cpu/host.json")

    def dearest(waiting: int, figure: str, number: str) -> str:
        times = {name: found[f"waiting {waiting}"][figure] for name, found in file["plans"].items()}
        name = max(times, key=times.__getitem__)
        return f"{times[name]:{number}} ms (`{name}`)"

    few, many = (dearest(waiting, "median", ".2f") for waiting in (10_000, 100_000))
    longest = " and ".join(dearest(waiting, "max", ".0f") for waiting in (10_000, 100_000))
    typical = (
        f"of CPU time at most, by its median, beside 256 running and 10,000 waiting requests, and {many} beside 100,000"
    )
    where = (
        f"(`python -m experiments.bench host`, [host.json](../results/cpu/host.json), {file['hardware']}, {stamp(file)}"
    )
    return f"A plan takes {few} {typical}. Single plans, which sort or rank anew, take up to {longest} {where}, "


def mutants() -> str:
    file = stored("cpu/mutants.json")
    found, share = file["all"], file["survived_share"]
    number = f"{found['judged']:,} of {found['mutants']:,} mutants of {len(file['modules'])} modules"
    ends = f"{found['killed']:,} were noticed, {found['equivalent']} are equivalent, and {found['survived']} survived"
    return f"{number}. {ends}: {share:.1%} of those that are not equivalent; at most 3% are accepted"


def drawn() -> str:
    schedules, fuzzed = stored("cpu/random_schedules.json"), stored("cpu/fuzz.json")
    assert not schedules["failures"] and not fuzzed["failures"]
    what = f"{schedules['schedules']:,} schedules of {len(schedules['by']['policy'])} policies and variants ({stamp(schedules)})"
    return f"{what} and {fuzzed['inputs']:,} inputs ({stamp(fuzzed)}), none of which failed"


def slow_card() -> str:
    """Of the speeds on a card whose power limit kept it slow."""
    slow = ("pd", "trace-longest_first", "trace-sarathi_serve", "trace-sarathi_serve-before", "trace-256")
    names = (*(f"slow-card/{name}" for name in slow), "trace-128", "trace-256")
    files = [stored(f"h200/{name}.json") for name in names]
    [newer], [earlier], [last] = (
        {stamp(file).split()[-1] for file in part} for part in (files[:3], [files[3], *files[5:]], files[4:5])
    )
    figures = [files[0]["figures"]["14"], *(file["figures"] for file in files[1:])]
    speeds = [f"{next(iter(found.values()))['tokens_per_second']['median']:,.0f}" for found in figures]
    rows = "{} tokens/s in LLaMA-13B's row and, with batch 128 of the trace, {} with `longest_first policy.per_prompt_token=true`"
    serve = f"and {speeds[2]} with `sarathi_serve`. The latter is {speeds[3]} there with {earlier} ({speeds[5]} in the table)."
    large = f"With batch 256, `sarathi_serve` reaches {speeds[4]} with {last} ({speeds[6]} in the table)."
    return f"{newer}, whose kernels are newer, reaches {rows.format(*speeds)} {serve} {large}"


def options() -> str:
    """Of the options for speed: all of them on two cards, and each of them in one row; quack alone on three other cards."""

    def rate(card: int, name: str, policy: str = "") -> float:
        figures = stored(f"h200/options/card-{card}/{name}.json")["figures"]
        [found] = [found for key, found in figures.get("14", figures).items() if key.startswith(policy)]
        return float(found["tokens_per_second"]["median"])

    def step(old: float, new: float) -> str:
        return f"{old:,.0f} → {new:,.0f} (+{new / old - 1:.1%})"

    serve, longest = "sarathi_serve, ", "longest per prompt token first, "
    filled = [
        rate(4, name, serve + "filling") for name in ("trace", "trace-sampled", "trace-quack", "trace-quack-sampled")
    ]
    base, ranked = rate(4, "trace", serve + "1024"), rate(4, "trace", longest + "1024")
    pairs = [
        ("LLaMA-13B's row", rate(5, "pd"), rate(5, "pd-quack-sampled")),
        ("the trace with batch 256", rate(5, "trace-256"), rate(5, "trace-256-quack-sampled", serve)),
        ("with batch 128 and `filling`", base, filled[-1]),
        ("the same, `longest_first policy.per_prompt_token=true`", ranked, rate(4, "trace-quack-sampled", longest)),
    ]
    rows = ", ".join(f"{name} {step(old, new)}" for name, old, new in pairs)
    added = [f"{each / filled[0] - 1:.1%}" for each in filled[1:3]]
    shares = f"adds {filled[0] / base - 1:.1%}; on top of it, `sampled` adds {added[0]} and quack {added[1]}"
    alone = [step(rate(1, name), rate(1, f"{name}-quack")) for name in ("pd", "trace-256")]
    last = f"quack alone, on another card: {alone[0]} in LLaMA-13B's row, and with batch 256 {alone[1]}"
    return f"{rows}. With batch 128, `filling` alone {shares}. {last}"


def one_session() -> str:
    """Of policies that one run of a benchmark measured in turns on one card."""
    pd, trace = stored("h200/pd.json"), stored("h200/trace.json")
    assert pd["commit"] == trace["commit"]

    def speed(policy: str, of: Json = trace["figures"]) -> str:
        return f"{of[policy]['tokens_per_second']['median']:,.0f}"

    commit = f"{stamp(trace).split()[-1]}, `sarathi_serve` and `orca`"
    tie = f"({speed('sarathi_serve, 1024 tokens')} and {speed('orca')} tokens/s with batch 128)"
    ranked = f"({speed('longest_first, 1024 tokens')} and {speed('longest per prompt token first, 1024 tokens')})"
    found, fixed = (speed(f"sarathi, {chunk}", pd["figures"]["14"]) for chunk in ("chunk found", "256 tokens"))
    last = f"LLaMA-13B reaches {found} with the chunk that `pd_aware` finds and {fixed} with one fixed at 256"
    return f"In the run of {commit} tie {tie}, as do both rankings of `longest_first` {ranked}, and {last}."


def fidelity() -> str:
    file = stored("h200/fidelity.json")
    median, most = file["median_error"], file["largest_error"]
    first = f"the median error is {median['total time']:.1%} of the total time"
    middles = f"{median['TTFT P50']:.1%} and {median['TBT P50']:.1%} of the median TTFT and TBT"
    last = f"and {median['TTFT P99']:.1%} and {median['TBT P99']:.1%} of their P99."
    largest = f"{most['total time']:.1%}, {most['TTFT P50']:.1%} and {most['TBT P50']:.1%}"
    return f"{first}, {middles}, {last} The largest errors of total time and medians are {largest}."


def loops(work: str, figure: str) -> tuple[float, float]:
    """The figure of the synchronous loop and that of the asynchronous one; the median of repeated ones."""
    found = stored("h200/async.json")["figures"][work]
    sync, asynchronous = (found[name][figure] for name in ("sync", "async"))
    return (sync["median"], asynchronous["median"]) if isinstance(sync, dict) else (sync, asynchronous)


def asynchronous_loop() -> str:
    sync, asynchronous = loops("2048 new", "ms_per_iteration")
    return f"| iteration time, 2,048 output tokens | {sync:.2f} ms | {asynchronous:.2f} ms |"


def host_work() -> str:
    sync, asynchronous = loops("2048 new", "host_ms_per_iteration")
    return f"| host work per iteration, 2,048 output tokens | {sync:.2f} ms | {asynchronous:.2f} ms |"


def busy() -> str:
    sync, asynchronous = loops("2048 new", "kernel_share")
    return f"| share of a profiled window with a kernel or copy running | {sync:.1%} | {asynchronous:.1%} |"


def long_runs() -> str:
    sync, asynchronous = loops("8192 new", "seconds")
    return f"| whole run, 8,192 output tokens | {sync:.1f} s | {asynchronous:.1f} s |"


def pipelines() -> str:
    """The whole table: measured and simulated throughput and bubbles."""
    names = {"orca": "`orca`", "sarathi, 256 tokens": "`sarathi`, chunks of 256", SERVE: "`sarathi_serve`, 512 tokens"}
    parts = (("13B, two stages", "pipeline", "", "2"), ("13B, one GPU, 16 requests", "pipeline", "-one-gpu", "1"))
    parts += (("8B, two stages", "pipeline-8b", "", "2"),)
    rows = []
    for what, file, part, number in parts:
        real, virtual = (stored(f"h200-x2/{file}{kind}.json")["figures"][number] for kind in (part, "-simulated"))
        for policy, run in real.items():
            runs = (run, virtual[policy])
            rates = [f"{found['tokens_per_second']['median']:,.0f}" for found in runs]
            shares = [f"{found['bubble_share']:.1%}" if number == "2" else "" for found in runs]
            cells = (f"{what}, {names[policy]}", rates[0], shares[0], rates[1], shares[1])
            rows.append("".join(f"| {cell} " if cell else "| " for cell in cells) + "|")
    return " ".join(rows)


def errors_of_pipelines() -> str:
    """Of simulated pipelines, and of one GPU that serves the same requests."""
    errors, points = dict[str, list[float]](), []
    for file, part, number in (("pipeline", "", "2"), ("pipeline", "-one-gpu", "1"), ("pipeline-8b", "", "2")):
        real, virtual = (stored(f"h200-x2/{file}{kind}.json")["figures"][number] for kind in (part, "-simulated"))
        virtual = {policy: virtual[policy] for policy in real}
        rates = [
            {policy: run["tokens_per_second"]["median"] for policy, run in found.items()} for found in (real, virtual)
        ]
        assert [sorted(found, key=found.get) for found in rates[:1]] == [
            sorted(found, key=found.get) for found in rates[1:]
        ]  # type: ignore[arg-type]
        assert all(run["iterations"] == virtual[policy]["iterations"] for policy, run in real.items())
        errors.setdefault(file, []).extend(rates[1][policy] / rate - 1 for policy, rate in rates[0].items())
        points += [abs(run["bubble_share"] - virtual[policy]["bubble_share"]) for policy, run in real.items()]
    of_8b = f"within {max(map(abs, errors['pipeline-8b'])):.1%} for the 8B"
    within = f"within {max(map(abs, errors['pipeline'])):.1%} for the 13B, on one GPU too"
    return (
        f"the same ranking and bubbles within {max(points) * 100:.1f} points. Its throughput is {within}, and {of_8b}"
    )


def shared_decodes() -> str:
    [found] = stored("h200-x2/tensor-decode.json")["figures"]["2"].values()
    [share] = {f"{share:.1%}" for share in found["kernel_shares"]}
    return (
        f"Decodes of the 8B alone take {found['ms_per_decode']:.3f} ms; a kernel runs on each GPU {share} of the time."
    )


def ranks() -> str:
    """The whole table: measured and simulated throughput and iterations."""
    names = {"llama-13b, sarathi_serve, 384 tokens": "LLaMA-13B, `sarathi_serve`, 384 tokens"}
    names |= {"llama-3.1-8b, 256 + 2048": "Llama-3.1-8B, 256 + 2,048 tokens"}
    one, other, virtual = (
        stored(f"h200-x2/tensor-{kind}.json")["figures"]["2"] for kind in ("13b", "decode", "simulated")
    )
    real, rows = one | other, []
    for kind, text in names.items():
        rates = [f"{found[kind]['tokens_per_second']['median']:,.0f}" for found in (real, virtual)]
        times = [f"{found[kind]['ms_per_iteration']['median']:.2f} ms" for found in (real, virtual)]
        rows.append(f"| {text} | {rates[0]} | {times[0]} | {rates[1]} | {times[1]} |")
    return " ".join(rows)


def ranks_off() -> str:
    one, other, virtual = (
        stored(f"h200-x2/tensor-{kind}.json")["figures"]["2"] for kind in ("13b", "decode", "simulated")
    )
    large, small = (
        virtual[kind]["ms_per_iteration"]["median"] / run["ms_per_iteration"]["median"] - 1
        for kind, run in (one | other).items()
    )
    return f"Simulated iterations are {-large:.1%} too short for the 13B and {small:.1%} too long for the 8B."


def large_model() -> str:
    [(work, found)] = stored("h200-x2/tensor-70b.json")["figures"]["2"].items()
    assert work == "llama-2-70b, 1216 + 128" and {f"{share:.2%}" for share in found["kernel_shares"]} == {"99.94%"}
    return f"at contexts of 1,216 to 1,344 tokens takes {found['ms_per_decode']:.2f} ms ("


def large_model_simulated() -> str:
    [expected] = stored("h200-x2/tensor-70b-simulated.json")["figures"]["2"].values()
    return f"Simulation, which has no tables of this model, expects {expected['ms_per_decode']:.2f} ms."


def held_out() -> str:
    """Errors of the runs whose requests arrive over time, on all cards: with the profile, and at the speed of each card."""
    file = stored("h200/held_out.json")
    cases, told = file["cases"].items(), file["at_card_speed"]
    runs = [run for name, policies in cases if "queued" not in name for run in policies.values()]
    figures = {"TTFT": "TTFT", "TBT": "TBT", "TPOT": "TPOT", "end to end": "end-to-end latency"}
    names = {f"{name} mean": f"mean {text}" for name, text in figures.items()}
    names |= {f"{name} {part}": f"{part} of {text}" for name, text in figures.items() for part in ("P50", "P90", "P99")}
    rows = []
    for name in (f"{figure} {part}" for figure in figures for part in ("mean", "P50", "P90", "P99")):
        text = names[name]
        sizes, within = (
            [abs(run["error"][name]) for run in runs],
            sum(is_within(name, TARGETS[name], run) for run in runs),
        )
        first, last = ((median(sizes), max(sizes)), (told[name]["median"], told[name]["largest"]))
        cells = (f"{error:.1%}" for error in first), (str(within),), (f"{error:.1%}" for error in last)
        rows.append(f"| {text} | {' | '.join(cell for part in cells for cell in part)} |")
    head = "| | median | largest | runs within target | at the speed of the card: median | largest | |---|---:|---:|---:|---:|---:|"
    where = "([held_out.json](../results/h200/held_out.json), which has the queued ones, too):"
    return f"Errors of the {len(runs)} runs whose requests arrive over time {where} {head} {' '.join(rows)}"


def held_out_within() -> str:
    told = stored("h200/held_out.json")["at_card_speed"]
    names = ("TTFT mean", "TTFT P99", "TBT mean", "TPOT mean", "end to end mean")
    first, last, *means = (told[name]["runs"] - told[name]["missed"] for name in names)
    within = f"in {means[0]}, {means[1]} and {means[2]}"
    return (
        f"the mean TTFT is then within 3% in {first}, its P99 within 8% in {last}, and the means of TBT, TPOT and "
        f"end-to-end latency within 3% {within}"
    )


def ranked_groups() -> str:
    """The policies that one card served at the same load, from the highest throughput and from the lowest mean TTFT."""
    groups = [runs for runs in stored("h200/held_out.json")["cases"].values() if len(runs) > 1]
    for figure in ("throughput", "TTFT mean"):
        for runs in groups:
            measured, simulated = (
                sorted(runs, key=lambda policy: runs[policy][kind][figure]) for kind in ("measured", "simulated")
            )
            assert measured == simulated
    threes, twos = ([set(runs) for runs in groups if len(runs) == number] for number in (3, 2))
    assert (len(groups), len(threes)) == (4, 2) and twos == [{"orca", "sarathi_serve, 512 tokens"}] * 2
    return "there are only four such groups, two of three policies at 90% and `sarathi_serve` and `orca`, queued, on two cards"


def errors_by_card() -> str:
    cards = stored("h200/held_out.json")["cards"].items()
    return " ".join(
        f"| {card} | {found['with prompts']:+.1%} | {found['decodes alone']:+.1%} |" for card, found in cards
    )


TESTED = ("held", "same direction", "missed")


def outcomes(source: str = "", folder: str = "paper") -> Counter[str]:
    """Without those of `closure`, which judges the same claims again from other inputs."""
    paths = (ROOT / "results" / folder).glob("*.json")
    files = [json.loads(path.read_text()) for path in paths if path.stem != "closure"]
    found = [claim for file in files for claim in file.get("claims", [])]
    return Counter(claim["outcome"] for claim in found if source in ("", claim["source"]))


def claims() -> str:
    counts = outcomes()
    tested = sum(counts[outcome] for outcome in TESTED)
    return f"So {tested} independent claims were tested, and {counts['held']} held"


def claims_in_brief() -> str:
    counts = outcomes()
    tested = sum(counts[outcome] for outcome in TESTED)
    others = f"{counts['same direction']} held in direction only, {counts['missed']} were missed"
    first = f"of {tested} independent claims {counts['held']} held, {others}, and {counts['not comparable']} more could not be tested"
    own, newer = outcomes("ours"), outcomes(folder="paper/landscape")
    of_own, of_newer = (sum(found[outcome] for outcome in TESTED) for found in (own, newer))
    second = f"{of_own} of the {tested} are our own ablations' ({own['held']} held)"
    papers = f"of the papers' {tested - of_own} claims {counts['held'] - own['held']} held"
    return f"{first}. {second}; {papers}. Of the newer policies' papers {newer['held']} of {of_newer} held"


def one_number_for_all_gains() -> str:
    gains = [claim for claim in closure_claims() if claim.gain is not None]
    passed = sum(claim.holds(1.27) for claim in gains)
    return f"A simulator that answered 1.27 to everything would pass {passed} of the {len(gains)} claims of gains"


def vllm_in_turns() -> str:
    file = stored("h200/vllm.json")
    own, policy = (file["figures"][side] for side in ("vllm", "policy=vllm_v1 chunk=2048"))
    pairs = {work: (policy[work]["median"], own[work]["median"]) for work in own}
    few, many, mixed = (f"({policy / own - 1:+.1%})" for policy, own in pairs.values())
    few = "{:.2f} ms instead of {:.2f} ".format(*pairs["32 decodes"]) + few
    many = "{:.2f} ms instead of {:.2f} ".format(*pairs["256 decodes"]) + many
    mixed = "{:,.0f} tokens/s instead of {:,.0f} ".format(*pairs["mixed"]) + mixed
    decodes = f"takes {few} per output token of 32 requests at once and {many} of 256, their prompts included"
    return f"The policy {decodes}, and serves {mixed} of mixed requests ({stamp(file)})"


def vllm_host() -> str:
    file = stored("h200/vllm-host.json")
    (found,) = file["pairs"].values()

    def row(number: str, what: str) -> str:
        ratio, own, other = (found[number][what][name] for name in ("ratio", "vllm", "policy"))
        low, high = found[number][what]["interval"]
        times = f"{other['median']:.2f} ms instead of {own['median']:.2f}, {ratio['repeats']} passes"
        return f"| {number} | `vllm_v1` | {(low + high) / 2:.2f} [{low:.2f}, {high:.2f}] ({times}) |"

    few, alone, many = row("32", "milliseconds"), row("32", "schedule"), row("256", "milliseconds")
    return f"on its host ({stamp(file)}) {few} | the same, `schedule()` alone {alone} | the same, both calls {many}"


def vllm_host_moves() -> str:
    (found,) = stored("h200/vllm-host.json")["pairs"].values()
    return "by vLLM's own rule moved between {min:.2f} and {max:.2f} ms".format_map(found["32"]["milliseconds"]["vllm"])


def vllm_durations() -> str:
    files = [stored(f"h200/vllm-serving{kind}.json")["figures"]["vllm"] for kind in ("", "-high", "-long")]
    runs = [run["completed"] / run["request_throughput"] for file in files for run in file.values()]
    *most, last = (f"{seconds:.1f}" for seconds in runs)
    return f"the runs last {', '.join(most)} and {last} s"


def vllm_server() -> str:
    lines = []
    for label, run in stored("h200/vllm-simulated.json")["runs"].items():
        file, _, rest = label.partition(" ")
        load, _, side = rest.partition(": ")
        load += ", 14 s" if file == "vllm-serving-long" else ""
        cells = [
            f"{run[name]['measured'] * 1e3:.1f} / {run[name]['simulated'] * 1e3:.1f}"
            for name in ("TTFT mean", "TTFT P99", "TPOT mean", "TPOT P99")
        ]
        tokens = " / ".join(f"{run['throughput'][kind]:,.0f}" for kind in ("measured", "simulated"))
        lines.append(f"| {load} | `{side}` | {' | '.join(cells)} | {tokens} |")
    return " ".join(lines)


def vllm_simulated() -> str:
    file = stored("h200/vllm-simulated.json")
    each = (f"{name} {found['median']:.1%} (at most {found['largest']:.1%})" for name, found in file["errors"].items())
    return f"median errors of {len(file['runs'])} runs: {', '.join(each)} ({stamp(file)})"


def vllm_bias() -> str:
    runs = stored("h200/vllm-simulated.json")["runs"]
    late, few, slow = (
        [abs(run[name]["simulated"] / run[name]["measured"] - 1) for label, run in runs.items() if load in label]
        for name, load in (("TTFT mean", ""), ("TTFT mean", " 0.6:"), ("TPOT mean", ""))
    )
    assert all(run["TTFT mean"]["simulated"] < run["TTFT mean"]["measured"] for run in runs.values())
    assert all(run["TPOT mean"]["simulated"] > run["TPOT mean"]["measured"] for run in runs.values())
    ttft = f"by {min(late) * 100:.0f} to {max(late):.0%}, at load 0.6 by {min(few) * 100:.0f} to {max(few):.0%}"
    tpot = f"by {min(slow) * 100:.0f} to {max(slow):.0%}"
    return f"every mean TTFT is simulated too short, {ttft}, and every mean TPOT too long, {tpot}"


SENTENCES = {
    simulator_speed: "hardware-profiles",
    a_million_requests: "hardware-profiles",
    whole_process: "hardware-profiles",
    fidelity: "hardware-profiles",
    checks: "trust",
    plans: "policies",
    slow_card: "../README",
    options: "../README",
    one_session: "../README",
    mutants: "trust",
    drawn: "trust",
    asynchronous_loop: "asynchronous-loop",
    host_work: "asynchronous-loop",
    busy: "asynchronous-loop",
    long_runs: "asynchronous-loop",
    pipelines: "multi-gpu",
    ranks: "multi-gpu",
    errors_of_pipelines: "multi-gpu",
    shared_decodes: "multi-gpu",
    large_model: "multi-gpu",
    large_model_simulated: "multi-gpu",
    held_out: "hardware-profiles",
    held_out_within: "hardware-profiles",
    errors_by_card: "hardware-profiles",
    ranked_groups: "hardware-profiles",
    claims: "papers",
    claims_in_brief: "../README",
    one_number_for_all_gains: "papers",
    vllm_in_turns: "vllm",
    vllm_host: "vllm",
    vllm_host_moves: "vllm",
    vllm_server: "vllm",
    vllm_simulated: "vllm",
    vllm_durations: "vllm",
    vllm_bias: "vllm",
    ranks_off: "multi-gpu",
}


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.__name__)
def test_a_figure_in_a_sentence_is_that_of_the_results(sentence: Any) -> None:
    document = (ROOT / "docs" / f"{SENTENCES[sentence]}.md").read_text()
    assert sentence() in " ".join(document.split())
