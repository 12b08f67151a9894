"""The OpenAI API on a folded cache, seen through the official client (case 40)."""

from __future__ import annotations

import json
from typing import Any

import pytest

QUESTION = [{"role": "user", "content": "How many days are in a week?"}]


def ask(client: Any, messages: list[dict[str, str]] = QUESTION, **options: Any) -> Any:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 24, **options}
    return client.chat.completions.create(model="smollm2", messages=messages, **settings)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_chat(client: Any) -> None:
    reply = ask(client)
    assert "7" in reply.choices[0].message.content
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.object == "chat.completion"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_length_ends_with_its_reason(client: Any) -> None:
    reply = ask(client, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 3


def test_stream_with_usage(client: Any) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_has_none(client: Any) -> None:
    assert all(chunk.usage is None for chunk in ask(client, stream=True))


def test_several_choices(client: Any) -> None:
    reply = ask(client, n=2, temperature=1.0, seed=5)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert all(choice.message.content for choice in reply.choices)


def test_stop_words(client: Any) -> None:
    whole = ask(client).choices[0].message.content
    word = whole.split()[2]
    cut = ask(client, stop=[word]).choices[0]
    assert cut.message.content == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"


def test_seeds(client: Any) -> None:
    def sample(seed: int) -> str:
        options = {"temperature": 1.0, "seed": seed, "extra_body": {"cache_prompt": False}}
        return str(ask(client, [{"role": "user", "content": "Tell me a story."}], **options).choices[0].message.content)

    assert sample(1) == sample(1) != sample(2)


def test_log_probabilities(client: Any) -> None:
    reply = ask(client, logprobs=True, top_logprobs=3, max_tokens=5)
    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == 5
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0.0
        assert token.logprob == max(top.logprob for top in token.top_logprobs), "greedy takes the most probable"
    assert "".join(token.token for token in tokens) == reply.choices[0].message.content


def test_json_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    reply = ask(
        client,
        [{"role": "user", "content": "Describe a city as JSON."}],
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )
    value = json.loads(reply.choices[0].message.content)
    assert set(value) == {"city", "people"}
    assert isinstance(value["people"], int)


def test_tools_are_accepted(client: Any) -> None:
    """SmolLM2's template knows no tools, so the reply is text; the request must not fail for that."""
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    reply = ask(client, tools=[tool], tool_choice="auto")
    assert reply.choices[0].message.content or reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_text_completions(client: Any) -> None:
    reply = client.completions.create(model="smollm2", prompt="One, two, three,", max_tokens=6, temperature=0)
    assert "four" in reply.choices[0].text


def test_conversation_of_three_turns_warm_and_cold(client: Any) -> None:
    """Case 6: what the third turn sees does not depend on what the cache already holds.

    Compared are the probabilities of the first token: texts may differ after near ties, because another split into
    batches rounds the activations of quantised weights differently (measured here: up to 0.05 nats with f16, 0.11 with
    fp4_csa2; another conversation changes several nats).
    """
    turns = [
        ("My name is Ines.", "Hello Ines, how can I help you?"),
        ("I live in Port Ellin.", "Port Ellin is a fine place to live."),
    ]
    messages: list[dict[str, str]] = []
    for line, reply in turns:
        messages.append({"role": "user", "content": line})
        ask(client, messages, max_tokens=4)
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": "What is my name?"})

    def first_token(cached: bool) -> dict[str, float]:
        options = {"logprobs": True, "top_logprobs": 10, "extra_body": {"cache_prompt": cached}}
        content = ask(client, messages, max_tokens=1, **options).choices[0].logprobs.content
        return {top.token: top.logprob for top in content[0].top_logprobs}

    warm, cold = first_token(True), first_token(False)
    likely = [token for token, logprob in cold.items() if logprob > -3]
    assert likely
    for token in likely:
        assert abs(warm[token] - cold[token]) < 0.6, (warm, cold)


def test_long_prompt_is_read_from_the_folded_cache(client: Any, long_prompt: str) -> None:
    question = f"{long_prompt}\n\nWhere does the key of the shed hang?"
    reply = ask(client, [{"role": "user", "content": question}], max_tokens=48)
    assert "barometer" in reply.choices[0].message.content
    assert reply.usage.prompt_tokens > 2500


def test_prompts_beyond_the_context_are_one_clear_error(client: Any, long_prompt: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [{"role": "user", "content": long_prompt * 4}])
    assert "context" in str(caught.value)
    assert "7" in ask(client).choices[0].message.content
