"""What OpenAI's clients ask for, over HTTP, against a random model."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest

from engine.errors import (
    CapacityError,
    ConstraintError,
    ContextLost,
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    NotSupportedError,
    Overloaded,
    RateLimited,
)
from engine.server.errors import answer_to
from tests.engine.server.conftest import (
    CONTEXT,
    LOOK,
    LocalServer,
    events,
    local_server,
    wait_for,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def folded(chunks: list[dict], index: int = 0) -> dict:
    """The message that a client makes of a stream's chunks."""
    message: dict = {"content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if choice["index"] != index:
                continue
            message["content"] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(
                        {"id": call["id"], "type": call["type"], "function": call["function"]}
                    )
                else:
                    kept = message["tool_calls"][call["index"]]["function"]
                    kept["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                message["finish_reason"] = choice["finish_reason"]
    return message


def test_a_chat_answer_has_openais_shape(server: LocalServer):
    answer = server.chat(max_tokens=6, seed=1)
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 1 <= usage["completion_tokens"] <= 6
    assert answer["system_fingerprint"].endswith("-w7")
    assert "token_ids" not in choice and "prompt_token_ids" not in answer


def test_headers_name_request_and_weights(server: LocalServer):
    headers = {"X-Request-Id": "mine-1"}
    body = {"model": "tiny", "messages": HI, "max_tokens": 1}
    answer = server.client.post(CHAT, json=body, headers=headers)
    assert (answer.headers["x-request-id"], answer.headers["x-weight-version"]) == ("mine-1", "7")
    assert server.client.get("/v1/models").headers["x-request-id"].startswith("req_")
    with server.client.stream("POST", CHAT, json={**body, "stream": True}) as stream:
        assert stream.headers["x-weight-version"] == "7"


@pytest.mark.parametrize("kind", ["server", "chatml"])
@pytest.mark.parametrize("tools", [False, True])
def test_a_stream_says_what_the_answer_says(kind, tools, request):
    """Same seed: deltas add up to the message, with calls cut at every token."""
    server: LocalServer = request.getfixturevalue(kind)
    body: dict = {"messages": HI, "max_tokens": 60, "seed": 3, "n": 2, "logprobs": True}
    body |= {"top_logprobs": 2, "return_token_ids": True}
    if tools:
        body |= {"tools": [LOOK], "tool_choice": "required"}
    whole = server.post(CHAT, **body).json()
    chunks = server.stream(CHAT, **body, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        said = folded(chunks, index)
        assert said["content"] == (message["content"] or "")
        assert said["finish_reason"] == choice["finish_reason"]
        calls = message.get("tool_calls", [])
        assert [c["function"] for c in said["tool_calls"]] == [c["function"] for c in calls]
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert [i for c in own for i in c.get("token_ids", ())] == choice["token_ids"]
        told = [e for c in own for e in (c["logprobs"] or {"content": []})["content"]]
        assert told == choice["logprobs"]["content"]
        assert len(told) == len(choice["token_ids"])
        assert all(1 <= len(entry["top_logprobs"]) <= 2 for entry in told)


@pytest.mark.parametrize("kind", ["server", "chatml"])
def test_required_tools_are_called_by_their_schema(kind, request):
    server: LocalServer = request.getfixturevalue(kind)
    answer = server.chat(tools=[LOOK], tool_choice="required", max_tokens=120, seed=5)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("tool_calls", "length")
    call = choice["message"]["tool_calls"][0]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "look"
    assert set(arguments) == {"key", "n"} and arguments["n"] in (1, 2)


def test_a_named_tool_is_called_and_none_is_not(server: LocalServer):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    tools = [other, LOOK]
    named = {"type": "function", "function": {"name": "look"}}
    answer = server.chat(tools=tools, tool_choice=named, max_tokens=120, seed=1)
    names = {c["function"]["name"] for c in answer["choices"][0]["message"]["tool_calls"]}
    assert names == {"look"}
    for seed in range(3):
        answer = server.chat(tools=tools, tool_choice="none", max_tokens=60, seed=seed)
        assert "tool_calls" not in answer["choices"][0]["message"]


def test_a_dialogue_goes_on_with_what_a_tool_said(server: LocalServer):
    """The answer itself is a message; a call's id is repeated to the letter in the prompt."""
    answer = server.chat(tools=[LOOK], tool_choice="required", max_tokens=120, seed=5)
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "found"}
        for call in message["tool_calls"]
    ]
    later = server.chat(
        messages=[*HI, message, *results], tools=[LOOK], max_tokens=1, return_token_ids=True
    )
    text = bytes(i for i in later["prompt_token_ids"] if i < 256).decode()
    assert f"## Return of {message['tool_calls'][0]['id']}\nfound" in text


def test_json_answers(server: LocalServer):
    """json_object is an object, json_schema is what the schema says, thinking or not."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    for thinking in (False, True):
        answer = server.chat(
            response_format=form,
            max_tokens=200,
            seed=2,
            chat_template_kwargs={"thinking": thinking},
            logit_bias={str(279 - 3): 30} if thinking else {},
        )
        message = answer["choices"][0]["message"]
        assert json.loads(message["content"]) in ({"a": "x"}, {"a": "y"})
    regex = server.complete(structured_outputs={"regex": "[ab]{3}!"}, max_tokens=20)
    assert regex["choices"][0]["text"].rstrip("!").strip("ab") == ""


def test_seeds_and_choices(server: LocalServer):
    """Equal seeds answer equally; choices of one request differ; without a seed answers differ."""
    ask = {"max_tokens": 12, "return_token_ids": True, "ignore_eos": True}
    first = server.chat(seed=9, n=3, **ask)
    ids = [choice["token_ids"] for choice in first["choices"]]
    assert len({tuple(i) for i in ids}) == 3
    assert [c["token_ids"] for c in server.chat(seed=9, n=3, **ask)["choices"]] == ids
    assert server.chat(seed=9, **ask)["choices"][0]["token_ids"] == ids[0]
    assert server.chat(**ask)["choices"][0]["token_ids"] != ids[0]


def test_stop_strings_end_the_text_and_are_not_in_it(server: LocalServer):
    """At any place, also over several tokens; streamed, no part of them shows."""
    ask = {"seed": 4, "max_tokens": 40, "ignore_eos": True}
    text = server.complete(**ask)["choices"][0]["text"]
    stop = text[7:10]
    assert len(stop) == 3
    answer = server.complete(**ask, stop=[stop])["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert answer["stop_reason"] == stop
    chunks = server.stream(COMPLETIONS, prompt="hi", **ask, stop=[stop])
    assert "".join(c["choices"][0]["text"] for c in chunks) == answer["text"]
    kept = server.complete(**ask, stop=[stop], include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == answer["text"] + stop


def test_token_ids_in_and_out(server: LocalServer):
    """What came out goes in again: no text is tokenised twice."""
    first = server.complete([1, 2, 3], max_tokens=4, return_token_ids=True, seed=1)
    ids = first["choices"][0]
    assert ids["prompt_token_ids"] == [1, 2, 3] and len(ids["token_ids"]) <= 4
    whole = [*ids["prompt_token_ids"], *ids["token_ids"]]
    again = server.chat(prompt_token_ids=whole, max_tokens=1, return_token_ids=True)
    assert again["prompt_token_ids"] == whole


def test_completions_of_several_prompts(server: LocalServer):
    answer = server.complete(["a", "b"], n=2, max_tokens=2, echo=True, temperature=0)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text[0] for text in texts] == ["a", "a", "b", "b"]
    assert answer["usage"]["prompt_tokens"] == 2
    told = server.complete("a", max_tokens=3, logprobs=2, temperature=1.0)["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"])


def test_bias_decides(server: LocalServer):
    answer = server.complete(max_tokens=3, logit_bias={"65": 100}, ignore_eos=True)
    assert answer["choices"][0]["text"] == "AAA"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": HI, "wat": 1}, 400, "wat"),
        (CHAT, {"messages": HI, "temperature": 3}, 400, "temperature"),
        (CHAT, {"messages": HI, "max_tokens": 10**6}, 400, "max_tokens"),
        (CHAT, {"messages": HI, "max_completion_tokens": 10**6}, 400, "max_completion_tokens"),
        (CHAT, {"messages": HI, "n": 100}, 400, "n"),
        (CHAT, {"messages": HI, "model": "gpt"}, 404, "model"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"messages": HI, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400, "messages"),
        (
            CHAT,
            {"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": "c"}]},
            400,
            "messages.1.tool_call_id",
        ),
        (CHAT, {"messages": HI, "tools": [LOOK, LOOK]}, 400, "tools.1.function.name"),
        (
            CHAT,
            {"messages": HI, "tools": [LOOK], "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        (COMPLETIONS, {"prompt": [10**6]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}, 400, None),
    ],
)
def test_refusals_name_the_parameter(server: LocalServer, path, body, status, param):
    """In OpenAI's shape, one line, streamed or not."""
    for stream in (False, True):
        answer = server.post(path, stream=stream, **body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["param"] == param, error
        assert error["type"] == "invalid_request_error" and "\n" not in error["message"]


def test_bad_requests_without_a_body_to_speak_of(server: LocalServer):
    answer = server.client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]
    assert server.client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    wrong = server.client.put("/v1/models")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert server.client.get("/v1/models/gpt").status_code == 404
    assert server.client.get("/v1/models/tiny").json()["max_model_len"] == CONTEXT


def test_nothing_is_left_when_clients_leave(server: LocalServer):
    """Streams and answers given up half-way end their steps and give back their contexts."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 300, "ignore_eos": True, "n": 4}
    before = server.metric('k25_requests_total{outcome="client_gone"}')
    for _ in range(3):
        stream = server.client.stream("POST", COMPLETIONS, json={**body, "stream": True})
        with stream as answer:
            next(answer.iter_lines())
    for stream in (False, True):
        # gone before the first token
        data = json.dumps({**body, "prompt": "x" * 200, "n": 16, "stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            wait_for(lambda: server.service.num_running > 0)
    wait_for(lambda: server.service.num_running == 0)
    wait_for(lambda: server.num_contexts() == 0)
    assert server.metric('k25_requests_total{outcome="client_gone"}') == before + 5


def test_metrics_count(server: LocalServer):
    before = server.metric("k25_time_to_first_token_seconds_count")
    server.chat(max_tokens=3, ignore_eos=True)
    assert server.metric("k25_time_to_first_token_seconds_count") == before + 1
    assert server.metric("k25_inter_token_seconds_count") > 0
    assert server.metric("k25_weight_version") == 7
    assert server.metric("k25_contexts") == 0
    server.chat(max_tokens=1, n=3)
    assert 0 < server.metric("k25_prefix_hit_ratio") < 1
    for name in ("k25_kv_hot_bytes", "k25_kv_warm_bytes", "k25_kv_cold_bytes"):
        assert f"\n{name} " in server.client.get("/metrics").text


def test_keys_and_limits():
    """401 before the body is read; 413; 429 with Retry-After when all places are taken."""
    key = "a-key-of-sixteen-chars"
    limits = {"max_concurrent": 1, "max_body_bytes": 2048, "retry_after_s": 3}
    with local_server(keys={key: "app"}, limits=limits, users={"app": {"priority": 3}}) as server:
        refused = server.client.post(CHAT, content=b"not even JSON")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert server.client.get("/health").json() == {"status": "ok"}
        assert server.client.get("/ready").status_code == 200
        server.client.headers["Authorization"] = f"Bearer {key}"
        large = server.client.post(CHAT, content=b"x" * 3000)
        assert large.status_code == 413
        codes: list[httpx.Response] = []
        body = {"prompt": "hi", "max_tokens": 300, "ignore_eos": True}
        threads = [
            threading.Thread(target=lambda: codes.append(server.post(COMPLETIONS, **body)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(c.status_code for c in codes) == [200, 429, 429]
        assert {c.headers["retry-after"] for c in codes if c.status_code == 429} == {"3"}
        server.service.drain()
        late = server.post(COMPLETIONS, prompt="hi")
        assert (late.status_code, late.headers["connection"]) == (503, "close")
        assert server.client.get("/ready").status_code == 503


def test_an_engine_that_ends_is_a_typed_error():
    """In a stream its last event, else 503; the server is not ready, what it counted stays."""
    with local_server() as server:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 600, "ignore_eos": True}
        with server.client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            threading.Thread(target=server.service.close).start()
            error = events(lines)[-1]["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "engine_lost")
        late = server.client.post(COMPLETIONS, json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_lost")
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
        assert server.metric('k25_requests_total{outcome="unavailable"}') == 2


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (RateLimited("no", 2.2), 429, "rate_limited", "3"),
        (Overloaded("no", 0.2), 429, "overloaded", "1"),
        (CapacityError("no"), 429, "overloaded", "2"),
        (ContextTooLong("no"), 400, "context_length_exceeded", None),
        (ConstraintError("no"), 400, "invalid_constraint", None),
        (NotSupportedError("no"), 400, "not_supported", None),
        (DeadlineExceeded("no"), 503, "deadline", "2"),
        (ContextLost("no"), 503, "engine_lost", "2"),
        (EngineError("two\nlines"), 500, "internal", None),
    ],
)
def test_errors_of_the_engine_on_the_wire(error, status, code, retry):
    answer = answer_to(error)
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers().get("Retry-After") == retry
    assert "\n" not in answer.body()["error"]["message"]
