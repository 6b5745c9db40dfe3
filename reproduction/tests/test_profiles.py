"""Converters of published tables, on small tables of the same layouts whose times can be checked by hand."""

import gzip
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from cbatch import BatchShape
from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim import Profile
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile, profile_text
from cbatch.sim.provenance import NOT_COMPARED
from reproduction.profiles import convert
from reproduction.profiles import llmservingsim as llmservingsim_tables
from reproduction.profiles.__main__ import main
from reproduction.profiles.aiconfigurator import Products, decode_grid
from reproduction.profiles.vidur import LINEAR, OTHER

SPEC = ModelSpec("toy", "llama", 2, 64, 8, 4, 128, 256, 1000, 4096)


def converted(folder: Path, *specs: ModelSpec) -> Profile:
    """The profile of the tables, written and read."""
    (path := folder / "profile.json").write_text(profile_text(convert(folder, specs)))
    return load_profile(str(path))


def write(path: Path, header: str, rows: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.write("\n".join([header, *rows]) + "\n")


OPERATORS = ("emb", *LINEAR, *OTHER[:-1])


def vidur(root: Path) -> Path:
    """Every operator takes its place in OPERATORS plus one, in ms for each of 10 tokens, halved on two GPUs."""
    device = root / "vidur" / "compute" / "a100"
    header = ",".join(f"time_stats.{name}.median" for name in OPERATORS)
    shape = "n_head,n_kv_head,n_embd,n_expanded_embd,vocab_size,use_gated_mlp,num_tokens,num_tensor_parallel_workers"
    times = {
        (n, parts): [str((place + 1) * n / 10 / parts) for place in range(10)] for parts in (1, 2) for n in (10, 20)
    }
    rows = [f"{','.join(row)},8,4,64,256,1000,True,{tokens},{parts}" for (tokens, parts), row in times.items()]
    write(device / "org" / "toy" / "mlp.csv.gz", f"{header},{shape}", rows)
    stats = ",".join(
        f"time_stats.attn_{name}.median" for name in ("input_reshape", "decode", "output_reshape", "prefill")
    )
    write(
        device / "attention_toy.csv.gz",
        f"{stats},n_q_head,n_kv_head,num_tensor_parallel_workers,batch_size,prefill_chunk_size,kv_cache_size",
        [
            "0.5,,0.25,4,8,4,2,1,64,0",
            "0.5,,0.25,8,8,4,2,1,64,100",
            "0.5,2,0.25,,8,4,2,1,0,99",
            "0.5,4,0.25,,8,4,2,2,0,99",
        ],
    )
    columns = "rank,num_workers,size,collective,devices_per_node,max_devices_per_node"
    for name, rows in (
        ("all_reduce", ["0,1.5,0,2,1000,all_reduce,2,8", "1,7,0,2,1000,all_reduce,1,8"]),
        ("send_recv", ["0,3,0,2,1000,send_recv,1,8", "1,0.5,0,2,1000,send_recv,2,8"]),
    ):
        write(root / "vidur" / "network" / "a100_dgx" / f"{name}.csv.gz", f",time_stats.{name}.median,{columns}", rows)
    return device


def test_vidur_operators_attention_and_links(tmp_path: Path) -> None:
    profile = converted(vidur(tmp_path), SPEC)
    cost = ProfileCost(profile, SPEC, Topology(2))
    assert cost.estimated == ("head",)
    assert ProfileCost(profile, SPEC).estimated == ("attention", "head"), "attention was measured on two GPUs"
    parts = cost.parts(BatchShape(((10, 0),)))
    assert parts.linear == pytest.approx(2 * (2 + 3 + 4 + 5) / 2 * 1e-3)
    assert parts.other == pytest.approx(
        (2 * (6 + 7 + 8 + 9 + 10 + 10) / 2 + 1 / 2) * 1e-3
    )  # two residual sums; embedding
    assert parts.communication == pytest.approx(2 * 2 * 1.5e-3 * 1.28)  # 1,280 bytes, in proportion
    assert cost.parts(BatchShape(((64, 50),))).attention == pytest.approx(2 * (6 + 0.75) * 1e-3)
    assert cost.parts(BatchShape((), 2, 200)).attention == pytest.approx(2 * (4 + 0.75) * 1e-3)
    assert profile.links.to_next_stage(False, "") != profile.links.to_next_stage(True, "")
    assert profile.links.to_next_stage(True, "").at(1000) == 3e-3


def aiconfigurator(root: Path, system: str = "h100_sxm") -> Path:
    """Products take 1 ns an output and token times inputs; attention and collectives as written."""
    folder, sizes = root / "aiconfigurator" / system, (256, 512, 1024)
    products = [(m, n, k) for m in (1, 128, 256) for n in sizes for k in sizes]
    rows = [f"bfloat16,{m},{n},{k},{m * n * k * 1e-9}" for m, n, k in products]
    write(folder / "v_gemm_bf16.csv.gz", "gemm_dtype,m,n,k,latency", rows)
    heads = "num_heads,num_key_value_heads,head_dim,latency"
    write(
        folder / "v_context_attention.csv.gz",
        f"batch_size,isl,{heads}",
        [
            "1,64,4,2,128,2",
            "1,128,4,2,128,6",
            "1,64,8,4,128,4",
            "1,128,8,4,128,12",
            "2,64,8,4,128,99",
            "1,64,8,8,128,99",
        ],
    )
    rows = ["2,9,2,1,128,3", "4,9,2,1,128,6", "4,19,2,1,128,12"]
    write(folder / "v_generation_attention.csv.gz", f"batch_size,step,{heads}", rows)
    rows = ["all_reduce,half,2,1000,1.5", "all_reduce,int8,2,1000,9", "all_gather,half,2,1000,9"]
    write(folder / "nccl-2.csv.gz", "op_name,nccl_dtype,num_gpus,message_size,latency", rows)
    return folder


WIDE = ModelSpec("wide", "nanogpt", 1, 512, 8, 4, 128, 512, 512, 4096)


def test_products_between_measured_sizes_follow_the_work(tmp_path: Path) -> None:
    cost = ProfileCost(converted(aiconfigurator(tmp_path), WIDE), WIDE)
    assert cost.estimated == ("other",) and "chunks (derived)" in cost.provenance()["not_measured"]
    work = sum(
        inputs * outputs for inputs, outputs in WIDE.linear_shapes.values()
    )  # 2,048 outputs lie beyond the table
    assert cost.parts(BatchShape(((128, 0),))).linear == pytest.approx(128 * work * 1e-12)


def test_decodes_read_a_small_kv_cache_from_memory_too() -> None:
    """Ten sequences of 5 MB each fill the L2 cache. Four take the time between those of one and of sixteen; eight took longer."""
    measured = {"batch_size": [1, 4, 8, 16], "latency": [2.0, 3.0, 20.0, 32.0], "step": 9999, "num_key_value_heads": 1}
    grid = decode_grid(pd.DataFrame(measured), replace(WIDE, num_kv_heads=1), cache=50e6)
    assert [grid.at(batch, 10_000) for batch in (1, 4, 8, 16)] == pytest.approx([0.002, 0.008, 0.020, 0.032])


def test_products_of_the_a100_run_in_waves(tmp_path: Path) -> None:
    """256 tokens and 512 or 1,024 outputs are 4 or 8 tiles: one wave on 108 multiprocessors, whatever lies between."""
    products = Products(aiconfigurator(tmp_path, "a100_sxm"), 108)
    wave, between, table = (products.seconds(512, outputs) for outputs in (512, 724, 1024))
    assert wave.at(256) == pytest.approx(256 * 512 * 512 * 1e-12)
    assert wave.at(256) < between.at(256) < table.at(256)
    assert between.at(128) == pytest.approx(128 * 512 * 724 * 1e-12)  # at one tile of tokens: by outputs


def test_attention_of_other_heads_and_chunks_with_context(tmp_path: Path) -> None:
    cost = ProfileCost(converted(aiconfigurator(tmp_path), WIDE), WIDE)
    assert cost.parts(BatchShape(((64, 0),))).attention == pytest.approx(4e-3)
    with_context = 4e-3 + 64 * 64 * 12e-3 / (128 * 129 / 2)
    assert cost.parts(BatchShape(((64, 64),))).attention == pytest.approx(with_context)
    # 4 key-value heads: one sequence is four of the measured ones
    assert cost.parts(BatchShape((), 1, 10)).attention == pytest.approx(6e-3)
    assert cost.parts(BatchShape((), 1, 15)).attention == pytest.approx(9e-3)
    two = ProfileCost(cost.profile, WIDE, Topology(2))
    assert two.parts(BatchShape((), 1, 1)).communication == pytest.approx(2 * 1.5e-3)
    assert two.parts(BatchShape(((64, 0),))).attention == pytest.approx(2e-3)


def llmservingsim(root: Path) -> Path:
    folder = root / "llmservingsim" / "RTXPRO6000" / "Toy_tp1"
    names = (*llmservingsim_tables.LINEAR, *llmservingsim_tables.OTHER[1:], "embedding", "final_layernorm")
    times = [f"{layer},{tokens},{(place + 1) * tokens}" for place, layer in enumerate(names) for tokens in (1, 64)]
    write(folder / "dense.csv.gz", "layer,tokens,time_us", times)
    write(folder / "per_sequence.csv.gz", "layer,sequences,time_us", ["lm_head,1,100", "sampler,1,10"])
    write(
        folder / "attention.csv.gz",
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us",
        ["64,0,0,0,20", "64,100,0,0,40", "0,0,2,50,8", "64,0,2,50,32", "64,100,2,50,50"],
    )
    return folder


def test_layers_sequences_and_decodes_that_share_a_call(tmp_path: Path) -> None:
    cost = ProfileCost(converted(llmservingsim(tmp_path), SPEC), SPEC)
    assert cost.estimated == ()
    parts = cost.parts(BatchShape(((64, 50),), 2, 100))
    assert parts.linear == pytest.approx(2 * 66 * (1 + 2 + 3 + 4) * 1e-6)
    assert parts.other == pytest.approx((2 * 66 * (5 + 5 + 6 + 7) + 66 * (8 + 9)) * 1e-6)  # two norms a layer
    assert parts.head == pytest.approx(3 * 110e-6)
    assert parts.attention == pytest.approx(2 * (30 + 11) * 1e-6)  # 12 and 10 were added by the decodes: their median
    assert cost.parts(BatchShape((), 2, 100)).attention == pytest.approx(2 * 8e-6)


@pytest.mark.parametrize("folder", [vidur, llmservingsim])
def test_a_model_without_tables_in_the_folder_is_refused(
    tmp_path: Path, folder: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It became a profile of estimates, which stated the error of the model that was served."""
    arguments = [f"tables={folder(tmp_path)}", "model=qwen3-8b", f"output={tmp_path / 'q.json'}"]
    assert main(arguments) != 0 and not (tmp_path / "q.json").exists()
    assert "has no table of model=qwen3-8b" in capsys.readouterr().err
    assert convert(folder(tmp_path), [SPEC]).error == NOT_COMPARED, "another model's error"


def test_the_command_writes_a_profile(tmp_path: Path) -> None:
    folder, output = aiconfigurator(tmp_path), tmp_path / "written.json"
    assert main([f"tables={folder}", "model=nanogpt-13b", f"output={output}"]) == 0
    assert load_profile(str(output)).models["nanogpt-13b"].tensor_parallel.keys() == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qkv_proj,1,fast", "line 2: time_us must be a number of at least 0, is 'fast'"),
        ("qkv_proj,1,1\nqkv_proj,0,1", "line 3: tokens must be a number above 0, is '0'"),
        ("qkv_proj,1,1", "holds no times of o_proj"),
        ("", "holds no rows"),
    ],
)
def test_a_damaged_table_names_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    folder = llmservingsim(tmp_path)
    write(folder / "dense.csv.gz", "layer,tokens,time_us", text.split("\n") if text else ())
    with pytest.raises(ProfileError, match=says) as caught:
        convert(folder, [SPEC])
    assert "dense.csv.gz" in str(caught.value) and "\n" not in str(caught.value)
