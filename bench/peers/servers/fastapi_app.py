"""The stack of vLLM and SGLang: FastAPI, StreamingResponse or sse-starlette, a pydantic model built and dumped for each
chunk.

The chunk's models have vLLM's fields and the two costs that each of vLLM's models has (extra="allow", and a wrap
validator on the base), and are dumped as there, by model_dump_json(exclude_unset=True).
"""

import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Request, WebSocket
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, model_validator
from sse_starlette.sse import EventSourceResponse
from tokens import Source

source = Source()
app = FastAPI()
app.add_middleware(
    CORSMiddleware, allow_origins=["*"], allow_credentials=False, allow_methods=["*"], allow_headers=["*"]
)


class Base(BaseModel):
    """Looks for fields that it doesn't know, as vLLM's does in order to log them."""

    model_config = ConfigDict(extra="allow")
    names: ClassVar[set[str] | None] = None

    @model_validator(mode="wrap")
    @classmethod
    def _look_for_unknown_fields(cls, data: Any, handler: Any) -> Any:
        result = handler(data)
        if isinstance(data, dict):
            if cls.names is None:
                cls.names = set(cls.model_fields)
            any(key not in cls.names for key in data)
        return result


class Message(Base):
    """Of the request."""

    role: str
    content: str


class ChatRequest(Base):
    """A chat completion's, and `size`: the bytes of a token."""

    model: str
    messages: list[Message]
    stream: bool = False
    max_tokens: int = 16
    size: int = 5
    temperature: float | None = None
    top_p: float | None = None


class Delta(Base):
    """Of a choice."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] = Field(default_factory=list)


class StreamChoice(Base):
    """Of a chunk."""

    index: int
    delta: SerializeAsAny[Delta]
    logprobs: Any | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Chunk(Base):
    """A token's."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[StreamChoice]
    usage: Any | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None


def dump(text: str, created: int) -> str:
    """The JSON of a token's chunk."""
    choice = StreamChoice(index=0, delta=Delta(content=text), logprobs=None, finish_reason=None)
    chunk = Chunk(id="cmpl-1", object="chat.completion.chunk", created=created, choices=[choice], model="m")
    return chunk.model_dump_json(exclude_unset=True)


async def lines(request: ChatRequest) -> AsyncIterator[str]:
    """As vLLM writes them."""
    created = int(time.time())
    async for token in source.generate(request.max_tokens, request.size):
        yield f"data: {dump(token, created)}\n\n"
    yield "data: [DONE]\n\n"


async def events(request: ChatRequest) -> AsyncIterator[dict[str, str]]:
    """As sse-starlette wants them."""
    created = int(time.time())
    async for token in source.generate(request.max_tokens, request.size):
        yield {"data": dump(token, created)}
    yield {"data": "[DONE]"}


@app.post("/sse")
async def sse(request: ChatRequest, raw: Request) -> StreamingResponse:
    """Server-Sent Events, written by hand."""
    return StreamingResponse(lines(request), media_type="text/event-stream")


@app.post("/sse_starlette")
async def sse_starlette(request: ChatRequest, raw: Request) -> EventSourceResponse:
    """Server-Sent Events by sse-starlette."""
    return EventSourceResponse(events(request), sep="\n")


@app.post("/chunked")
async def chunked(request: ChatRequest, raw: Request) -> StreamingResponse:
    """A chunk of bare text for each token."""
    return StreamingResponse(source.generate(request.max_tokens, request.size), media_type="text/plain")


@app.websocket("/ws")
async def websocket(socket: WebSocket) -> None:
    """A message for each token, then close."""
    await socket.accept()
    request = ChatRequest.model_validate_json(await socket.receive_text())
    async for token in source.generate(request.max_tokens, request.size):
        await socket.send_text(token)
    await socket.close()
