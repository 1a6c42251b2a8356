"""The FastAPI application: routes only. What they do is in chat, completions, generation and stream."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serving.api import chat, completions
from serving.api.backend import Backend
from serving.api.chat_body import ChatBody
from serving.api.connection import merged, while_connected
from serving.api.delivery import counted
from serving.api.errors import failure_of
from serving.api.framing import whole
from serving.api.generation import Prompt, generation_requests, tenant_of
from serving.api.middleware import AccessLog, ApiKeys, BodyLimit, bearer_token
from serving.api.record import RequestRecord
from serving.api.responses import ChatCompletion, ErrorBody, ModelCard, ModelList, TextCompletion
from serving.api.schema import CompletionBody
from serving.api.served import ServedModels
from serving.api.stream import Answer, EventStream
from serving.api.tally import Tally
from serving.api.text_body import TextBody

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024
STATUS_TIMEOUT_S = 5.0


def create_app(backend: Backend, *, api_keys: frozenset[str] = frozenset(), sends_request_id: bool = True) -> FastAPI:
    """The HTTP API over `backend`. With `api_keys`, every route but the probes asks for one of them.

    `sends_request_id` is false behind a server that sends `x-request-id` itself: one header has one value.
    """
    app = FastAPI(title="Drafthouse", docs_url=None, redoc_url=None)
    app.include_router(_probes(backend))
    app.include_router(_v1(backend))
    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_failure)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(ApiKeys, keys=api_keys)
    app.add_middleware(AccessLog, sends_id=sends_request_id)
    return app


def _probes(backend: Backend) -> APIRouter:
    router = APIRouter()
    # FastAPI's GET takes no HEAD, and a route with both would give the schema two operations of one id.
    methods = ["GET", "HEAD"]

    @router.get("/health")
    @router.api_route("/health", methods=methods, include_in_schema=False)
    async def health() -> dict[str, str]:
        """Liveness: this process answers."""
        return {"status": "ok"}

    @router.get("/ready")
    @router.api_route("/ready", methods=methods, include_in_schema=False)
    async def ready() -> Response:
        """Readiness: a Target answers and is warm; degraded where it has to do without another role."""
        try:
            status = await asyncio.wait_for(backend.status(), STATUS_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - a Target out of reach, for whatever reason, is not ready
            log.warning("the target's status is not to be had: %s", type(error).__name__)
            return JSONResponse({"status": "unreachable"}, status_code=503)
        state = "loading" if not status.ready else "degraded" if status.degraded else "ready"
        content = {"status": state, "running": status.running, "waiting": status.waiting}
        return JSONResponse(content, status_code=200 if status.ready else 503)

    return router


def _v1(backend: Backend) -> APIRouter:
    router = APIRouter(prefix="/v1", responses={"4XX": {"model": ErrorBody}})
    models = ServedModels.of(backend, created=int(time.time()))

    @router.get("/models")
    async def list_models() -> ModelList:
        return models.cards

    @router.get("/models/{name}")
    async def get_model(name: str) -> ModelCard:
        return models.card(name)

    @router.post("/chat/completions", responses={200: {"model": ChatCompletion}})
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        models.card(body.model)
        prompts = await chat.prompts_of(body, backend.tokenizer)
        return await _respond(request, body, prompts, backend=backend, framing=chat.ChatFraming)

    @router.post("/completions", responses={200: {"model": TextCompletion}})
    async def text_completions(body: TextBody, request: Request) -> Response:
        models.card(body.model)
        prompts = await completions.prompts_of(body, backend.tokenizer)
        return await _respond(request, body, prompts, backend=backend, framing=completions.TextFraming)

    return router


async def _respond(
    request: Request,
    body: CompletionBody,
    prompts: list[Prompt],
    *,
    backend: Backend,
    framing: type[chat.ChatFraming] | type[completions.TextFraming],
) -> Response:
    """Generate, and answer in one piece or as a stream; nothing is sent before every choice has begun."""
    tenant = tenant_of(body, token=bearer_token(request.headers))
    completion_id = f"{framing.id_prefix}-{uuid.uuid4().hex}"
    record = RequestRecord.of(request.scope)
    asked = [
        replace(choice, received_s=record.received_s)
        for choice in generation_requests(body, prompts, completion_id=completion_id, backend=backend, tenant=tenant)
    ]
    record.tally = tally = Tally.of(completion_id, prompts, asked)
    dressed = framing(completion_id, int(time.time()), body.model, backend.tokenizer)
    pairs = zip(asked, tally.deliveries, strict=True)
    grown = merged([counted(backend.generate(choice), delivery) for choice, delivery in pairs])
    if body.stream:
        await while_connected(request.receive, _begun(grown, tally))
        return EventStream(Answer(grown, dressed, tally, record, wants_usage=body.wants_usage))
    await while_connected(request.receive, _exhausted(grown))
    content = whole(dressed, tally).model_dump_json(exclude_unset=True)
    return Response(content, media_type="application/json")


async def _begun(grown: AsyncIterator[object], tally: Tally) -> None:
    """Until every choice has been given something. What there is by then waits in its delivery."""
    async for _ in grown:
        if tally.has_begun:
            return


async def _exhausted(grown: AsyncIterator[object]) -> None:
    async for _ in grown:
        continue


async def _answer_failure(request: Request, error: Exception) -> Response:
    return failure_of(error, request_id=RequestRecord.of(request.scope).request_id).response()
