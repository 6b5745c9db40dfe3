"""Every documented form of a key is accepted from the command line, where a range is a list."""

import pytest

from experiments.settings.compose import compose_run

OPEN, CLOSED = "workload=open_loop", "workload=closed"
SIM, TRACE = "backend=sim", "workload=azure_conv workload.path=trace.csv"
FORMS = {
    "chunk": ["256", "1e3", "policy=sarathi chunk=auto"],
    "batch": ["8", "auto"],
    "max_running": ["auto", "20"],
    "price": ["null", "2", "2.5"],
    "kv_tokens": ["auto", "200000"],
    "block_size": ["auto", "16"],
    "max_tokens": ["auto", "512"],
    "prefix_cache": ["true", "on", "off"],
    "metrics.client_weights": ["null", "{gold:2}", "{gold:2.0}"],
    "progress": ["on", "off", "auto", "true"],
    f"{CLOSED} workload.stagger": ["0", "even", "3"],
    f"{CLOSED} workload.num_requests": ["null", "12"],
    f"{CLOSED} workload.max_new_tokens": ["exact", "64"],
    f"{CLOSED} workload.tiers": ["null", "{gold:{share:0.2,priority:1,slo:{ttft:0.5}},rest:{share:0.8}}"],
    f"{CLOSED} +workload.slo.ttft": ["1", "0.5"],
    f"{CLOSED} workload.slo": ["null", "{ttft:1,tbt:0.1,total:30}", "{tbt:0.1}"],
    f"{CLOSED} workload.prediction": ["null", "{error:0.3}", "{error:0}"],
    f"{CLOSED} workload.timeout": ["null", "3", "0.5"],
    f"{CLOSED} workload.pad_outputs": ["null", "8"],
    f"{OPEN} workload.load": ["null", "0.5"],
    "workload=drift workload.lengths.pd_ratio": ["5", "[50,5,14]", "[0.5]"],
    "workload=chat workload.turns": ["8", "[2,12]", "[3,3]"],
    "workload=chat workload.sessions": ["null", "4"],
    "workload=chat workload.max_length": ["null", "4096"],
    "workload=agents workload.path=agents.jsonl workload.max_pause": ["null", "5", "0.5"],
    "workload=agents workload.path=agents.jsonl workload.arrivals": [
        "null",
        "{_target_:experiments.workloads.GammaArrivals,rate:0.1} workload.sessions=null",
    ],
    "workload=clients workload.clients.ann.prompt_tokens": ["256", "[16,512]"],
    "workload=clients +workload.clients.ann.end_rate": ["null", "3"],
    "workload=servegen workload.path=a.csv workload.dataset=b.jsonl workload.clients": ["null", "[1,2]"],
    "workload=servegen workload.path=a.csv workload.dataset=b.jsonl workload.rate": ["null", "3"],
    f"{TRACE} workload.columns": ["null", "{client:user_id}"],
    "policy=vtc policy.rpm": ["null", "20"],
    "policy=plas policy.thresholds": ["[2,8]", "[0.5]"],
    "policy=plas policy.beta": ["10", ".inf"],
    "policy=ltr policy.starvation": ["200", ".inf"],
    "policy=past_future policy.history": ["[]", "[100,200]"],
    "policy=slai policy.offset": ["null", "5"],
    "policy=prefix_order prefix_cache=true policy.in_batch": ["null", "true"],
    "policy=vllm_v1 policy.version": ["0.22.1", "0.33.0"],
    f"{SIM} backend.host_seconds": ["auto", "0", "0.01"],
    f"{SIM} backend.pools": ["null", "{large:{replicas:2,batch:64},small:{kv_tokens:20000}}"],
    f"{SIM} backend.router": ["least_loaded", "lmetric"],
    "backend=cpu model=tiny backend.pipeline_stages=2 backend.layers": ["auto", "[1,1]"],
}
CASES = [f"{key}={form}" for key, forms in FORMS.items() for form in forms]


@pytest.mark.parametrize("words", CASES)
def test_each_documented_form_is_accepted(words: str) -> None:
    assert compose_run(*words.split()).model
