"""What a door makes of requests and of an engine's turns: without an engine, and without HTTP."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, cast

import pytest
from desk import CACHED, Desk, read
from starlette.exceptions import HTTPException

from cbatch import SLO, CbatchError, ConfigError, FinishReason, RequestSpec, Sampling
from experiments.server.answers import describe_error
from experiments.server.bodies import ChatBody
from experiments.server.clients import Refused, Turn


def chunks(sent: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns the objects of each part of a stream, without what all have in common."""
    parts = [message["body"].decode().split("data: ")[1:] for message in sent[1:]]
    return [[part.strip() if "DONE" in part else plain(json.loads(part)) for part in texts] for texts in parts]


def plain(content: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in content.items() if key not in ("id", "created", "model", "object")}
    prefix = "chatcmpl-" if "chat" in content.get("object", "") else "cmpl-"
    assert "error" in content or (content["model"] == "llama-3.1-8b" and content["id"].startswith(prefix))
    return kept


def choice(index: int, reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def usage(prompt: int, new: int, cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def test_requests_have_what_was_asked_for() -> None:
    desk, began = Desk(), perf_counter()
    fields = {"session": "s", "tier": "t", "priority": 3, "predicted_new_tokens": 7}
    sampled = {"temperature": 0.5, "top_k": -1, "top_p": 0.5, "seed": -1}
    asked = {"user": "u", "stop": "x", "max_tokens": 9, "max_completion_tokens": 8, "slo": {"ttft": 1}}
    asyncio.run(cast(Any, desk.open(prompt=[[1, 2], "a b c"], n=2, **fields, **sampled, **asked)))
    asyncio.run(cast(Any, desk.open(client="c", user="u", max_tokens=9, top_k=4)))
    first, second, third, fourth, last = desk.sent
    made: dict[str, Any] = {**fields, "client": "u", "slo": SLO(ttft=1), "arrival_time": first.arrival_time}
    seeds = [Sampling(0.5, 0, 0.5, seed) for seed in (2**64 - 1, 0)]
    assert first == RequestSpec(0, 2, 8, prompt=[1, 2], sampling=seeds[0], **made)
    assert second == RequestSpec(1, 2, 8, prompt=[1, 2], sampling=seeds[1], **made)
    assert (third.id, third.num_prompt_tokens, len(third.prompt), third.sampling) == (2, 3, 3, seeds[0])
    assert (fourth.id, fourth.prompt, fourth.sampling) == (3, third.prompt, seeds[1])
    assert (last.client, last.max_new_tokens, last.sampling) == ("c", 9, Sampling(0.0, 4, 1.0, 7 + 4))
    assert began <= first.arrival_time <= last.arrival_time <= perf_counter() and last.stop_tokens == ()


def test_limits_are_what_fits() -> None:
    desk = Desk("max_new_tokens=20")
    for prompt in ([1], [1] * 90, [1] * 99):
        asyncio.run(cast(Any, desk.open(prompt=prompt)))
    assert [spec.max_new_tokens for spec in desk.sent] == [20, 10, 1]
    for prompt, limit, said in (
        ([1] * 99, 2, "max_tokens=2: "),
        ([1] * 100, None, "prompt: 100 "),
        ([1] * 100, 1, "prompt: "),
        ([[1], [1] * 100], None, "prompt: 100 "),
        ([1, 128256, 2], None, "prompt: no token 128256; give ids from 0 to 128255"),
        ([[1], [2, -5]], None, "prompt: no token -5; "),
    ):
        with pytest.raises(ConfigError, match=said):
            asyncio.run(cast(Any, desk.open(prompt=prompt, max_tokens=limit)))
    with pytest.raises(HTTPException, match="404: model=other: is not served"):
        asyncio.run(cast(Any, desk.open(model="other")))
    asyncio.run(cast(Any, desk.open(ChatBody, model="llama-3.1-8b", messages=[{"role": "user", "content": "a " * 98}])))
    asyncio.run(cast(Any, desk.open(prompt=[0, 128255])))
    assert [len(spec.prompt) for spec in desk.sent[3:]] == [98, 2]
    assert [spec.id for spec in desk.sent] == [*range(5)], "what is refused takes no id"


def test_a_model_without_a_tokenizer_has_words() -> None:
    async def stream(desk: Desk) -> list[dict[str, Any]]:
        answer = await desk.open(stream=True, stop=" time")
        return await read(answer, lambda: desk.tell({0: 1}, r0=FinishReason.LENGTH))

    desk = Desk("backend=cpu", "model=tiny")
    assert b'"text":" time"' in asyncio.run(stream(desk))[1]["body"] and desk.sent[0].stop_strings == ()


def test_a_full_door_refuses_until_a_request_has_ended() -> None:
    desk = Desk("max_open=3", "full_status=429")
    value = desk.door.meters.get_sample_value

    async def come() -> None:
        await desk.open(n=2)
        for two in ({"prompt": ["a", "b"]}, {"n": 2}):
            with pytest.raises(HTTPException, match="429: 2 requests are open"):
                await desk.open(**two)
        assert value("cbatch:admission_rejections_total") == 4
        await desk.open()
        with pytest.raises(HTTPException, match="429: 3 requests are open"):
            await desk.open()
        desk.tell({}, r1=FinishReason.LENGTH)
        await desk.open()

    asyncio.run(come())
    refused = [message.number for message in desk.sent if isinstance(message, Refused)]
    assert [spec.id for spec in desk.sent if isinstance(spec, RequestSpec)] == [0, 1, 2, 3]
    assert refused == [2, 2, 1] and value("cbatch:admission_rejections_total") == 5


def test_more_answers_than_may_be_open_are_refused_for_good() -> None:
    """A client told to try again would never be served."""
    desk = Desk("max_open=3", "full_status=429")
    for four in ({"n": 4}, {"prompt": ["a", "b"], "n": 2}):
        with pytest.raises(ConfigError, match=r"^n=.: 4 answers at once exceed the server's max_open=3; lower n"):
            asyncio.run(cast(Any, desk.open(**four)))
    with pytest.raises(ConfigError, match=r"^prompt: 4 answers at once exceed the server's max_open=3; send fewer"):
        asyncio.run(cast(Any, desk.open(prompt=["a", "b", "c", "d"])))
    assert desk.sent == [] and desk.door.meters.get_sample_value("cbatch:admission_rejections_total") == 0


def test_a_stream_has_a_chunk_for_each_token() -> None:
    async def streamed(*news: Any, **fields: Any) -> list[dict[str, Any]]:
        desk = Desk()
        answer = await desk.open(stream=True, **fields)
        return await read(
            answer, *((lambda tokens=tokens, ends=ends: desk.tell(tokens, **ends)) for tokens, ends in news)
        )

    end = {"r0": FinishReason.LENGTH}
    head, *parts = asyncio.run(streamed(({0: 1}, {}), ({0: 2}, end)))
    kind = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    assert head["status"] == 200 and {name.decode(): value.decode() for name, value in head["headers"]} == kind
    assert [part["more_body"] for part in parts] == [True, False]
    one, two = {"choices": [choice(0, None, text=" time")]}, {"choices": [choice(0, "length", text=" of")]}
    assert chunks([head, *parts]) == [[one], [two, "[DONE]"]]
    options = {"include_usage": True, "continuous_usage_stats": True}
    end = {"r1": FinishReason.LENGTH}
    news = ({0: 1, 1: 1}, {}), ({0: 1}, {"r0": FinishReason.STOP}), ({}, end)
    sent = chunks(asyncio.run(streamed(*news, stream_options=options, n=2)))
    counted = [[event["usage"]["completion_tokens"] for event in events if event != "[DONE]"] for events in sent]
    assert counted == [[1, 2], [3], [3, 3]] and sent[2][1] == {"choices": [], "usage": usage(2, 3, CACHED)}
    assert sent[2][0]["choices"] == [choice(1, "length", text="")] and sent[1][0]["choices"][0]["index"] == 0
    sent = chunks(asyncio.run(streamed(({0: 1}, end and {"r0": FinishReason.STOP}), kind=ChatBody)))
    role, said = {"role": "assistant", "content": ""}, {"content": " time"}
    assert sent == [
        [{"choices": [choice(0, None, delta=role)]}, {"choices": [choice(0, "stop", delta=said)]}, "[DONE]"]
    ]


def test_a_whole_answer_comes_when_all_choices_have_ended() -> None:
    async def whole(**fields: Any) -> dict[str, Any]:
        desk = Desk()
        answer = await desk.open(**fields)
        ends = {f"r{spec.id}": FinishReason.LENGTH for spec in desk.sent}
        last = desk.sent[-1].id
        first = {name: reason for name, reason in ends.items() if name != f"r{last}"}
        news = (lambda: desk.tell({last: 1}, **first)), (lambda: desk.tell({last: 2}, **{f"r{last}": ends[f"r{last}"]}))
        head, part = await read(answer, *news)
        assert dict(head["headers"])[b"content-type"] == b"application/json" and not part["more_body"]
        return cast(dict[str, Any], json.loads(part["body"]))

    answer = asyncio.run(whole(prompt=["a", "b"], n=2))
    assert answer["object"] == "text_completion" and answer["usage"] == usage(2, 2, 2 * CACHED)
    assert answer["choices"] == [
        *(choice(index, "length", text="") for index in range(3)),
        choice(3, "length", text=" time of"),
    ]
    answer = asyncio.run(whole(kind=ChatBody))
    assert answer["object"] == "chat.completion" and answer["usage"] == usage(2, 2, CACHED)
    assert answer["choices"] == [choice(0, "length", message={"role": "assistant", "content": " time of"})]


def test_clients_that_leave_cancel_what_has_not_ended() -> None:
    async def leave(desk: Desk) -> list[dict[str, Any]]:
        answer = await desk.open(n=2, stream=True)
        return await read(answer, lambda: desk.tell({0: 1}, r1=FinishReason.STOP), lambda: None, leaves=True)

    desk = Desk()
    sent = asyncio.run(leave(desk))
    assert sent[1]["more_body"] and desk.sent[2:] == [0]
    desk.tell({0: 1}, r0=FinishReason.CANCELLED)  # comes too late


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_fails_is_cut_after_an_error(stream: bool) -> None:
    async def fail(desk: Desk, *first: Callable[[], object]) -> list[dict[str, Any]]:
        answer = await desk.open(stream=stream)
        return await read(answer, *first, lambda: desk.tell({}, r0=FinishReason.CANCELLED))

    with pytest.raises(HTTPException, match="503: the server ends"):
        asyncio.run(fail(Desk()))
    desk = Desk()
    if stream:
        sent = asyncio.run(fail(desk, lambda: desk.tell({0: 1})))
        assert sent[-1]["more_body"] and chunks(sent)[-1][0]["error"]["code"] == 503 and len(sent) == 3


def test_an_engine_that_dies_fails_what_is_open() -> None:
    messages = iter([100, Turn([], [], [], (0, 0, 0.0))])

    def recv() -> Any:
        for message in messages:
            return message
        raise EOFError

    async def listen(desk: Desk) -> None:
        answer = await desk.open()
        with pytest.raises(CbatchError, match="the engine's process has ended"):
            await desk.door.listen()
        with pytest.raises(HTTPException, match="500: the engine has failed"):
            await read(answer)
        with pytest.raises(HTTPException, match="503: the engine has ended"):
            await desk.open()

    desk = Desk(recv=recv)
    assert not desk.door.is_closed
    asyncio.run(listen(desk))
    assert desk.door.is_closed


ERRORS: list[tuple[Exception, int, str, str | None, str]] = [
    (HTTPException(404, "model=x: is not served"), 404, "Not Found", "model", "model=x: is not served"),
    (HTTPException(503, "stop: it"), 503, "Service Unavailable", None, "stop: it"),
    (ConfigError("messages[0].role: give one"), 400, "Bad Request", "messages", "messages[0].role: give one"),
    (ValueError("a client's text"), 500, "Internal Server Error", None, "the server has failed (ValueError)"),
]


@pytest.mark.parametrize(("error", "status", "kind", "param", "message"), ERRORS)
def test_errors_name_the_field(error: Exception, status: int, kind: str, param: str | None, message: str) -> None:
    said = {"message": message, "type": kind, "param": param, "code": status}
    assert describe_error(error) == (status, json.dumps({"error": said}))


def test_a_field_that_is_refused_is_named() -> None:
    said = {
        "max_tokens=-3: Input should be greater than or equal to 1": {"max_tokens": -3},
        "max_token: is not supported; did you mean max_tokens? otherwise leave it out": {"max_token": 3},
        "slo.tft: is not supported; did you mean ttft? otherwise leave it out": {"slo": {"tft": 1}},
        "logit_bias: is not supported; leave it out": {"logit_bias": {"1": 2}},
    }
    for message, fields in said.items():
        with pytest.raises(ConfigError) as refused:
            asyncio.run(cast(Any, Desk().open(prompt="a", **fields)))
        status, content = describe_error(refused.value)
        error = json.loads(content)["error"]
        assert (status, error["message"]) == (400, message) and error["param"] in fields


def test_a_fault_is_printed_without_what_a_client_has_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="secret") as fault:
        int("sec" + "ret")
    assert describe_error(fault.value)[0] == 500
    printed = capsys.readouterr().err
    assert "test_door.py" in printed and "secret" not in printed
