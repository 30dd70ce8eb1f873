"""The API's routes, and what each is answered by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from server import playground
from server.api import anthropic_errors, openapi, operations, streams
from server.api import openai_responses as responses
from server.api.anthropic_messages import count_tokens, messages
from server.api.errors import ApiError
from server.api.generate import generate
from server.api.generation import Generation
from server.api.idempotency import Again, Once
from server.api.openai_chat import chat_completions
from server.api.openai_completions import completions
from server.api.tokens import detokenize, tokenize
from server.gateway.access import Gateway
from server.http import Call, Response, Streaming
from server.metrics import Metrics

Handler = Callable[[Call, str], Awaitable[Response | Streaming]]
MetricsAccess = Literal["open", "key", "loopback"]


@dataclass(frozen=True, slots=True)
class Route:
    """`generates`: the family (a metric label) of a route that starts streams; it is refused while draining."""

    path: str  # "*" as its last segment, or the one before, stands for any; the handler is given it
    handlers: dict[str, Handler]
    generates: str = ""
    open: bool = False  # answers without a key
    page: bool = False  # a file of the playground: no part of the API and its description
    by_token: bool = False  # a GET by EventSource or WebSocket, which send no header, may bring an access token
    websocket: bool = False
    kept: bool = False  # its name is of something that one of several processes has


@dataclass(frozen=True, slots=True)
class State:
    """What routes tell of the process that they run in. `refresh_gauges` has the engines say how they are."""

    engine_up: Callable[[], bool]
    draining: Callable[[], bool]
    refresh_gauges: Callable[[], Awaitable[None]]


class Routes:
    """`table` has every route of a server."""

    def __init__(
        self, generation: Generation, metrics: Metrics, gateway: Gateway, access: MetricsAccess, state: State
    ) -> None:
        self._generation = generation
        self._metrics = metrics
        self._gateway = gateway
        self._access = access
        self._state = state
        self._once = Once()
        self.table = [*self._generating(), *self._responses(), *self._about(), *self._operations(), *self._page()]

    def _generating(self) -> list[Route]:
        starting, telling = self._starting, self._telling
        return [
            Route("/v1/chat/completions", {"POST": starting(chat_completions)}, generates="chat"),
            Route("/v1/completions", {"POST": starting(completions)}, generates="completions"),
            Route(anthropic_errors.MESSAGES, {"POST": starting(messages)}, generates="messages"),
            Route(f"{anthropic_errors.MESSAGES}/count_tokens", {"POST": telling(count_tokens)}),
            Route("/v1/generate", {"GET": starting(generate)}, generates="generate", by_token=True),
            Route("/v1/streams/*", {"GET": self._get_stream, "DELETE": self._delete_stream}, by_token=True, kept=True),
            Route("/v1/ws", {"GET": self._need_upgrade}, generates="websocket", websocket=True, by_token=True),
        ]

    def _responses(self) -> list[Route]:
        one: dict[str, Handler] = {"GET": self._get_response, "DELETE": self._delete_response}
        create = self._starting(responses.create, responses.again)
        return [
            Route("/v1/responses", {"POST": create}, generates="responses"),
            Route("/v1/responses/input_tokens", {"POST": self._telling(responses.count_input)}),
            Route("/v1/responses/*", one, by_token=True, kept=True),
            Route("/v1/responses/*/cancel", {"POST": self._cancel_response}, kept=True),
            Route("/v1/responses/*/input_items", {"GET": self._get_input_items}, kept=True),
        ]

    def _about(self) -> list[Route]:
        return [
            Route("/v1/access-tokens", {"POST": self._post_access_token}),
            Route("/v1/models", {"GET": self._get_models}),
            Route("/v1/models/*", {"GET": self._get_model}),
            Route("/tokenize", {"POST": self._telling(tokenize)}),
            Route("/detokenize", {"POST": self._telling(detokenize)}),
            Route("/openapi.json", {"GET": self._get_openapi}),
        ]

    def _operations(self) -> list[Route]:
        return [
            Route("/health", {"GET": self._get_health}, open=True),
            Route("/ready", {"GET": self._get_ready}, open=True),
            Route("/metrics", {"GET": self._get_metrics}, open=True),
            Route("/status", {"GET": self._get_status}, open=True),
        ]

    def _page(self) -> list[Route]:
        files = playground.files(
            needs_key=self._gateway.keys.required,
            status_access=self._access,
            resume_ttl_s=self._generation.table.limits.resume_ttl_s,
        )
        return [Route(each.path, {"GET": _file(each)}, open=True, page=True) for each in files]

    # Handlers

    def _starting(
        self, begin: Callable[[Generation, Call], Awaitable[Response | Streaming]], again: Again | None = None
    ) -> Handler:
        """`begin`, unless the call comes back to a stream that was begun."""
        generation, metrics, once = self._generation, self._metrics, self._once

        async def answer(call: Call, _: str) -> Response | Streaming:
            return streams.resume_named(generation, metrics, call) or await once.answer(
                generation, metrics, call, lambda: begin(generation, call), again
            )

        return answer

    def _telling(self, tell: Callable[[Generation, Call], Awaitable[Response]]) -> Handler:
        """`tell`, which starts no stream."""

        async def answer(call: Call, _: str) -> Response:
            return await tell(self._generation, call)

        return answer

    async def _get_response(self, call: Call, name: str) -> Response | Streaming:
        return responses.retrieve(self._generation, self._metrics, call, name)

    async def _delete_response(self, call: Call, name: str) -> Response:
        return responses.delete(self._generation, call, name)

    async def _cancel_response(self, call: Call, name: str) -> Response:
        return responses.cancel(self._generation, call, name)

    async def _get_input_items(self, call: Call, name: str) -> Response:
        return responses.input_items(self._generation, call, name)

    async def _get_stream(self, call: Call, name: str) -> Response | Streaming:
        return await streams.read_stream(self._generation, self._metrics, call, name)

    async def _delete_stream(self, call: Call, name: str) -> Response:
        return streams.cancel_stream(self._generation, self._metrics, call, name)

    async def _get_models(self, call: Call, _: str) -> Response:
        model = self._generation.model
        return operations.models([model] if self._gateway.keys.may_use(call.key, model.name) else [])

    async def _get_model(self, call: Call, name: str) -> Response:
        return operations.model_named(self._generation.model, name)

    async def _post_access_token(self, call: Call, _: str) -> Response:
        return operations.access_token(self._gateway.tokens, call.key)

    async def _get_health(self, call: Call, _: str) -> Response:
        return operations.health()

    async def _get_ready(self, call: Call, _: str) -> Response:
        return operations.ready(engine=self._state.engine_up(), draining=self._state.draining())

    async def _get_openapi(self, call: Call, _: str) -> Response:
        described = [(route.path, route.handlers) for route in self.table if not route.page]
        return Response(200, openapi.document(described))

    async def _get_metrics(self, call: Call, _: str) -> Response:
        await self._state.refresh_gauges()
        return await operations.metrics(self._metrics, self._generation.elsewhere)

    async def _get_status(self, call: Call, _: str) -> Response:
        await self._state.refresh_gauges()
        return await operations.status(self._generation, self._metrics, names_keys=self._access != "open")

    async def _need_upgrade(self, call: Call, _: str) -> Response:
        headers = ((b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"))  # RFC 9110 7.8 wants both
        raise ApiError(426, "this route speaks WebSocket", headers=headers)


def _file(static: playground.StaticFile) -> Handler:
    async def get_file(call: Call, _: str) -> Response:
        return static.answer(call)

    return get_file
