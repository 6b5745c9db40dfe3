"""Features that a policy, an eviction or a router depends on and a run lacks; `experiments.report.notes` has a text for each."""

from collections.abc import Sequence

from cbatch import ConfigError
from cbatch.cluster import Cluster, RoundRobin
from cbatch.policy import name_of
from cbatch.validation import nearest
from experiments.report.notes import LACKS
from experiments.setup.assemble import Run


def lacks_of(run: Run) -> list[str]:
    """Returns what the policy, the eviction and the router depend on, and the run does not have. Raises ConfigError for a bad `depends_on`."""
    settings, engine = run.settings, run.engine.engines[0]
    routers = settings.backend.router, *settings.backend.routers.values()
    present = {
        *run.facts.stated,
        *["prefix_cache"] * settings.prefix_cache,
        *["drafts"] * any(bool(each.state.drafts.counts[1:].any()) for each in run.engine.engines),
        *["hidden_lengths"] * (not run.facts.lengths_known),
        *["places"] * any(setup.limits.max_running > setup.limits.max_batch for setup in run.setups),
        *["replicas"] * (settings.backend.replicas > 1),
        *["reports"] * (settings.backend.replicas > 1 and any(type(router) is not RoundRobin for router in routers)),
        *["between_nodes"] * any("between_nodes" in setup.cost.origins() for setup in run.setups),
        *["future"] * (len(engine.arrivals.known) == run.num_requests),
    }
    cache = engine.state.cache
    needed = [*["replicas"] * (type(routers[0]) is not RoundRobin), *["reports"] * (settings.backend.staleness > 0)]
    needed += ["drafts"] * (settings.drafter.max_drafts > 0 and "drafting" not in settings.policy.section)
    needed += ["between_nodes"] * (getattr(settings.backend, "network", None) is not None)
    if isinstance(run.engine, Cluster) and run.engine.fleet is not None and run.engine.fleet.is_cut:
        needed.append("more_replicas")
    if any(each.state.drafts.asked > each.state.drafts.most for each in run.engine.engines):
        needed.append("max_drafts" if settings.drafter.max_drafts else "drafter")
    for part in (engine.policy, *routers, cache and cache.pool.eviction):
        needed += _depends_on(part)
    return [name for name in dict.fromkeys(needed) if name not in present]


def _depends_on(part: object) -> Sequence[str]:
    """Returns `depends_on` of a policy, router or eviction. Raises ConfigError if it is not a tuple or list of known names."""
    names = getattr(part, "__dict__", {}).get("depends_on", getattr(type(part), "depends_on", ()))
    if not isinstance(names, tuple | list):
        problem = f"depends_on is a {type(names).__name__}"
        raise ConfigError(f'{name_of(part)}: {problem}; make it a tuple, as in ("clients",)')
    if unknown := [name for name in names if name not in LACKS]:
        raise ConfigError(f"{name_of(part)}: depends_on names {unknown[0]!r}; {nearest(str(unknown[0]), LACKS)}")
    return names
