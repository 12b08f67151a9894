"""What real clients do to a server: vanish, send nonsense, send everything at once (cases 23-24, 36-39, 41)."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from running import KEY, Server

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'"text"',
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        {"messages": "hi"},
        {"messages": 5},
        {"messages": [5]},
        {"messages": [{"role": 3, "content": "hi"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user"}], "max_tokens": 2},
        {**CHAT, "max_tokens": "many"},
        {**CHAT, "temperature": "hot"},
        {**CHAT, "seed": "one"},
        {**CHAT, "stream": "yes"},
        {**CHAT, "tools": "hammer"},
    ],
    ids=lambda body: (body if isinstance(body, bytes) else json.dumps(body).encode())[:60].decode(errors="replace"),
)
def test_nonsense_is_a_client_error(server: Server, body: Any) -> None:
    """Case 39: an error in JSON each time, and the process lives."""
    status, reply = server.request("POST", "/v1/chat/completions", body)
    assert server.process.poll() is None, server.log
    assert 400 <= status < 600, reply
    assert isinstance(reply, dict), reply
    assert reply["error"]["message"]
    assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "field",
    [
        {"stop": 5},
        {"logit_bias": "x"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        {"n_predict": -7},
        {"top_k": -1e9},
        {"kv_type": "fp4"},
    ],
    ids=json.dumps,
)
def test_odd_fields_do_no_harm(server: Server, field: dict[str, Any]) -> None:
    """Fields that llama-server overlooks rather than refuses: a reply or an error, and the process lives."""
    status, reply = server.request("POST", "/v1/chat/completions", {**CHAT, **field})
    assert status in (200, 400, 500), reply
    assert isinstance(reply, dict)
    assert server.request("GET", "/health")[0] == 200


ROUTES = [
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1}),
    ("POST", "/completion", {"prompt": "hi", "n_predict": 1}),
    ("POST", "/tokenize", {"content": "hi"}),
    ("POST", "/slots/0?action=save", {"filename": "key.bin"}),
]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=[path for _, path, _ in ROUTES])
def test_routes_need_the_key(server: Server, method: str, path: str, body: Any) -> None:
    """Case 41."""
    for bad in (None, "wrong", KEY[:-1], KEY + "x"):
        assert server.request(method, path, body, key=bad)[0] == 401
    assert server.request(method, path, body)[0] == 200


def test_health_needs_no_key(server: Server) -> None:
    assert server.request("GET", "/health", key=None)[0] == 200


@pytest.mark.parametrize("name", ["../out.bin", "/tmp/out.bin", "a/../../out.bin", "", "..", "a\x00b"])
def test_slot_files_stay_in_their_directory(server: Server, name: str) -> None:
    status, reply = server.request("POST", "/slots/0?action=save", {"filename": name})
    assert status == 400, reply


def start_and_leave(server: Server, prompt: str, after: float) -> None:
    """Send a request and close the connection after some time, without having read anything."""
    body = json.dumps({"prompt": prompt, "n_predict": 400, "cache_prompt": False}).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(after)


def test_clients_that_leave_free_their_slots(server: Server, long_prompt: str) -> None:
    """Case 36: in prefill (0.3 s into some 3000 tokens) and in generation.

    The server looks for closed connections between batches, once a second if no other result comes in between. That the
    slot is free although the prompt was not read to its end shows that it did.
    """
    for prompt, after in ((long_prompt, 0.3), (long_prompt, 0.6), ("Once upon a time", 1.5)) * 2:
        start_and_leave(server, prompt, after)
        assert server.wait_idle(60), server.log[-2000:]
    ends = [int(n) for n in re.findall(r"stop processing: n_tokens = (\d+)", server.log)][-6:]
    whole = len(server.request("POST", "/tokenize", {"content": long_prompt})[1]["tokens"])
    assert max(ends) < whole, ends
    assert server.complete("One, two, three,", 4)["tokens_predicted"] == 4


def test_a_queued_client_that_leaves_disturbs_nobody(server: Server, long_prompt: str) -> None:
    """Case 37: two requests run, a third one waits and goes."""
    results: list[dict[str, Any]] = []
    busy = [
        threading.Thread(target=lambda: results.append(server.complete("Count: one, two,", 40, cache_prompt=False)))
        for _ in range(2)
    ]
    for thread in busy:
        thread.start()
    start_and_leave(server, long_prompt, 0.2)
    for thread in busy:
        thread.join(300)
    assert [reply["tokens_predicted"] for reply in results] == [40, 40]
    assert server.wait_idle(60)


def test_health_answers_during_a_long_prefill(server: Server, long_prompt: str) -> None:
    """Case 38: polled all the time, answered before the prefill is over."""
    done = threading.Event()
    replies: list[dict[str, Any]] = []

    def work() -> None:
        replies.append(server.complete(long_prompt, 1, cache_prompt=False))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    answered = 0
    while not done.is_set():
        assert server.request("GET", "/health", timeout=30)[0] == 200
        answered += not done.is_set()
        time.sleep(0.1)
    thread.join()
    assert replies[0]["tokens_predicted"] == 1
    assert answered >= 3


def test_sequences_do_not_leak_into_each_other(server: Server) -> None:
    """Cases 21-24: two requests at once give what each gives alone."""
    prompts = ["The capital of Italy is", "One, two, three, four,"]
    alone = [server.complete(prompt, 12, cache_prompt=False)["content"] for prompt in prompts]
    together: dict[str, str] = {}
    threads = [
        threading.Thread(
            target=lambda p=prompt: together.update({p: server.complete(p, 12, cache_prompt=False)["content"]})
        )
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [together[prompt] for prompt in prompts] == alone


def test_more_than_the_cache_holds_fails_for_one_only(server: Server, long_prompt: str) -> None:
    """Case 23: prompts that do not fit are refused, others go on."""
    results: dict[str, int] = {}

    def send(name: str, prompt: str) -> None:
        results[name] = server.request("POST", "/completion", {"prompt": prompt, "n_predict": 4})[0]

    jobs = {"long": long_prompt * 4, "short-1": "One, two,", "short-2": "Red, green,"}
    threads = [threading.Thread(target=send, args=job) for job in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert results == {"long": 400, "short-1": 200, "short-2": 200}


def test_prefix_of_a_conversation_is_reused(server: Server, long_prompt: str) -> None:
    """Case 19: only what is new is evaluated."""
    first = server.complete(long_prompt[:6000], 4, id_slot=0)
    again = server.complete(long_prompt[:6000] + " And then", 4, id_slot=0)
    assert again["timings"]["cache_n"] >= first["timings"]["prompt_n"] + first["timings"]["cache_n"] - 8
    assert again["timings"]["prompt_n"] < 20


def test_slots_are_saved_and_restored(server: Server, long_prompt: str) -> None:
    """Case 15: after a restore nothing but the new words is evaluated, and the reply is the same."""
    prompt = long_prompt[:5000]
    server.complete(prompt, 1, id_slot=0)
    status, saved = server.request("POST", "/slots/0?action=save", {"filename": "handbook.bin"})
    assert status == 200, saved
    expected = server.complete(prompt + " The", 8, id_slot=0)["content"]
    assert server.request("POST", "/slots/0?action=erase")[0] == 200
    other = server.complete("Red, green,", 8, id_slot=1, cache_prompt=False)["content"]
    status, restored = server.request("POST", "/slots/0?action=restore", {"filename": "handbook.bin"})
    assert status == 200, restored
    assert restored["n_restored"] == saved["n_saved"] > 900
    again = server.complete(prompt + " The", 8, id_slot=0)
    assert again["content"] == expected
    assert again["timings"]["prompt_n"] < 8
    # Case 21: the other sequence is untouched by the restore.
    assert server.complete("Red, green,", 8, id_slot=1, cache_prompt=False)["content"] == other


@pytest.mark.parametrize("offset", [0, 60, 2000, -1])
def test_damaged_slot_files_are_refused(
    server: Server, server_arguments: list[str], long_prompt: str, offset: int
) -> None:
    """Case 16."""
    folder = Path(server_arguments[server_arguments.index("--slot-save-path") + 1])
    prompt = long_prompt[:2000]
    server.complete(prompt, 1, id_slot=0)
    assert server.request("POST", "/slots/0?action=save", {"filename": "good.bin"})[0] == 200
    expected = server.complete(prompt + " The", 6, id_slot=1, cache_prompt=False)["content"]
    whole = (folder / "good.bin").read_bytes()
    (folder / "cut.bin").write_bytes(whole[:offset])
    status, reply = server.request("POST", "/slots/0?action=restore", {"filename": "cut.bin"})
    assert status >= 400, reply
    assert server.process.poll() is None
    assert server.complete(prompt + " The", 6, id_slot=0, cache_prompt=False)["content"] == expected
