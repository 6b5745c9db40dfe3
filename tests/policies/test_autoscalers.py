"""Autoscalers against examples computed by hand, also where the documentation's example differs from the code."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch import ConfigError, Limits
from cbatch.cluster import Phase, Role
from policies.autoscalers import Arrivals, Fixed, WVAv1, WVAv2

LIMITS = Limits(256, 8192, 4096)


def replica(used: int = 0, queue: int = 0, *, size: int = 100, phase: Phase = Phase.READY, **other: Any) -> Any:
    """A replica with KV blocks of one token. Prompts of 1,000 and outputs of 250 tokens have ended there."""
    ended = {"num_ended": 4, "ended_prompt_tokens": 4000, "ended_output_tokens": 1000}
    parts = {"pool": "", "price": None, "limits": LIMITS, "role": Role.BOTH, **ended, **other}
    return SimpleNamespace(phase=phase, num_blocks=size, block_size=1, num_waiting=queue, kv_use=used / size, **parts)


def view(*replicas: Any, now: float = 0.0, arrived: int = 0) -> Any:
    class View(list[Any]):
        pass

    shown: Any = View(replicas)
    shown.now, shown.num_arrived, shown.least = now, arrived, 1
    return shown


def closed(number: int, **other: Any) -> list[Any]:
    return [replica(phase=Phase.CLOSED, **other) for _ in range(number)]


@pytest.mark.parametrize(
    ("signals", "change"),
    [
        ([(0.65, 1), (0.75, 2)], 0),  # mean spare .10000000000000003 and 3.5; the documentation says up
        ([(0.70, 1), (0.75, 2)], 1),  # .075
        ([(0.85, 0), (0.50, 0)], 0),  # the saturated one does not count; a single one cannot go
        ([(0.80, 0), (0.10, 5)], 1),  # both are saturated: no spare
        ([(0.10, 3), (0.10, 2)], 1),  # 2.5 places in queues
        ([(0.20, 0)] * 4, -1),  # after one fewer .2667: spare .533
        ([(0.36, 0)] * 2, 0),  # after one fewer .72: spare .08
    ],
)
def test_wva_v1_decides_as_its_code(signals: list[tuple[float, int]], change: int) -> None:
    assert WVAv1().decide(signals) == change


def test_wva_v1_takes_the_cheapest_and_drops_the_dearest() -> None:
    """Nothing is decided while the numbers are not those that were wanted, or a replica starts."""
    full, idle = {"used": 75, "queue": 2}, {"used": 5}
    pools: dict[str, dict[str, Any]] = {
        name: {"pool": name, "price": price} for name, price in (("a", 4.0), ("b", 3.0), ("c", 3.0))
    }

    def shown(now: float, number: dict[str, int], load: dict[str, int], **starting: int) -> Any:
        parts = [replica(**load, **pools[name]) for name, many in number.items() for _ in range(many)]
        parts += [replica(phase=Phase.STARTING, **pools[name]) for name in starting]
        return view(*parts, *(part for name in pools for part in closed(2, **pools[name])), now=now)

    scaler = WVAv1(window=0.0)
    one = {"a": 1, "b": 1, "c": 1}
    assert scaler.wanted(shown(0.0, {}, full)) == one
    assert scaler.wanted(shown(30.0, one, full)) == {**one, "b": 2}
    assert scaler.wanted(shown(60.0, one, idle)) == {**one, "b": 2}, "one is not there yet"
    assert scaler.wanted(shown(90.0, one, idle, b=1)) == {**one, "b": 2}, "it starts"
    assert scaler.wanted(shown(100.0, {**one, "b": 2}, idle)) == one, "the dearest that has more than one"
    assert scaler.wanted(shown(110.0, one, full)) == one, "less than 30 s later"
    alone = WVAv1(window=0.0)
    assert alone.wanted(view(replica(**full))) == {"": 1}
    assert alone.wanted(view(replica(**full), now=30.0)) == {"": 2}, "more than there are, which the run reports"
    assert alone.wanted(view(replica(**idle), now=60.0)) == {"": 1}, "and decides on"


def test_wva_v1_reads_the_largest_values_of_the_window() -> None:
    """A queue of four seconds at 40 s still counts at 60 s, not at 130 s."""
    scaler, two = WVAv1(window=60.0), closed(1)
    assert scaler.wanted(view(replica(), *two)) == {"": 1}
    assert scaler.wanted(view(replica(queue=4), *two, now=20.0)) == {"": 1}, "decisions begin at 30 s"
    assert scaler.wanted(view(replica(), *two, now=60.0)) == {"": 2}
    late = WVAv1(window=60.0)
    for now, queue in ((0.0, 0), (20.0, 4), (100.0, 0)):
        wanted = late.wanted(view(replica(queue=queue), *two, now=now))
    assert wanted == {"": 1}


def wva_v2(used: int, queue: int, number: int = 2) -> tuple[WVAv2, dict[str, int]]:
    scaler = WVAv2(window=0.0)
    parts = [replica(used, queue, size=461_240) for _ in range(number)]
    scaler.wanted(view(*closed(number)))
    return scaler, scaler.wanted(view(*parts, *closed(2, size=461_240), now=30.0))


def test_wva_v2_holds_with_less_than_a_replica_to_spare() -> None:
    """k2 = min(1638.4, 256) x 1125 = 288,000 < k1; demand 400,000 of 576,000: spare 4,571.4, required 0."""
    scaler, wanted = wva_v2(200_000, 0)
    parts = [replica(200_000, 0, size=461_240) for _ in range(2)]
    assert scaler._capacity == {"": 288_000.0} and wanted == {"": 2}
    assert scaler.balance(view(*parts), 400_000) == (0.0, pytest.approx(4_571.43, abs=0.01))


def test_wva_v2_adds_a_replica_for_what_waits() -> None:
    """30 waiting each make k2 the 200,000 in use; demand 460,000: required 541,176 - 400,000 = 141,176, one replica."""
    scaler, wanted = wva_v2(200_000, 30)
    parts = [replica(200_000, 30, size=461_240) for _ in range(2)]
    assert scaler._capacity == {"": 200_000.0} and wanted == {"": 3}
    assert scaler.balance(view(*parts), 460_000) == (pytest.approx(141_176.47, abs=0.01), 0.0)
    starting = replica(size=461_240, phase=Phase.STARTING)
    assert scaler.balance(view(*parts, starting), 460_000)[0] == 0.0, "what starts counts"
    assert scaler.wanted(view(*parts, now=60.0)) == {"": 3}, "more than there are, which the run reports"


def test_wva_v2_gives_up_whole_replicas() -> None:
    """Four with 50,000 each: 1,152,000 - 285,714 spare, three replicas of 288,000; k2 of a queue stays known as its mean."""
    assert wva_v2(50_000, 0, 4)[1] == {"": 1}
    scaler, _ = wva_v2(200_000, 30)
    scaler.wanted(view(*(replica(50_000, 0, size=461_240) for _ in range(2)), now=60.0))
    assert scaler._capacity == {"": 200_000.0}


def test_wva_v2_buys_by_capacity_and_sells_by_price() -> None:
    """Pool b has half the dollars per capacity; of the two it is the dearer one."""
    parts = {"a": {"pool": "a", "price": 3.0, "size": 100_000}, "b": {"pool": "b", "price": 4.0, "size": 300_000}}
    scaler = WVAv2(window=0.0)
    scaler.wanted(view(*closed(1, pool="a"), *closed(1, pool="b")))
    busy = [replica(70_000, 0, **parts["a"]), replica(220_000, 0, **parts["b"])]
    spare = [part for name in parts for part in closed(2, **parts[name])]
    assert scaler.wanted(view(*busy, *spare, now=30.0)) == {"a": 1, "b": 2}
    idle = [replica(1_000, 0, **parts[name]) for name in ("a", "a", "b", "b")]
    assert scaler.wanted(view(*idle, now=60.0)) == {"a": 1, "b": 1}


def test_arrivals_over_capacity_round_up(tmp_path: Path) -> None:
    """Capacity 2.5 per s: 0 to 60 s 100 requests, 1.67 per s; 60 to 120 s 300, 5 per s: exactly two; 301 are three."""
    path = tmp_path / "capacity.json"
    path.write_text(json.dumps({"capacity": {"requests_per_second": 2.5}}))
    for capacity in (2.5, str(path)):
        scaler, many = Arrivals(capacity), closed(5)
        seen = [
            scaler.wanted(view(*many, now=now, arrived=number))
            for now, number in ((0.0, 0), (60.0, 100), (120.0, 400), (180.0, 701))
        ]
        assert [answer[""] for answer in seen] == [0, 1, 2, 3]
    dear, cheap = closed(3, pool="a", price=4.0), closed(2, pool="b", price=2.0)
    scaler = Arrivals(1.0)
    scaler.wanted(view(*dear, *cheap))
    assert scaler.wanted(view(*dear, *cheap, now=60.0, arrived=290)) == {"b": 2, "a": 3}
    assert scaler.wanted(view(*dear, *cheap, now=120.0, arrived=290 + 371)) == {"b": 2, "a": 5}, "2 more than there are"
    scaler = Arrivals(0.1)
    scaler.wanted(view(*closed(20)))
    assert scaler.wanted(view(*closed(20), now=60.0, arrived=66)) == {"": 11}, "66 / 60 / 0.1, a float above 11"
    path.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"autoscale.capacity=.*capacity.json: has no capacity \(KeyError: 'capacity'\)"
    ):
        Arrivals(str(path))
    path.unlink()
    with pytest.raises(
        ConfigError, match=r"capacity.json: no such file; give requests per second, or the capacity.json"
    ):
        Arrivals(str(path))


def test_a_request_needs_a_prefiller_and_a_decoder() -> None:
    """1 per s of each, 2.5 per s arrive: three of each, of decoders the two cheap ones first."""
    pools = [*closed(4, pool="p", role=Role.PREFILL), *closed(4, pool="d", price=4.0, role=Role.DECODE)]
    pools += closed(2, pool="e", price=2.0, role=Role.DECODE)
    scaler = Arrivals(1.0)
    scaler.wanted(view(*pools))
    assert scaler.wanted(view(*pools, now=60.0, arrived=150)) == {"p": 3, "e": 2, "d": 1}


def test_each_pool_may_have_a_capacity_of_its_own(tmp_path: Path) -> None:
    """2.5 per s arrive: of prefillers, 2 per s each, two. A request costs $2 at `d` and $1 at `e`, which has one replica of 1.5 per s: one more of `d`."""
    (path := tmp_path / "capacity.json").write_text(json.dumps({"capacity": {"requests_per_second": 1.5}}))
    pools = [*closed(4, pool="p", role=Role.PREFILL), *closed(4, pool="d", price=2.0, role=Role.DECODE)]
    pools += closed(1, pool="e", price=1.5, role=Role.DECODE)
    scaler = Arrivals({"p": 2, "d": 1.0, "e": str(path)})
    scaler.wanted(view(*pools))
    assert scaler.wanted(view(*pools, now=60.0, arrived=150)) == {"p": 2, "e": 1, "d": 1}
    with pytest.raises(ConfigError, match=r"autoscale.capacity names the pools d, p, and backend.pools d, e, p; give"):
        Arrivals({"p": 2, "d": 1.0}).wanted(view(*pools))
    with pytest.raises(ConfigError, match=r"need capacity=.* above 0"):
        Arrivals({"p": 2, "d": 0.0})


@pytest.mark.parametrize("scaler", [WVAv1(), WVAv2()])
def test_wva_refuses_roles(scaler: Any) -> None:
    with pytest.raises(ConfigError, match=r"does not tell replicas that prefill from those that decode; give arrivals"):
        scaler.wanted(view(*closed(2, pool="p", role=Role.PREFILL), *closed(2, pool="d", role=Role.DECODE)))


def test_fixed_wants_a_number_or_all() -> None:
    assert Fixed(2).wanted(view(*closed(3))) == {"": 2} and Fixed().wanted(view(*closed(3))) == {"": 3}
    with pytest.raises(ConfigError, match="replicas=0 of at least 1"):
        Fixed(0)
