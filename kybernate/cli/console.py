"""The client of the console's HTTP API, and how it finds the console. Standard library only: commands start at once."""

import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from kybernate.addresses import address
from kybernate.cli.output import CliError, given_url, shown
from kybernate.local_stack import find_stack, stack_file

ANSWER_SECONDS = 10.0
CLOCK_SECONDS = 10.0
"""By so much an event may be stored earlier than it says: clocks of nodes differ."""
RECONNECT_SECONDS = 0.5
LOST_SECONDS = 30.0
"""Following events ends when the console has been unreachable for this long."""


def find_url() -> str:
    """``--url``, else ``KYB_URL``, else the running stack's. Raises CliError when there is none."""
    given = given_url.get()
    if given or os.environ.get("KYB_URL"):
        url = str(given or os.environ["KYB_URL"]).rstrip("/")
        try:
            return address(url)
        except ValueError as error:
            raise CliError(f"{'--url' if given else 'KYB_URL'} {url!r} {error}", 2) from None
    stack = find_stack()
    if stack is None:
        raise CliError(
            f"no stack is running on this machine ({stack_file()} does not name one); start one with: kyb up\n"
            "     or name the console with --url http://host:port or KYB_URL"
        )
    return str(stack["console"])


def own_stack() -> dict[str, Any] | None:
    """The running stack of this machine, if it is the one that ``find_url`` names."""
    stack = find_stack()
    with contextlib.suppress(CliError):  # no address: of none
        if stack is not None and _place(find_url()) == _place(str(stack["console"])):
            return stack
    return None


def _place(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return "127.0.0.1" if parts.hostname in ("localhost", "::1") else parts.hostname, parts.port


_STATES = ("active", "activating", "parked", "lost")
"""Of a model, the best first."""


@dataclass(frozen=True, slots=True)
class Console:
    """The console. Every call raises CliError when it cannot be reached or refuses."""

    url: str
    timeout: float = ANSWER_SECONDS
    """For each answer."""

    @classmethod
    def found(cls, timeout: float = ANSWER_SECONDS) -> "Console":
        """The one of ``find_url``. Raises CliError."""
        return cls(find_url(), timeout)

    def seats(self, model: str = "") -> dict[str, Any]:
        """``GET /v1/seats``, all pages: ``{"seats": [...], "models": [...], "nodes": [...]}``, of one model or all."""
        query = {"model": model} if model else {}
        body = self._page(query)
        models = {row["model"]: row for row in body.get("models", ())}
        while after := body.pop("next", ""):
            more = self._page({**query, "after": after})
            body["seats"] += more["seats"]
            body["nodes"] += more["nodes"]
            body["next"] = more.get("next", "")
            for row in more["models"]:
                if (known := models.setdefault(row["model"], row)) is not row:
                    known["seats"] += row["seats"]
                    known["state"] = min(known["state"], row["state"], key=_STATES.index)
            body["models"] = list(models.values())
        return body

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        body = self._call("GET", f"/v1/seats{'?' if query else ''}{urlencode(query)}")
        if not isinstance(body.get("seats"), list):
            raise CliError(f"{self.url}/v1/seats does not answer like the Kybernate console; check the address")
        return body

    def routers(self) -> list[dict[str, Any]]:
        """``GET /v1/routers``: those that are alive, each with what is ``unmet`` or ``unanswered``."""
        return list(self._call("GET", "/v1/routers").get("routers") or ())

    def why(self, node: str = "") -> dict[str, Any]:
        """``GET /v1/why``: ``{"nodes": [...]}``, the decisions of each manager, or of this node's, and why."""
        return self._call("GET", f"/v1/why{f'?node={quote(node)}' if node else ''}")

    def readiness(self) -> dict[str, Any]:
        """``GET /readyz``: ``{"unmet": {...}, "notes": {...}}``, also of one that is not ready."""
        return self._call("GET", "/readyz", accept=(503,))

    def date(self) -> float | None:
        """Its clock, unix seconds, by the ``Date`` of an answer (whole seconds); None: it sends none."""
        with contextlib.suppress(CliError, ValueError):
            return parsedate_to_datetime(self._send("GET", "/readyz")[0].headers["Date"]).timestamp()
        return None

    def command(self, name: str, verb: str) -> dict[str, Any]:
        """``POST /v1/seats/{name}/{verb}``: the manager's reply. The console knows which seat a name means."""
        return self._call("POST", f"/v1/seats/{quote(name)}/{verb}")

    def commands(self, name: str, verb: str) -> list[dict[str, Any]]:
        """The same for every replica of a model: ``model/x`` may name several seats, of which one is activated."""
        kind, _, model = name.partition("/")
        if kind != "model" or verb == "activate":
            return [self.command(name, verb)]
        seats = self.seats(model)["seats"]
        found = [seat for seat in seats if seat["model"] == model and seat["state"] != "free"]
        return [self.command(f"seat/{seat['seat']}", verb) for seat in found] or [self.command(name, verb)]

    def order(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """``POST /v1/seats/…/migrate``, ``/v1/groups/…/drain`` and so on: set or take away an order."""
        return self._call("POST", f"/v1/{quote(path)}", body)

    def history(self, since: float, **wanted: str | int) -> dict[str, Any]:
        """``GET /v1/history``: ``{"events": [...], "complete": ...}`` since then, unix seconds.

        ``wanted``: kind, model, group, op, limit.
        """
        query = urlencode({"since": f"{since:.3f}", **{name: value for name, value in wanted.items() if value}})
        return self._call("GET", f"/v1/history?{query}")

    def request(self, name: str) -> dict[str, Any]:
        """``GET /v1/requests/{name}``: the story of one request that was held or failed."""
        return self._call("GET", f"/v1/requests/{quote(name, safe='')}")

    def events(
        self, last_id: str | None = None, since: float | None = None
    ) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """``GET /v1/events``: first ("", None) once it is open, then (id, event) until the console ends the stream.

        It begins after the event ``last_id``, else with those since then, unix seconds, else with the next one; with
        both, the id is looked for first among those since then.
        """
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        path = "/v1/events" if since is None else f"/v1/events?since={since:.3f}"
        with self._answer("GET", path, None, headers, timeout=None) as answer:
            if answer.status != 200:
                raise self._refusal(answer.status, answer.read())
            yield "", None
            number, data = "", ""
            for raw in answer:
                line = raw.decode(errors="replace").rstrip("\r\n")
                if not line and data:
                    yield number, shown(json.loads(data))
                    data = ""
                elif line.startswith("id:"):
                    number = line[3:].strip()
                elif line.startswith("data:"):
                    data += line[5:].strip()

    def _send(self, method: str, path: str, body: object = None) -> tuple[http.client.HTTPResponse, bytes]:
        content = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        with self._answer(method, path, content, headers, self.timeout) as answer:
            return answer, answer.read()

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, content: str | None, headers: dict[str, str], timeout: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        parts, headers = urlsplit(self.url), headers | _key()
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        try:
            connection.request(method, parts.path.rstrip("/") + path, content, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            text = f"the console at {self.url} does not answer ({why}); is the stack running? (kyb up, or --url)"
            raise CliError(text, reason="unreachable") from None
        finally:
            connection.close()

    def _call(self, method: str, path: str, body: object = None, accept: tuple[int, ...] = ()) -> dict[str, Any]:
        answer, data = self._send(method, path, body)
        if answer.status >= 400 and answer.status not in accept:
            raise self._refusal(answer.status, data)
        try:
            found = shown(json.loads(data)) if data else {}
            return found if isinstance(found, dict) else {}
        except ValueError:
            raise CliError(f"{self.url}{path} does not answer with JSON; is this the Kybernate console?") from None

    def _refusal(self, status: int, data: bytes) -> CliError:
        """Its error text; without one, the beginning of its answer."""
        try:
            error = shown(json.loads(data)["error"])
            code, text = str(error.get("code")), str(error["message"])
            if code in ("invalid_api_key", "insufficient_permissions"):
                text = (
                    f"{text.partition('; send ')[0]}; KYB_API_KEY_FILE names the file of your key (kyb router keys add)"
                )
            return CliError(text, 2 if code in ("ambiguous_name", "invalid_field") else 1, reason=code)
        except (ValueError, KeyError, TypeError):
            reason = shown(data[:200].decode(errors="replace").strip()) or "without a reason"
            return CliError(f"the console at {self.url} refused (HTTP {status}): {reason}")


def follow_events(
    console: Console,
    show: Callable[[dict[str, Any]], None],
    *,
    again: bool,
    last_id: str | None = None,
    since: float | None = None,
) -> None:
    """Call ``show`` with each event, once. ``again``: after a break, reconnect and continue after the last one shown.
    ``last_id``: begin after this one; ``since``: with the stored ones since then, unix seconds.

    Raises CliError when the first connection fails, or when it is unreachable for ``LOST_SECONDS``.
    """
    reached = False
    lost_at: float | None = None
    began = time.time()
    while True:
        try:
            for number, event in console.events(last_id, since):
                reached, lost_at = True, None
                if event is not None:
                    last_id, since = number or last_id, float(event.get("at", began)) - CLOCK_SECONDS
                    show(event)
        except CliError:
            lost_at = lost_at or time.monotonic()
            # The first connection must succeed: a wrong address is not an interruption.
            if not again or not reached or time.monotonic() - lost_at > LOST_SECONDS:
                raise
        if not again:
            return
        since = since or began
        time.sleep(RECONNECT_SECONDS)


def _key() -> dict[str, str]:
    """The API key in the file that KYB_API_KEY_FILE names, for routers that ask for one."""
    file = os.environ.get("KYB_API_KEY_FILE")
    if not file:
        return {}
    from kybernate.files import read

    why = "is not one word"
    try:
        words = read(Path(file)).decode("utf-8-sig", errors="replace").split()
    except OSError as error:
        words, why = [], f"{error.strerror}"
    if len(words) != 1 or not words[0].isascii():
        raise CliError(f"KYB_API_KEY_FILE={file}: {why}; it must hold a key that kyb router keys add has shown")
    return {"Authorization": f"Bearer {words[0]}"}
