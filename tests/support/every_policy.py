"""Every policy, in all of its variants, each made for a number of tokens of an iteration or chunk."""

from collections.abc import Callable

from cbatch import Policy
from policies.chunking import Filling, Fixed, PDAware, Slack, TileAligned
from policies.continuum import Continuum
from policies.dlpm import DLPM
from policies.infercept import InferCept
from policies.joint import Joint
from policies.justitia import Justitia
from policies.lars import LARS
from policies.length_order import LengthOrder
from policies.longest_first import LongestFirst
from policies.ltr import LTR
from policies.mc_sf import McSf
from policies.mlfq import MLFQ
from policies.orca import Orca
from policies.past_future import PastFuture
from policies.pauses import Pauses, TimeToLive
from policies.plas import Atlas, Plas
from policies.predictors import Bins, Noisy, Oracle, Predictor
from policies.prefill_first import PrefillFirst
from policies.prefix_order import PrefixOrder
from policies.priority import Priority
from policies.program_admission import ProgramAdmission
from policies.qoserve import QoServe
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe
from policies.session_affinity import SessionAffinity
from policies.slai import Slai
from policies.tgi import Tgi
from policies.trail import Trail
from policies.vllm_v1 import VllmV1
from policies.vtc import VTC

EVERY_POLICY: dict[str, Callable[[int], Policy]] = {
    "request_level": lambda chunk: RequestLevel(),
    "orca": lambda chunk: Orca(),
    "prefill_first": lambda chunk: PrefillFirst(),
    "sarathi": lambda chunk: Sarathi(Fixed(chunk)),
    "sarathi_tile_aligned": lambda chunk: Sarathi(TileAligned(8 + chunk)),
    "sarathi_pd_aware": lambda chunk: Sarathi(PDAware()),
    "sarathi_serve": lambda chunk: SarathiServe(Fixed(chunk)),
    "sarathi_serve_filling": lambda chunk: SarathiServe(Filling(16 + chunk, 16, share=0.7)),
    "vllm_v1": lambda chunk: VllmV1(8 + chunk),
    "vllm_v1_lcf": lambda chunk: VllmV1(8 + chunk, victim="lcf"),
    "vllm_v1_cost": lambda chunk: VllmV1(8 + chunk, long_prefill=5, victim="cost"),
    "priority": lambda chunk: Priority(8 + chunk, boost=3),
    "sjf": lambda chunk: LengthOrder(Fixed(chunk), Noisy(mae=3.0)),
    "spf": lambda chunk: LengthOrder(Fixed(chunk), Predictor(), "spf"),
    "sjf_total": lambda chunk: LengthOrder(Fixed(chunk), Bins(4, 16, refresh=2, error=0.3), "sjf_total"),
    "longest_first": lambda chunk: LongestFirst(Fixed(chunk)),
    "hrrn": lambda chunk: LengthOrder(Fixed(chunk), Predictor(), "hrrn"),
    "lpm": lambda chunk: PrefixOrder(Fixed(chunk)),
    "dfs_weight": lambda chunk: PrefixOrder(Fixed(chunk), "dfs_weight"),
    "spf_uncached": lambda chunk: PrefixOrder(Fixed(chunk), "spf"),
    "hrrn_uncached": lambda chunk: PrefixOrder(Fixed(chunk), "hrrn"),
    "dlpm": lambda chunk: DLPM(Fixed(chunk), quantum=20),
    "trail": lambda chunk: Trail(Fixed(chunk), Bins(4, 16, refresh=2)),
    "srpt": lambda chunk: Trail(Fixed(chunk), Oracle(), c=float("inf")),
    "lars": lambda chunk: LARS(target=0.003 + 1e-4 * chunk, ttft=0.05),
    "ltr": lambda chunk: LTR(Noisy(mae=3.0), starvation=5, period=2),
    "mlfq": lambda chunk: MLFQ(quantum=0.003, promote_after=0.05),
    "plas": lambda chunk: Plas(Fixed(chunk), [0.003, 0.01], beta=2.0),
    "atlas": lambda chunk: Atlas(Fixed(chunk), [0.002], beta=4.0),
    "continuum": lambda chunk: Continuum(Fixed(chunk), TimeToLive(Pauses(), 0.02, worth=1.0)),
    "infercept": lambda chunk: InferCept(Fixed(chunk), Pauses(), 8, 0.001, 1e-4),
    "infercept_paper": lambda chunk: InferCept(Fixed(chunk), Pauses(), paper=True),
    "aimd": lambda chunk: ProgramAdmission(Fixed(chunk), "aimd", 0.02, width=2),
    "thunder": lambda chunk: ProgramAdmission(Fixed(chunk), "thunder", 0.02, 0.6),
    "joint": lambda chunk: Joint(tbt=0.004, most=chunk),
    "justitia": lambda chunk: Justitia(Fixed(chunk), Oracle()),
    "session_affinity": lambda chunk: SessionAffinity(8 + chunk, patience=0.05),
    "mc_sf": lambda chunk: McSf(Noisy(share=0.5)),
    "mc_benchmark": lambda chunk: McSf(Oracle(), "arrival"),
    "past_future": lambda chunk: PastFuture(window=4),
    "past_future_aggressive": lambda chunk: PastFuture("aggressive"),
    "qoserve": lambda chunk: QoServe(Fixed(chunk), Noisy(share=0.5)),
    "qoserve_slack": lambda chunk: QoServe(Slack(), Oracle(), "srpf"),
    "tgi": lambda chunk: Tgi(0.6, 8 + chunk, None, 3),
    "slai": lambda chunk: Slai(8 + chunk, tbt=0.02),
    "vtc": lambda chunk: VTC(Predictor()),
    "vtc_mdrr": lambda chunk: VTC(Predictor(), order="mdrr", quantum=10),
    "vtc_predict": lambda chunk: VTC(Noisy(share=0.5), predict=True, charge_first=False),
}
