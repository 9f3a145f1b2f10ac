"""Web pages that a browser on this machine shows: cross-site requests, DNS rebinding, and pages that are allowed."""

from pathlib import Path

import pytest

from kybernate.dev.nats_server import free_port
from tests.attacks.stack import RawEngine, Response, Stack, call, serving

CHROME = b"User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"
COMMANDS = ["/v1/seats/s0/park", "/v1/seats/s0/pin", "/v1/groups/g/drain", "/v1/nodes/n1/drain", "/v1/wake"]
CALLS = ["/v1/chat/completions"]
PAGE = b"https://chat.example"


def ask(stack: Stack, method: str, path: str, host: bytes, *headers: bytes, body: bytes = b"") -> Response:
    head = [f"{method} {path} HTTP/1.1".encode(), b"Host: " + host, b"Connection: close", *headers]
    if method == "POST":
        head.append(b"Content-Length: %d" % len(body))
    return stack.ask(b"\r\n".join([*head, b"", body]))


@pytest.mark.parametrize("path", [*COMMANDS, *CALLS])
@pytest.mark.parametrize(
    ("host", "headers"),
    [
        (b"127.0.0.1:8780", (b"Origin: http://evil.example", b"Content-Type: text/plain")),
        (b"127.0.0.1:8780", (b"Origin: null",)),
        (b"localhost:8780", (b"Origin: http://localhost:3000", b"Sec-Fetch-Site: same-site")),
        (b"127.0.0.1:8780", (b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Mode: no-cors")),
        (b"evil.example:8780", (b"Origin: http://evil.example:8780",)),
        (b"localhost.evil.example", (b"Origin: http://localhost.evil.example",)),
        (b"127.0.0.1.evil.example", (b"Origin: http://127.0.0.1.evil.example",)),
    ],
)
def test_a_page_elsewhere_commands_and_asks_nothing(
    stack: Stack, engine: RawEngine, path: str, host: bytes, headers: tuple[bytes, ...]
) -> None:
    response = ask(stack, "POST", path, host, *headers, body=call())
    assert (response.status, response.code) in [(403, "wrong_origin"), (403, "wrong_host")]
    assert not engine.heads


@pytest.mark.parametrize("path", ["/v1/seats", "/v1/events", "/v1/models", "/v1/hold?model=llama", "/metrics"])
def test_a_rebound_page_reads_nothing(stack: Stack, path: str) -> None:
    response = ask(stack, "GET", path, b"evil.example:8780", CHROME)
    assert (response.status, response.code) == (403, "wrong_host")
    marked = ask(stack, "GET", path, b"127.0.0.1", CHROME, b"Sec-Fetch-Site: cross-site")
    assert (marked.status, marked.code) == (403, "wrong_origin")


@pytest.mark.parametrize("host", [b"x", b"kybernate-router.kybernate.svc:8780", b"api.example.com", b"127.0.0.1"])
@pytest.mark.parametrize(
    "headers",
    [
        (b"User-Agent: curl/8.5.0", b"Accept: */*"),
        (b"User-Agent: OpenAI/Python 2.54.0", b"X-Stainless-Lang: python"),
        (b"User-Agent: node", b"Sec-Fetch-Mode: cors", b"Accept-Language: *"),  # openai-node, by Node's own fetch
    ],
)
def test_programs_need_nothing_configured(stack: Stack, host: bytes, headers: tuple[bytes, ...]) -> None:
    assert ask(stack, "POST", CALLS[0], host, *headers, body=call()).status == 200
    assert ask(stack, "GET", "/v1/models", host, *headers).status == 200


def test_a_browser_at_an_address_of_this_port_reads_its_answers(stack: Stack) -> None:
    for host in (b"127.0.0.1:8780", b"[::1]:8780", b"localhost:8780", b"kyb.localhost"):
        assert ask(stack, "GET", "/v1/models", host, CHROME, b"Sec-Fetch-Site: none").status == 200
        assert ask(stack, "POST", CALLS[0], host, b"Origin: http://" + host, body=call()).status == 200


def test_metrics_can_have_a_port_of_their_own_which_is_not_used_across_sites(folder: Path) -> None:
    with Stack(folder, health_port=(port := free_port())) as stack:
        assert [stack.get(path).status for path in ("/metrics", "/healthz")] == [404, 200]
        stack.port = port
        assert b"kybernate_router_connections" in ask(stack, "GET", "/metrics", b"prometheus.svc").raw
        assert ask(stack, "GET", "/metrics", b"evil.example", CHROME).status == 403
        assert ask(stack, "GET", "/metrics", b"127.0.0.1", b"Sec-Fetch-Site: cross-site").status == 403


def test_a_configured_page_calls_and_reads_and_its_name_leads_here(folder: Path) -> None:
    with serving(folder, cors_origins=f"{PAGE.decode()}, http://kyb.example:8780") as (stack, engine):

        def allowing(connection: object, head: bytes, body: bytes) -> bool:
            assert b"origin" not in head.lower(), "an engine with a list of origins would refuse it"
            connection.sendall(b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 2\r\n\r\nhi")  # type: ignore[attr-defined]
            return True

        engine.answer = allowing
        asks = b"Access-Control-Request-Method: POST", b"Access-Control-Request-Headers: authorization,x-stainless-os"
        may = ask(stack, "OPTIONS", CALLS[0], b"10.0.0.1:8780", b"Origin: " + PAGE, *asks)
        assert may.status == 204
        assert may.header("Access-Control-Allow-Origin") == PAGE.decode()
        assert may.header("Access-Control-Allow-Headers") == "authorization,x-stainless-os"
        for path, body, status in ((CALLS[0], call(), 200), (CALLS[0], call("no-such-model"), 404), ("/x", b"", 404)):
            for host in (b"10.0.0.1:8780", b"kyb.example"):
                answer = ask(stack, "POST", path, host, b"Origin: " + PAGE, body=body)
                assert answer.status == status
                assert answer.raw.lower().count(b"access-control-allow-origin") == 1
                assert answer.header("Access-Control-Allow-Origin") == PAGE.decode()
                assert answer.header("Vary") == "Origin"
        refused = ask(stack, "OPTIONS", CALLS[0], b"10.0.0.1", b"Origin: https://evil.example", *asks)
        assert (refused.status, refused.header("Access-Control-Allow-Origin")) == (403, None)
