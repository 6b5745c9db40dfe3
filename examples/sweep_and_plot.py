"""Sweeps two policies over the request rate and plots their latencies: `python examples/sweep_and_plot.py` writes latency.png."""

import matplotlib.pyplot as plt
import pandas as pd

from experiments.api import simulate

POLICIES = ("orca", "sarathi_serve")
RATES = (10, 20, 30)  # requests per second


def sweep() -> pd.DataFrame:
    """Returns a row for each run. Equal seeds give every policy the same requests."""
    rows = []
    for policy in POLICIES:
        for rate in RATES:
            summary = simulate(policy, "open_loop", rate=rate, requests=100, batch=64, seed=1).summary
            rows.append((policy, rate, summary["ttft_seconds"]["p90"], 1e3 * summary["tbt_seconds"]["p99"]))
    return pd.DataFrame(rows, columns=["policy", "requests/s", "TTFT P90 [s]", "TBT P99 [ms]"])


def main() -> None:
    runs = sweep()
    print(runs.to_string(index=False))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for panel, latency in zip(axes, ("TTFT P90 [s]", "TBT P99 [ms]"), strict=True):
        runs.pivot(index="requests/s", columns="policy", values=latency).plot(ax=panel, marker="o", ylabel=latency)
    figure.savefig("latency.png")


if __name__ == "__main__":
    main()
