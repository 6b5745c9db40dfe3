"""A server serves one set of requests after another, each from a clock at 0."""

import gc

from schedules import UnitCost
from tiny_models import LLAMA

from cbatch import Limits, Request, Server
from cbatch.kv import KVSize
from cbatch.runtime import cpu
from cbatch.runtime.options import Options
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile_file import load_profile
from experiments.setup.presets import load_spec
from policies.orca import Orca


def test_a_simulated_server_serves_the_same_requests_twice_alike() -> None:
    """Arrival times count from the start of each run, and the GPU's clock is rested."""
    cost = ProfileCost(load_profile("h200"), load_spec("llama-3.1-8b"))
    server = Server(SimExecutor(cost, 1e-3), Limits(4, 2048, 1024), cost, KVSize(200, 16))

    def serve() -> list[tuple[float, float | None]]:
        requests = [Request(id_, 300, 20, arrival_time=0.05 * id_) for id_ in range(8)]
        steps = server.serve(Orca(), requests).steps
        return [(step.started, step.ended) for step in steps] + [(r.arrival_time, r.finished_at) for r in requests]

    first, second = serve(), serve()
    assert first == second
    assert first[0][0] < 0.05


def test_real_requests_arrive_when_they_say_in_every_run_and_no_search_of_all_objects_stops_them() -> None:
    server = Server(
        cpu.build(LLAMA, limits := Limits(2, 32, 16), kv := KVSize(16, 4), Options()), limits, UnitCost(), kv
    )
    spared: list[int] = []  # objects that a collection would pass over
    try:
        for _ in range(2):
            late = Request(0, 4, 2, arrival_time=0.3, prompt=[1, 2, 3, 4])
            server.serve(Orca(), [late], on_step=lambda engine: spared.append(gc.get_freeze_count()))
            assert late.admitted_at is not None and late.admitted_at >= 0.3
            assert not gc.get_freeze_count()
    finally:
        server.close()
    assert min(spared) > 10_000
