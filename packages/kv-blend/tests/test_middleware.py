"""The middleware before a server that tokenizes by words, as vLLM does with its own tokenizer."""

import asyncio
import json
from typing import Any

import pytest
from kv_blend import request_fields
from kv_blend.middleware import Message, SegmentsMiddleware
from kv_blend.plan import Engine

WORDS = {"sys": 1, "one": 2, "two": 3, "ask": 4, "|": 5, "||": 6, "more": 7}


class Server:
    """Answers with what it was sent, and at /tokenize with the numbers of words."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.paths.append(scope["path"])
        message = await receive()
        body = message["body"]
        assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        assert dict(scope["headers"])[b"authorization"] == b"Bearer secret"
        answer = body
        if scope["path"].endswith("/tokenize"):
            news = asyncio.ensure_future(receive())
            await asyncio.sleep(0)
            assert not news.done(), "vLLM gives up a request whose client has gone"
            news.cancel()
            asked = json.loads(body)
            text = asked.get("prompt") or " ".join(each["content"] for each in asked["messages"])
            tokens = [WORDS[word] for word in text.replace("\x00", " ").split()]
            answer = json.dumps({"tokens": tokens}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})


def post(
    request: Any, path: str = "/v1/completions", *, server: Server | None = None, engine: Engine = "vllm"
) -> tuple[int, Any]:
    """The status and the answer. The body is sent in two pieces."""
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    pieces: list[Message] = [
        {"type": "http.request", "body": body[:5], "more_body": True},
        {"type": "http.request", "body": body[5:]},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer secret"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    asyncio.run(SegmentsMiddleware(server or Server(), engine)(scope, receive, send))
    answer = b"".join(message.get("body", b"") for message in sent)
    try:
        return sent[0]["status"], json.loads(answer)
    except ValueError:
        return sent[0]["status"], answer


@pytest.mark.parametrize("path", ["/v1/completions", "/behind/a/prefix/v1/completions"])
def test_documents_between_separators_become_segments(path: str) -> None:
    server = Server()
    request = {"model": "m", "prompt": "sys | one one | two | ask", "cache_salt": "acme", "stream": True}
    status, sent = post(request | {"kv_blend": {"separator": "|", "share": 0.3}}, path, server=server)
    fields = request_fields([(2, 4), (5, 6)], tokens=8, tenant="acme", share=0.3)
    assert status == 200
    assert sent == request | json.loads(json.dumps(fields))
    root = path.removesuffix("/v1/completions")
    assert server.paths == [f"{root}/tokenize", f"{root}/tokenize", path]


def test_what_follows_the_last_document_is_the_question() -> None:
    _, sent = post({"prompt": "sys | one | ask more", "kv_blend": {"separator": "|", "select": "question"}})
    fields = request_fields([(2, 3)], tokens=6, select="question", question=[5, 4, 7])
    assert sent["cache_salt"] == fields["cache_salt"]


def test_sglang_has_its_own_field_for_a_plan() -> None:
    request = {"prompt": "sys | one | ask", "custom_params": {"kv_tiers": {"store": False}}}
    _, sent = post(request | {"kv_blend": {"separator": "|"}}, engine="sglang")
    fields = request_fields([(2, 3)], tokens=5, engine="sglang")
    assert sent["custom_params"] == json.loads(json.dumps(request["custom_params"] | fields["custom_params"]))
    assert sent["cache_salt"] == fields["cache_salt"]


def test_white_space_of_a_separator_may_belong_to_the_text_around_it() -> None:
    _, sent = post({"prompt": "sys\n\n|\n\none\n\n|\n\nask", "kv_blend": {"separator": "\n\n|\n\n"}})
    assert sent["kv_transfer_params"]["kv_blend"]["segments"] == [[2, 3]]


def test_documents_in_messages_and_what_the_template_is_given() -> None:
    messages = [{"role": "system", "content": "sys | one"}, {"role": "user", "content": "| two | ask"}]
    kept = {"kv_transfer_params": {"kv_tiers": {"store": False}}, "messages": messages, "model": "m"}
    _, sent = post(kept | {"kv_blend": {"separator": "|"}}, "/v1/chat/completions")
    fields = request_fields([(2, 3), (4, 5)], tokens=7)
    assert sent["cache_salt"] == fields["cache_salt"]
    assert sent["kv_transfer_params"].keys() == {"kv_tiers", "kv_blend"}


@pytest.mark.parametrize(
    "body", [{"prompt": "sys | one | ask"}, b'{no json "kv_blend"', [{"kv_blend": 1}], {"a": '"kv_blend"'}]
)
def test_other_requests_pass_as_they_came(body: Any) -> None:
    server = Server()
    _, sent = post(body, server=server)
    assert sent == body
    assert server.paths == ["/v1/completions"]


@pytest.mark.parametrize(
    ("prompt", "options", "why"),
    [
        ("sys | one", {"separator": "|"}, "the prompt has 1 separators '|'"),
        ("sys | one || two | ask", {"separator": "|"}, "the 4 separators '|' cannot be found"),
        ("sys | | ask", {"separator": "|"}, "0 segments"),
        ("sys | one |", {"separator": "|", "share": 2}, "Expected `float` <= 1"),
        ("sys | one | ask", {}, "kv_blend.separator is not a text"),
        ("sys | one | ask", {"separator": ""}, "kv_blend.separator is not a text"),
        ("sys | one | ask", {"separator": " \n"}, "or is only white space"),
        ("sys \x00 one \x00 ask", {"separator": "\x00"}, "cannot be found"),  # of which this tokenizer makes nothing
        ("sys | one | ask", {"separator": "|", "tenant": "acme"}, "tenant cannot be given together"),
        ("sys | one | ask", {"separator": "|", "engine": "vllm"}, "engine cannot be given together"),
        ("sys | one | ask", {"separator": "|", "segments": [(0, 1)]}, "segments cannot be given together"),
        ("sys | one | ask", {"separator": "|", "question": [4]}, "question cannot be given together"),
        ("sys | one | ask", "all", "kv_blend is not an object"),
        ([1, 2, 3], {"separator": "|"}, "the prompt has 0 separators"),
    ],
)
def test_what_cannot_be_is_refused_by_name(prompt: Any, options: Any, why: str) -> None:
    status, answer = post({"prompt": prompt, "kv_blend": options})
    assert status == 400
    assert why in answer["error"]["message"]


@pytest.mark.parametrize("other", [{"cache_salt": 5}, {"kv_transfer_params": "all"}])
def test_other_fields_of_the_wrong_kind_are_refused(other: dict[str, Any]) -> None:
    status, answer = post({"prompt": "sys | one | ask", "kv_blend": {"separator": "|"}} | other)
    assert status == 400
    assert "cache_salt is not a text, or kv_transfer_params is not an object" in answer["error"]["message"]
