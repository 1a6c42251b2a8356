"""The FastAPI application: routes only. What they do is in chat, completions, generation and stream."""

import asyncio
import logging
import time
from dataclasses import replace

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serving.api import chat, completions
from serving.api.backend import Backend
from serving.api.connection import while_connected
from serving.api.delivery import Delivery, counted, exhausted
from serving.api.errors import failure_of
from serving.api.generation import Prompt, generation_request, tenant_of
from serving.api.middleware import AccessLog, ApiKeys, BodyLimit, bearer_token
from serving.api.record import RequestRecord
from serving.api.responses import ChatCompletion, ErrorBody, ModelCard, ModelList, TextCompletion
from serving.api.schema import ChatBody, CompletionBody, TextBody
from serving.api.served import ServedModels
from serving.api.stream import Answer, EventStream

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024
STATUS_TIMEOUT_S = 5.0


def create_app(backend: Backend, *, api_keys: frozenset[str] = frozenset()) -> FastAPI:
    """The HTTP API over `backend`. With `api_keys`, every route but the probes asks for one of them."""
    app = FastAPI(title="Drafthouse", docs_url=None, redoc_url=None)
    app.include_router(_probes(backend))
    app.include_router(_v1(backend))
    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_failure)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(ApiKeys, keys=api_keys)
    app.add_middleware(AccessLog)
    return app


def _probes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Liveness: this process answers."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> Response:
        """Readiness: a Target answers and is warm; degraded where it has to do without its drafter."""
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
        prompt = await chat.prompt_of(body, backend.tokenizer)
        return await _respond(request, body, prompt, backend=backend, framing=chat.ChatFraming)

    @router.post("/completions", responses={200: {"model": TextCompletion}})
    async def text_completions(body: TextBody, request: Request) -> Response:
        models.card(body.model)
        prompt = await completions.prompt_of(body, backend.tokenizer)
        return await _respond(request, body, prompt, backend=backend, framing=completions.TextFraming)

    return router


async def _respond(
    request: Request,
    body: CompletionBody,
    prompt: Prompt,
    *,
    backend: Backend,
    framing: type[chat.ChatFraming] | type[completions.TextFraming],
) -> Response:
    """Generate, and answer in one piece or as a stream; nothing is sent before the first chunk is there."""
    tenant = tenant_of(body, token=bearer_token(request.headers))
    asked = generation_request(body, prompt, id_prefix=framing.id_prefix, backend=backend, tenant=tenant)
    record = RequestRecord.of(request.scope)
    asked = replace(asked, received_s=record.received_s)
    delivery = Delivery(asked.request_id, len(prompt.ids))
    record.delivery = delivery
    dressed = framing(asked.request_id, int(time.time()), body.model)
    chunks = counted(backend.generate(asked), delivery)
    if body.stream:
        await while_connected(request.receive, anext(chunks))
        return EventStream(Answer(chunks, dressed, delivery, record, wants_usage=body.wants_usage))
    await while_connected(request.receive, exhausted(chunks))
    return Response(dressed.whole(delivery).model_dump_json(), media_type="application/json")


async def _answer_failure(request: Request, error: Exception) -> Response:
    return failure_of(error, request_id=RequestRecord.of(request.scope).request_id).response()
