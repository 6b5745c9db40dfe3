"""Trace readers: small files of every format, the published files, and the errors for malformed ones."""

import gzip
import lzma
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest
from in_process import message

from experiments.workloads import Trace, TraceReplay
from experiments.workloads.readers.traces import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def rows(trace: Trace) -> list[tuple[float | None, int, int]]:
    times = [None] * len(trace) if trace.arrival_time is None else trace.arrival_time.tolist()
    return list(zip(times, trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


# -- small files of every format --------------------------------------------------------------------------------------

SAMPLES = {
    "azure": (
        AZURE + "2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01,396,109\r\n",
        [(0.0, 374, 44), (1.5, 396, 109)],
    ),
    "mooncake": (
        (
            '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}\n'
            '{"timestamp": 3000, "input_length": 7322, "output_length": 1, "hash_ids": null}\n'
            '{"timestamp": 5999.5, "input_length": 1, "output_length": 3}\n'
        ),
        [(0.0, 6758, 500), (0.0, 7322, 1), (2.9995, 1, 3)],
    ),
    "bailian": (  # seconds
        (
            '{"chat_id": 1, "timestamp": 61.114, "input_length": 33, "output_length": 5, "hash_ids": [4, 1, 9]}\n'
            '{"chat_id": 2, "timestamp": 62.25, "input_length": 33, "output_length": 2, "hash_ids": [4, 1]}\n'
        ),
        [(0.0, 33, 5), (1.136, 33, 2)],
    ),
    "azure, columns in another order": (  # with a byte order mark; times with a zone are read to a microsecond
        "\ufeffGeneratedTokens,extra,TIMESTAMP,ContextTokens\n1,x,2024-05-10 01:00:00.2500019+01:00,2\n3,y,2024-05-10 00:00:01,4",
        [(0.0, 2, 1), (0.749999, 4, 3)],
    ),
    "lengths": (
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n2015,156,2171,12.9",
        [(None, 3772, 54), (None, 2015, 156)],
    ),
    "lengths, spaces after and before commas": (
        "arrived_at, num_prefill_tokens ,num_decode_tokens\n1, 5,6\n2.5 ,7, 8\n",
        [(0.0, 5, 6), (1.5, 7, 8)],
    ),
    "vtc": (
        "arrival_s,client,prompt_tokens,output_tokens,fcfs_ttft_s\n5.5,client13,13,199,1.18\n6.25,client2,36,137,1.55\n",
        [(0.0, 13, 199), (0.75, 36, 137)],
    ),
}


@pytest.mark.parametrize("format", SAMPLES)
def test_every_format_plain_and_compressed_named_and_detected(tmp_path: Path, format: str) -> None:
    text, expected = SAMPLES[format]
    for suffix, compress, choice in (
        ("", bytes, format.partition(",")[0]),
        (".gz", gzip.compress, "auto"),
        (".xz", lzma.compress, "auto"),
    ):
        path = tmp_path / f"trace{suffix}"
        path.write_bytes(compress(text.encode()))
        trace = read_trace(str(path), choice)  # type: ignore[arg-type]
        assert rows(trace) == expected
        assert trace.line is not None and trace.line[0] == (1 if format in ("mooncake", "bailian") else 2)


def test_a_table_of_lengths_may_have_arrival_times(tmp_path: Path) -> None:
    """As Vidur's of the Azure traces; `queued` still leaves them out."""
    path = tmp_path / "vidur.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,374,44\n6.814579,396,109\n")
    assert rows(read_trace(str(path))) == [(0.0, 374, 44), (4.314579, 396, 109)]
    assert replayed(TraceReplay(path=str(path), speed=2)) == [(0.0, 374, 44), (2.1572895, 396, 109)]
    assert replayed(TraceReplay(path=str(path), queued=True)) == [(0.0, 374, 44), (0.0, 396, 109)]


@pytest.mark.parametrize(
    ("row", "per_second"),
    [
        ("{:.6f},3,4", 1),
        ("{:.0f},3,4", 10**6),
        ("{:.0f},3,4", 10**9),
        ('{{"arrived_at": {:.0f}, "num_prefill_tokens": 3, "num_decode_tokens": 4}}', 10**9),
    ],
    ids=["seconds", "microseconds", "nanoseconds", "nanoseconds in JSON"],
)
def test_absolute_time_stamps_keep_their_resolution(row: str, per_second: int, tmp_path: Path) -> None:
    """Three requests of 2026, a microsecond and then 7 us apart."""
    path, header = (
        tmp_path / "absolute",
        "" if row.startswith("{{") else "arrived_at,num_prefill_tokens,num_decode_tokens\n",
    )
    times = [Decimal("1790000000.123456") + Decimal(us) / 10**6 for us in (0, 1, 8)]
    path.write_text(header + "\n".join(row.format(time * per_second) for time in times))
    arrivals = [time for time, _, _ in replayed(TraceReplay(path=str(path), speed=per_second))]
    assert arrivals == pytest.approx([0.0, 1e-6, 8e-6], rel=1e-12)


# -- replay -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def azure(tmp_path: Path) -> TraceReplay:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + "".join(f"2023-11-16 00:00:{2 * i:02}.5,{100 + i},{10 + i}\n" for i in range(6)))
    return TraceReplay(path=str(path))


def replayed(workload: TraceReplay) -> list[tuple[float, int, int]]:
    return [(r.arrival_time, r.num_prompt_tokens, r.max_new_tokens) for r in workload.requests(None)]


def test_replay_faster_from_later_on_fewer_and_shorter(azure: TraceReplay) -> None:
    assert replayed(replace(azure, speed=4, num_requests=3)) == [(0.0, 100, 10), (0.5, 101, 11), (1.0, 102, 12)]
    assert replayed(replace(azure, start=7, speed=2)) == [(0.0, 104, 14), (1.0, 105, 15)]
    assert replayed(replace(azure, start=10, length_scale=0.1)) == [(0.0, 11, 2)]
    assert replayed(replace(azure, queued=True, num_requests=2)) == [(0.0, 100, 10), (0.0, 101, 11)]
    assert replayed(replace(azure, max_length=112, too_long="drop", speed=2)) == [(0.0, 100, 10), (1.0, 101, 11)]


def test_replay_that_cannot_be(azure: TraceReplay, tmp_path: Path) -> None:
    assert "workload.start=11 lies after the last arrival" in message(lambda: replayed(replace(azure, start=11)))
    assert "6 requests are usable" in message(lambda: replayed(replace(azure, num_requests=7)))
    table = TraceReplay(path=str(tmp_path / "table.csv"))
    Path(table.path).write_text("num_prefill_tokens,num_decode_tokens\n3,4\n")
    assert replayed(replace(table, queued=True)) == [(0.0, 3, 4)]
    assert message(lambda: replayed(replace(table, queued=True, format="mooncake"))).endswith("; give lengths")
    for timed in (table, replace(table, queued=True, start=1)):
        assert "no column of arrival times (TIMESTAMP, timestamp, arrived_at, arrival_s); " in message(
            lambda timed=timed: replayed(timed)
        )  # type: ignore[misc]


# -- broken files -----------------------------------------------------------------------------------------------------

ROW = "2023-11-16 18:15:46,1,1\n"
MOON = '{"timestamp": 5, "input_length": 1, "output_length": 1}\n'
HASHED = '{{"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": {}}}\n'
BAILIAN = '{{"chat_id": 1, "timestamp": 0, "input_length": 33, "output_length": 1, "hash_ids": {}}}\n'
WHOLE = "must be a whole number of tokens, at least 1"
BROKEN = [  # text, the line that the message names (0: none), a part of the message
    ("", 0, "the file is empty"),
    ("a,b\n1,2\n", 0, "num_prefill_tokens, num_decode_tokens (lengths)"),
    ("client,window_start_s\n1,0\n", 0, "use workload=servegen"),
    ('{"prompt": "x"}\n', 0, "use workload=prompts"),
    (AZURE, 1, "TIMESTAMP,ContextTokens,GeneratedTokens is a header without rows"),
    ("TIMESTAMP,ContextTokens\n1,2\n", 0, "no column 'GeneratedTokens'; add it to TIMESTAMP, ContextTokens"),
    ("arrived_at,num_decode_tokens\n1,2\n", 0, "no column 'num_prefill_tokens'; add it to arrived_at"),
    ('{"input_length": 5, "n": 2}\n', 0, "no column 'output_length'; add it to input_length, n"),
    (
        "num_prefill_tokens,num_decode_token\n1,2\n",
        0,
        "no column 'num_decode_tokens'; rename num_decode_token, or add it to",
    ),
    (AZURE + ROW + "2023-11-16 18:15:47,1\n", 3, f"GeneratedTokens is missing: {WHOLE}"),
    (AZURE + ROW + "2023-11-16 18:15:47,1,1,1\n", 3, "4 fields"),
    (AZURE + ROW + "\n" + ROW, 3, "is empty"),
    (AZURE + ROW + 'x,"1,2\n', 0, "is not CSV"),
    (AZURE + ROW + ROW.replace(",", ";"), 3, "has fields separated by ';'; separate them by commas"),
    (AZURE.replace(",", ";") + ROW, 1, "has fields separated by ';'; separate them by commas"),
    (AZURE.replace(",", "\t"), 1, "has fields separated by '\\t'"),
    ("note\na;b\n", 0, "has columns note;"),
    (AZURE + ROW + "noon,1,1\n", 3, "TIMESTAMP='noon': must be a time"),
    *((AZURE + ROW + f"2023-11-16 18:15:47,{n},1\n", 3, WHOLE) for n in ("0", "-3", "nan", "inf", "1.5", "9999999999")),
    (AZURE + ROW + "2023-11-16 18:15:47,1,0\n", 3, f"GeneratedTokens='0': {WHOLE}"),
    (AZURE + ROW + "2023-11-16 18:15:45,1,1\n", 3, "the time goes backwards"),
    (MOON + "[1]\n", 2, "is not a JSON object"),
    (MOON + '{"timestamp": 6, "input_length": 1}\n', 2, f"output_length is missing: {WHOLE}"),
    (MOON + '{"timestamp": 6, "input_length": true, "output_length": 1}\n', 2, f"input_length=True: {WHOLE}"),
    (MOON.replace("5", "NaN"), 1, "timestamp=nan: must be a finite number"),
    (MOON + MOON.replace("5", "4"), 2, "the time goes backwards"),
    (MOON.replace("}", ', "hash_ids": [0.5]}'), 1, "hash_ids=[0.5]: must be a list of whole numbers"),
    (
        MOON.replace("}", ', "hash_ids": [7, 7]}'),
        1,
        "hash_ids=[7, 7]: an id stands for the prompt up to its block's end",
    ),
    (MOON.replace("}", ', "hash_ids": [-7]}'), 1, "hash_ids=[-7]: an id stands for the prompt up to its block's end"),
    *(
        (HASHED.format(ids), 1, "must have an id for each 512 tokens of input_length")
        for ids in ([], [1], [1, 2, 3, 4])
    ),
    *(
        (
            HASHED.format(first) + HASHED.format([7, 8]) + HASHED.format(last),
            3,
            f"id {id_} has other ids before it than in line 1",
        )
        for first, last, id_ in (([1, 2], [9, 2], 2), ([1, 2], [2, 3], 2), ([1, 2], [2, 1], 2), ([2, 1], [1, 2], 1))
    ),
    *(
        (BAILIAN.format("[4, 1, 9]") + BAILIAN.format(ids.lower()), 2, f"hash_ids={ids}: {problem}")
        for ids, problem in (
            *((ids, "must be a list of whole numbers") for ids in ("[4, 1, 2.5]", "[4, 1, True]", "7")),
            *((ids, "an id stands for the prompt up to its block's end") for ids in ("[4, 1, -9]", "[4, 1, 4]")),
            *((ids, "must have an id for each 16 tokens") for ids in ("[]", "[4]", "[4, 1, 9, 8]")),
        )
    ),
    (MOON + "x" * 10_000, 2, "is not JSON"),
    (f"[{MOON.strip()}]", 1, "is not a JSON object, as every line must be"),
]


def test_ids_that_may_be_of_a_block_alone_follow_any_ids(tmp_path: Path) -> None:
    """The publisher of `bailian` says only that blocks are hashed."""
    path, row = (
        tmp_path / "b.jsonl",
        MOON.replace('h": 1, "o', 'h": 32, "o').replace("{", '{"chat_id": 1, "hash_ids": [%s, 2], '),
    )
    path.write_text(row % 1 + row % 9)
    assert [*read_trace(str(path)).fields["prefix_hashes"]] == [(1, 2), (9, 2)]


@pytest.mark.parametrize(("text", "line", "part"), BROKEN)
def test_broken_text_is_refused_in_one_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    path = tmp_path / "broken"
    path.write_text(text)
    refusal = message(lambda: read_trace(str(path)))
    assert refusal.startswith(f"{path}, line {line}: " if line else f"{path}: " if text else "")
    assert part in refusal
    assert len(refusal) < 400


def test_a_table_of_prompts_is_not_sent_to_a_reader_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("time,prompt,output\n1,2,3\n")
    refusal = message(lambda: read_trace(str(path)))
    assert "workload=prompts" not in refusal and "; name its lengths as a known format does" in refusal


def test_a_request_longer_than_the_model_is_refused_by_its_line(tmp_path: Path) -> None:
    """The second request, in line 3; 100 tokens fit."""
    path = tmp_path / "long.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,90,10\n1,90,11\n")
    workload = TraceReplay(path=str(path))
    assert message(lambda: workload.within(100).requests(None)).startswith(f"{path}, line 3: 90 prompt + 11 output")
    assert (
        len(workload.within(101).requests(None))
        == len(replace(workload, num_requests=1).within(100).requests(None)) + 1
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.compress((AZURE + 1000 * ROW).encode())
    contents = {"plain.gz": AZURE.encode(), "cut.csv.gz": whole[: len(whole) // 2], "binary": whole, "plain.xz": b"x"}
    contents["bad.csv.gz"] = whole[:30] + b"\xff\xff\xff\xff" + whole[34:]
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for path in (*(tmp_path / name for name in contents), tmp_path):
        assert message(lambda path=path: read_trace(str(path))).startswith(  # type: ignore[misc]
            f"workload.path={path}: cannot be read ("
        )
    assert "no such file" in message(lambda: read_trace(str(tmp_path / "none"), section="workload.lengths"))
    assert message(lambda: read_trace("")) == "workload.path='': give the path of a file"


# -- columns by attribute ---------------------------------------------------------------------------------------------

OWN = """TIMESTAMP,ContextTokens,GeneratedTokens,user,urgency,guess,score,code,note
2023-11-16 00:00:00,10,5,ann,2,4,0.5,007,
2023-11-16 00:00:01,20,6,,-1,9,,x1,late
2023-11-16 00:00:02,30,7,bob,0,3,2,9,late
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.csv").write_text(OWN)
    return str(tmp_path / "own.csv")


def test_columns_fill_fields_and_attributes_of_requests(own: str) -> None:
    columns = {"client": "user", "priority": "urgency", "predicted_new_tokens": "guess"}
    columns |= {"difficulty": "score", "code": "code", "note": "note", "rank": "urgency"}
    requests = TraceReplay(path=own, columns=columns, start=1.0).requests(None)
    assert [request.client for request in requests] == [None, "bob"]
    assert [request.priority for request in requests] == [-1, 0]
    assert [request.predicted_new_tokens for request in requests] == [9, 3]
    assert [dict(request.extra) for request in requests] == [
        {"difficulty": None, "code": "x1", "note": "late", "rank": -1},
        {"difficulty": 2.0, "code": "9", "note": "late", "rank": 0},  # a column with text in it stays text
    ]
    assert [dict(request.extra) for request in TraceReplay(path=own).requests(None)] == [{}, {}, {}]
    for bad, part in (
        ({"client": "usr"}, "own.csv: workload.columns.client: no column 'usr'; did you mean user?"),
        ({"arrival_time": "score"}, "workload.columns.arrival_time: the format fills it; choose another name"),
        ("user", "workload.columns=user: give columns by attribute, as in {client: user_id}"),
        ({"priority": "user"}, "own.csv, line 2: user='ann': must be a whole number"),
        ({"predicted_new_tokens": "urgency"}, "own.csv, line 3: urgency='-1': must be a whole number, at least 1"),
    ):
        replay = partial(TraceReplay, path=own, columns=bad)  # type: ignore[arg-type]
        assert part in message(lambda replay=replay: replay().requests(None))  # type: ignore[misc]


def test_json_values_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOON.replace("}", ', "user": "ann", "tags": ["a", 1]}') + MOON.replace("}", ', "user": "bob"}'))
    requests = TraceReplay(path=str(path), columns={"client": "user", "tags": "tags"}).requests(None)
    assert [(request.client, request.extra["tags"]) for request in requests] == [("ann", ["a", 1]), ("bob", None)]
