"""The profile a6000-llama-13b, made from numbers printed in the SARATHI paper (arXiv 2308.16369) and nothing else.

    python -m reproduction.papers a6000        writes cbatch/sim/profiles/a6000-llama-13b.json

The paper prints times of single iterations (Table 2, Fig 7, Fig 4a, Fig 13). None of its end results - throughput,
speedup, the position of a peak - is an input: the profile is to predict those. How the printed numbers are read:

* Matrix products step with tiles of 128 tokens: within a tile every size costs what the full tile costs (Fig 7: 256 to
  257 tokens, +32%). Up to 4 tokens cost the same; from there to the first full tile the time rises linearly.
* Fig 4a counts the matrix products of a layer: with attention included, decodes could not come near its peak at B =
  256.
* The time of 256 tokens in Fig 7 beyond those products and attention is "other", in proportion to tokens, like norms,
  activations and residual sums. That is 5% of an iteration, where Fig 3 says below 5%.
* Attention of a chunk is bound by arithmetic or by reading its context, whichever takes longer: a whole prompt by
  arithmetic (Table 2), chunks of 64, three times slower (Fig 13), by reading. A decode reads its context at the rate of
  Table 2. A mixed iteration adds what Table 2's 1,021 + 3 tokens cost beyond the sum of their parts.
* The paper prints no times of embedding and output head; they are part of "other".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from cbatch import ModelSpec
from cbatch.sim import PROFILES
from cbatch.sim.profile_file import make_profile, profile_text
from experiments.setup.presets import load_spec
from experiments.store.provenance import today, write_text
from reproduction.papers import quantities
from reproduction.papers.claims import Claim, Verdict, check, read_claims
from reproduction.papers.machines import Machines

NAME, MODEL = "a6000-llama-13b", "nanogpt-13b"

LAYERS, TILE = 40, 128
PREFILL_TOKENS, PREFILL_LINEAR, PREFILL_ATTENTION = 1024, 224.8, 10.0  # Table 2, prefill-only; ms
DECODES, DECODE_CONTEXT, DECODE_LINEAR, DECODE_ATTENTION = 4, 1024, 44.28, 5.68  # Table 2, decode-only; ms
MIXED_CHUNK, MIXED_DECODES, MIXED_ATTENTION = 1021, 3, 15.2  # Table 2, decode-maximal; ms
ITERATION = {128: 55.0, 256: 69.8, 257: 92.33}  # Fig 7: tokens: ms
PEAK, BELOW_PEAK_AT_256 = 180.0, 0.125  # Fig 4a: tokens/ms of one layer, reached from 512 tokens on
SMALL_CHUNK, SMALL_CHUNK_ATTENTION = 64, 3.0  # Fig 13: attention of a 1,024-token prompt, relative to the whole prompt

MS_PER_SCORE = PREFILL_ATTENTION / (PREFILL_TOKENS * (PREFILL_TOKENS + 1) / 2)
MS_PER_DECODE_CONTEXT = DECODE_ATTENTION / (DECODES * DECODE_CONTEXT)
MS_PER_CHUNK_CONTEXT = (
    SMALL_CHUNK_ATTENTION * PREFILL_ATTENTION / sum(range(SMALL_CHUNK, PREFILL_TOKENS + 1, SMALL_CHUNK))
)
"""Milliseconds per token of context that a chunk reads, where reading is the bound: chunks of 64 of one prompt."""
MS = 1e-3
LONGEST = 4096


def attention_ms(tokens: int) -> float:
    """Attention of a prompt's first chunk in all layers, in milliseconds."""
    return max(tokens * (tokens + 1) / 2 * MS_PER_SCORE, tokens * MS_PER_CHUNK_CONTEXT)


MIXED_MS = MIXED_ATTENTION - attention_ms(MIXED_CHUNK) - MIXED_DECODES * DECODE_CONTEXT * MS_PER_DECODE_CONTEXT
"""Milliseconds of a mixed iteration beyond the attention of its chunk and of its decodes."""
LINEAR_AT_256 = LAYERS * 256 / (PEAK * (1 - BELOW_PEAK_AT_256))
OTHER_MS_PER_TOKEN = (ITERATION[256] - LINEAR_AT_256 - attention_ms(256)) / 256


def linear_of_iteration(tokens: int) -> float:
    """Milliseconds of the matrix products in an iteration of Fig 7."""
    return ITERATION[tokens] - attention_ms(tokens) - OTHER_MS_PER_TOKEN * tokens


def linear_by_tile() -> dict[int, float]:
    """Milliseconds of the matrix products at full tiles; proportional beyond 1,024 tokens."""
    at_512 = LAYERS * 512 / PEAK
    tops = {128: linear_of_iteration(128), 256: LINEAR_AT_256, 384: linear_of_iteration(257), 512: at_512}
    for tokens in (640, 768, 896):
        tops[tokens] = at_512 + (PREFILL_LINEAR - at_512) * (tokens - 512) / (PREFILL_TOKENS - 512)
    tops |= {tokens: PREFILL_LINEAR * tokens / PREFILL_TOKENS for tokens in range(PREFILL_TOKENS, LONGEST + 1, TILE)}
    return tops


COPIES = {
    "from": "assumed: 85% of the 32 GB/s of PCIe 4.0 x16 in each direction, by the card's data sheet, and 10 us per copy",
    "bytes": [100_000, 1_000_000_000],
    "seconds": [1.368e-05, 0.03677],
}
"""Between the card's memory and the host's."""


def profile(compared: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the content of the profile's file, see `cbatch.sim.profile_file`. compared: the error of its predictions."""
    spec = load_spec(MODEL)
    layer_bytes = spec.weight_bytes - 2 * 2 * spec.vocab_size * spec.hidden_size
    return {
        "name": NAME,
        "hardware": "NVIDIA RTX A6000, 48 GB",
        "source": "derived from printed numbers of SARATHI (arXiv 2308.16369): Table 2, Figs 4a, 7 and 13; "
        "made by python -m reproduction.papers a6000",
        "compared": {loop: {"models": [spec.name], "gpus": 1, **compared} for loop in ("sync", "async")}
        if compared
        else {},
        "memory_bytes": 48e9,
        "peak": {
            "from": "assumed: data sheet of the RTX A6000, dense",
            "flops_per_second": 154.8e12,
            "bandwidth_bytes_per_second": 768e9,
        },
        "ceilings": {
            "from": "derived from Table 2: weights read in 44.28 ms; 1,024 tokens computed in 224.8 ms",
            "bandwidth_bytes_per_second": _round(layer_bytes / (DECODE_LINEAR * MS)),
            "flops_per_second": _round(layer_bytes * PREFILL_TOKENS / (PREFILL_LINEAR * MS)),
            "tile": TILE,
            "flops_per_second_by_dtype": {
                "from": "assumed: data sheet of the RTX A6000, float32 without TF32",
                "float32": 38.7e12,
                "float64": 0.605e12,
            },
        },
        "attention": _attention(spec),
        "links": dict.fromkeys(("to_host", "from_host"), COPIES),
        "models": {spec.name: {"num_layers": LAYERS, "shape": spec.shape, "tensor_parallel": {"1": _tables()}}},
    }


def _attention(spec: ModelSpec) -> dict[str, Any]:
    kv_bytes = spec.kv_bytes_per_token
    flops_per_score = 4 * LAYERS * spec.num_heads * spec.head_dim
    return {
        "from": "derived from Table 2: 4 decodes at 1,024 in 5.68 ms, a prompt of 1,024 in 10 ms, 1,021 + 3 in "
        "15.2 ms; Fig 13: a prompt in chunks of 64 takes 3 times as long",
        "bandwidth_bytes_per_second": _round(kv_bytes / (MS_PER_DECODE_CONTEXT * MS)),
        "chunk_bandwidth_bytes_per_second": _round(kv_bytes / (MS_PER_CHUNK_CONTEXT * MS)),
        "flops_per_second": _round(flops_per_score / (MS_PER_SCORE * MS)),
        "mixed_seconds": _round(MIXED_MS * MS / LAYERS),
    }


def _tables() -> dict[str, Any]:
    linear = {1: DECODE_LINEAR, DECODES: DECODE_LINEAR}
    for tokens, ms in linear_by_tile().items():
        linear |= ({tokens - TILE + 1: ms} if tokens > TILE else {}) | {tokens: ms}
    return {
        "linear": {
            "from": "derived: 44.28 ms at 4: Table 2. 128 and 257 (= 384): Fig 7 less attention and other. 256: Fig "
            "4a, 12.5% below 180 tokens/ms a layer. 512: Fig 4a, 180 tokens/ms. 1,024: Table 2; evenly between, in "
            "proportion beyond. Steps of 128: Fig 7",
            "tokens": list(linear),
            "seconds": [_round(ms * MS) for ms in linear.values()],
        },
        "other": {
            "from": "derived from Fig 7 at 256 tokens (69.8 ms) less Fig 4a's products and attention, for each token",
            "tokens": [1, LONGEST],
            "seconds": [_round(tokens * OTHER_MS_PER_TOKEN * MS) for tokens in (1, LONGEST)],
        },
        "embedding": {"from": "derived: within other", "tokens": [LONGEST], "seconds": [0.0]},
        "head": {"from": "derived: within other", "requests": [LONGEST], "seconds": [0.0]},
    }


def main(folder: str = str(PROFILES)) -> None:
    """Writes the profile with the error of the gains that it predicts."""
    path = Path(folder) / f"{NAME}.json"
    write_text(path, profile_text(make_profile(profile())))
    verdicts = list(check(end_results(), Machines(a6000=str(path)), quantities, pd.DataFrame()))
    write_text(path, profile_text(make_profile(profile(error_of_gains(verdicts)))))
    print(f"written: {path}")


def end_results() -> list[Claim]:
    """Returns the paper's claims about the A6000 that are measured on the machine, not computed from a figure's data."""
    claims = [claim for claim in read_claims() if (claim.source, claim.hardware) == ("sarathi", "a6000")]
    return [claim for claim in claims if hasattr(quantities, claim.quantity)]


def error_of_gains(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns how far our gains are from those that the paper prints for LLaMA-13B, as in `cbatch.sim.provenance.Compared`."""
    gains = [(verdict.value, verdict.claim.printed) for verdict in verdicts if verdict.claim.gain is not None]
    largest = max(abs(ours / printed - 1) for ours, printed in gains if printed)
    about = {"runs": len(gains), "cards": 1, "date": today(), "see": "python -m reproduction.papers a6000"}
    return {"largest_error": {"gain": round(largest, 4)}, **about}


def _round(value: float) -> float:
    """Round to 5 digits: the printed numbers have 2 to 4."""
    return float(f"{value:.5g}")
