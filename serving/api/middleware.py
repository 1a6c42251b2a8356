"""What every request passes before its route: an id and a log line, the API key, a bound on the body.

Pure ASGI, outermost first: AccessLog(ApiKeys(BodyLimit(app))). The inner two raise; AccessLog answers.
"""

import asyncio
import hashlib
import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.connection import ClientLeftError
from serving.api.errors import ApiError, Failure, failure_of
from serving.api.record import RequestRecord, request_id_from

REQUEST_ID_HEADER = "x-request-id"
OPEN_PATHS = frozenset({"/health", "/ready"})
CLIENT_LEFT = 499


class AccessLog:
    """Gives each request its id, logs one line for it, and answers whatever nobody else has answered.

    `sends_id` is false behind a server that puts the request's id on the response itself.
    """

    def __init__(self, app: ASGIApp, *, sends_id: bool) -> None:
        self._app = app
        self._sends_id = sends_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        record = RequestRecord(request_id_from(given, is_answered=not self._sends_id))
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if self._sends_id:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = record.request_id
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server's own way to say that the client has left
            record.outcome = "disconnected"
            raise
        finally:
            record.write(scope)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord.of(scope)
        try:
            await self._app(scope, receive, send)
        except ClientLeftError:
            record.outcome = "disconnected"
            failure = Failure(CLIENT_LEFT, "The client closed the connection.")
        except Exception as error:  # noqa: BLE001 - the process's boundary: every request gets an answer
            failure = failure_of(error, request_id=record.request_id)
            if failure.status >= 500:
                record.fail(error)
        else:
            return
        if record.status is None:
            await failure.response()(scope, receive, send)


class ApiKeys:
    """Asks for one of `keys` on every path but the probes, before the body is read; no keys, no question."""

    def __init__(self, app: ASGIApp, *, keys: frozenset[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._is_allowed(scope):
            message = "The API key is missing or wrong; send it as the header Authorization: Bearer KEY."
            raise ApiError(Failure(401, message, code="invalid_api_key"))
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        given = _digest(bearer_token(Headers(scope=scope)))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them: constant time
        return path in OPEN_PATHS or any(matches)


class BodyLimit:
    """Reads the body, at most `max_bytes` of it, and hands it on, then whatever comes after it."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        pending = [await self._read(scope, receive)]

        async def replay() -> Message:
            message = pending.pop() if pending else await receive()
            if message["type"] == "http.disconnect":
                pending.append(message)  # a server may say it once, but every later step has to hear it
            return message

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> Message:
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                raise self._too_large()
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    def _too_large(self) -> ApiError:
        return ApiError(Failure(413, f"The body may have at most {self._max_bytes} bytes.", code="too_large"))


def bearer_token(headers: Headers) -> str:
    """The token of an Authorization header; empty where there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
