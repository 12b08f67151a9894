"""``POST /slots/N?action=compact``: a slot's text is shrunk once and asked often, and every reply says what is left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Server

QUESTIONS = ("\n\nQuestion: Who keeps the keys?\nAnswer:", "\n\nQuestion: When does the harbour open?\nAnswer:")


def compact(server: Server, slot: int | str = 0, keep: Any = 0.5) -> tuple[int, Any]:
    return server.request("POST", f"/slots/{slot}?action=compact&keep={keep}")


def slot(server: Server, index: int = 0) -> dict[str, Any]:
    return dict(server.request("GET", "/slots")[1][index])


@pytest.fixture
def document(server: Server, long_prompt: str) -> str:
    """About 600 tokens, in slot 0."""
    text = long_prompt[:2800]
    server.complete(text, 1, id_slot=0, cache_prompt=False)
    return text


def test_a_document_is_shrunk_once_and_asked_often(server: Server, document: str) -> None:
    before = slot(server)
    n = before["n_prompt_tokens"]
    assert (before["n_kept"], before["n_evicted"]) == (n, 0) and n > 500
    status, reply = compact(server)
    assert status == 200, reply
    assert reply["id_slot"] == 0 and reply["timings"]["compact_ms"] > 0
    assert reply["n_kept"] + reply["n_evicted"] == n and 0.5 * n <= reply["n_kept"] <= 0.5 * n + 4
    for question in QUESTIONS:
        answer = server.complete(document + question, 12, id_slot=0)
        assert answer["tokens_predicted"] == 12 and answer["content"].strip()
        assert answer["timings"]["cache_n"] > n - 8 and answer["timings"]["prompt_n"] < 24
        after = slot(server)
        assert after["n_evicted"] == reply["n_evicted"]
        assert after["n_kept"] + after["n_evicted"] == after["n_prompt_tokens"] > n


def test_usage_counts(server: Server, client: Any, document: str) -> None:
    """In the replies of the OpenAI API, whole and streamed."""

    def ask(question: str, **options: Any) -> Any:
        messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
        settings = {"temperature": 0, "max_tokens": 3, "extra_body": {"id_slot": 0}, **options}
        return client.chat.completions.create(model="smollm2", messages=messages, **settings)

    first = ask("Who?", max_tokens=1).usage
    assert first.kept_tokens == first.prompt_tokens and first.evicted_tokens == 0
    status, reply = compact(server)
    assert status == 200, reply
    usage = ask("Where do boats wait?").usage
    assert usage.evicted_tokens == reply["n_evicted"] > 200
    # The last sampled token is in no cache.
    assert usage.kept_tokens == usage.total_tokens - 1 - usage.evicted_tokens
    assert usage.prompt_tokens_details.cached_tokens > first.prompt_tokens - 24
    chunks = list(ask("What is the harbour called?", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.evicted_tokens == reply["n_evicted"]
    assert chunks[-1].usage.kept_tokens == chunks[-1].usage.total_tokens - 1 - reply["n_evicted"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    text = client.completions.create(model="smollm2", prompt="One, two,", max_tokens=3, extra_body={"id_slot": 1})
    assert (text.usage.kept_tokens, text.usage.evicted_tokens) == (text.usage.total_tokens - 1, 0)


def test_keep_may_stand_in_the_body(server: Server, document: str) -> None:
    n = slot(server)["n_prompt_tokens"]
    for body, path, share in (
        ({"keep": 0.9}, "", 0.9),
        ({}, "&keep=0.8", 0.8),
        ({"keep": 1}, "&keep=0.7", 0.7),
        (None, "", 0.5),
    ):
        status, reply = server.request("POST", f"/slots/0?action=compact{path}", body)
        assert status == 200, reply
        assert share * n <= reply["n_kept"] <= share * n + 4


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("0?action=compact&keep=0", None, 400, ["keep", "'0'", "above 0"]),
        ("0?action=compact&keep=2", None, 400, ["keep", "'2'", "up to 1"]),
        ("0?action=compact&keep=-0.5", None, 400, ["keep", "'-0.5'"]),
        ("0?action=compact&keep=half", None, 400, ["keep", "'half'"]),
        ("0?action=compact&keep=0.5x", None, 400, ["keep", "'0.5x'"]),
        ("0?action=compact&keep=", None, 400, ["keep", "''"]),
        ("0?action=compact&keep=nan", None, 400, ["keep", "'nan'"]),
        ("0?action=compact&keep=%ff", None, 400, ["keep"]),
        ("0?action=compact", {"keep": 2}, 400, ["keep", "'2'"]),
        ("0?action=compact", {"keep": "half"}, 400, ["keep", '"half"']),
        ("0?action=compact", {"keep": None}, 400, ["keep", "'null'"]),
        ("0?action=compact", [0.5], 400, ["body", '{"keep": 0.5}']),
        ("0?action=compact", b"{", 400, ["body", '{"keep": 0.5}']),
        ("2?action=compact", None, 400, ["slot 2", "0 to 1"]),
        ("-1?action=compact", None, 400, ["slot -1", "0 to 1"]),
        ("x?action=compact", None, 400, ["Invalid slot ID"]),
        ("0?action=compress", None, 400, ["Invalid action"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_requests_change_nothing(server: Server, path: str, body: Any, status: int, words: list[str]) -> None:
    server.complete("One, two, three, four, five, six,", 1, id_slot=0)
    before = slot(server)
    got, reply = server.request("POST", f"/slots/{path}", body)
    assert got == status == reply["error"]["code"], reply
    assert all(word in reply["error"]["message"] for word in words), reply
    assert slot(server) == before


def test_an_empty_slot_is_one_clear_error(server: Server) -> None:
    assert server.request("POST", "/slots/1?action=erase")[0] == 200
    status, reply = compact(server, 1)
    assert status == 400 and "slot 1 holds no text" in reply["error"]["message"], reply


def test_it_needs_the_key(server: Server) -> None:
    assert server.request("POST", "/slots/0?action=compact", key="wrong")[0] == 401


def test_a_busy_slot_is_compacted_afterwards(server: Server, document: str) -> None:
    """As llama-server's own actions wait for it. Nothing of the answer is lost on its way."""
    expected = server.complete(document + QUESTIONS[0], 40, id_slot=0, ignore_eos=True)["content"]
    replies: list[dict[str, Any]] = []
    busy = threading.Thread(
        target=lambda: replies.append(server.complete(document + QUESTIONS[0], 40, id_slot=0, ignore_eos=True))
    )
    busy.start()
    deadline = time.monotonic() + 60
    while not server.busy_slots() and time.monotonic() < deadline:
        time.sleep(0.01)
    status, reply = compact(server)
    busy.join(300)
    assert status == 200 and replies[0]["content"] == expected
    assert reply["n_kept"] + reply["n_evicted"] == replies[0]["tokens_cached"] and reply["n_evicted"] > 200


def test_other_slots_go_on(server: Server, document: str) -> None:
    """What is asked while a text is compacted is answered as ever, and `/health` at once."""
    prompts = [f"The number {word} and the capital of" for word in ("one", "two", "three")]
    alone = [server.complete(prompt, 12, id_slot=1, cache_prompt=False)["content"] for prompt in prompts]
    together: dict[str, str] = {}

    def ask(prompt: str) -> None:
        together[prompt] = server.complete(prompt, 12, id_slot=1, cache_prompt=False)["content"]

    results: list[tuple[int, Any]] = []
    jobs = [threading.Thread(target=lambda: results.append(compact(server)))]
    jobs += [threading.Thread(target=ask, args=[prompt]) for prompt in prompts]
    jobs += [threading.Thread(target=lambda: results.append(compact(server, keep=0.4)))]
    for job in jobs:
        job.start()
    health = server.request("GET", "/health", timeout=5)[0]
    for job in jobs:
        job.join(300)
    assert health == 200 and [status for status, _ in results] == [200, 200]
    assert [together[prompt] for prompt in prompts] == alone
    n = slot(server)["n_prompt_tokens"]
    assert slot(server)["n_kept"] in range(int(0.4 * n), int(0.4 * n) + 6)


@pytest.fixture
def small_server(core: object, smollm2_path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """512 tokens, one slot; parameters are further arguments, in which DIR is a folder."""
    arguments = ["-m", str(smollm2_path), "-c", "512", "-np", "1", "--slots"]
    arguments += [argument.replace("DIR", f"{tmp_path}{os.sep}") for argument in request.param]
    running = Server(tmp_path, *arguments)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


#: Of a context of four sequences the youngest 132 tokens count as such, where a text may always be taken up again.
FOUR_SLOTS = ["--kv-type", "fp4_csa2", "--slot-save-path", "DIR", "-c", "2048", "-np", "4", "--kv-unified"]


@pytest.mark.parametrize("small_server", [FOUR_SLOTS], indirect=True, ids=["four slots"])
def test_a_compacted_text_stays_one_when_saved(small_server: Server, long_prompt: str) -> None:
    """However long the answers are; and a text that only begins like it is read whole."""
    server, document = small_server, long_prompt[:2800]
    server.complete(document, 1, id_slot=0)
    status, reply = compact(server)
    assert status == 200, reply
    n = slot(server)["n_prompt_tokens"]
    assert server.request("POST", "/slots/0?action=save", {"filename": "compacted.bin"})[0] == 200
    half = server.complete(document[:1400] + " And", 4, id_slot=0)
    assert half["timings"]["cache_n"] == 0, "it would be answered from a quarter of the document"
    assert slot(server)["n_evicted"] == 0
    for index in (0, 1):
        status, restored = server.request("POST", f"/slots/{index}?action=restore", {"filename": "compacted.bin"})
        assert status == 200, restored
        assert slot(server, index)["n_evicted"] == reply["n_evicted"]
        server.complete(document + QUESTIONS[0], 160, id_slot=index, ignore_eos=True)
        again = server.complete(document + QUESTIONS[1], 4, id_slot=index)
        assert again["timings"]["cache_n"] > n - 8
        assert slot(server, index)["n_evicted"] == reply["n_evicted"]


@pytest.mark.parametrize(
    "small_server",
    [["--kv-type", "fp4_csa2", "--slot-save-path", "DIR", "--cache-ram", "64", "-c", "2048", "-b", "256"]],
    indirect=True,
    ids=["cache-ram"],
)
def test_another_conversation_in_between(small_server: Server, long_prompt: str) -> None:
    """The one slot's text goes to llama-server's cache of prompts and comes back compacted, not read again."""
    document = long_prompt[:2800]
    small_server.complete(document, 1)
    status, reply = compact(small_server)
    assert status == 200, reply
    small_server.complete(" ".join(f"{number}" for number in range(200)), 4)
    assert slot(small_server)["n_evicted"] == 0
    for question in QUESTIONS:
        answer = small_server.complete(document + question, 4)
        assert answer["timings"]["prompt_n"] < 24, answer["timings"]
        assert slot(small_server)["n_evicted"] == reply["n_evicted"] > 200


@pytest.mark.parametrize("small_server", [["--slot-save-path", "DIR"]], indirect=True, ids=["f16"])
def test_without_a_kvfold_cache(small_server: Server) -> None:
    """Refused with what to start it with; nothing is counted where nothing can be dropped."""
    small_server.complete("One, two,", 2)
    status, reply = compact(small_server)
    assert status == 501 and "--kv-type" in reply["error"]["message"], reply
    assert not {"n_kept", "n_evicted"} & slot(small_server).keys()
    for path, prompt in (
        ("completions", {"prompt": "hi"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        status, reply = small_server.request("POST", f"/v1/{path}", {**prompt, "max_tokens": 1})
        assert status == 200 and not {"kept_tokens", "evicted_tokens"} & reply["usage"].keys()


@pytest.mark.parametrize("small_server", [["--kv-type", "fp4_csa2"]], indirect=True, ids=["no path"])
def test_slot_actions_must_be_allowed(small_server: Server) -> None:
    status, reply = compact(small_server)
    assert status == 501 and "--slot-save-path" in reply["error"]["message"], reply


@pytest.mark.parametrize(
    "small_server", [["--kv-type", "fp4_csa2", "--slot-save-path", "DIR", "-ub", "128"]], indirect=True, ids=["full"]
)
def test_a_full_cache_is_one_clear_error(small_server: Server) -> None:
    """The second reading needs room; the text stays as it is."""
    words = " ".join(f"{number}" for number in range(400))
    tokens = small_server.request("POST", "/tokenize", {"content": words})[1]["tokens"][:500]
    small_server.complete(tokens, 1)
    status, reply = compact(small_server)
    assert status == 400 and "no room" in reply["error"]["message"], reply
    assert slot(small_server)["n_kept"] == 500
    assert small_server.complete([*tokens, 17], 1)["timings"]["prompt_n"] == 1
