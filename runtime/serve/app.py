"""The server's paths, as an ASGI application that other programs can mount."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..api.model import Model
from ..backends.allocator import return_regularly
from ..decoding.grammar import Grammar, GrammarError
from .answers import Answer, ChatAnswer, Part, TextAnswer
from .bodies import Body, ChatBody, CompletionBody
from .completions import Completions, Request
from .connection import EventStream, read, unless_gone
from .grammars import Grammars
from .guard import Access, Guard, Line
from .json_body import decoded
from .metrics import Metrics
from .problems import Problem
from .slots import Slots
from .spelling import Spelling
from .tools import Tools

_PAGE = Path(__file__).with_name("page.html")
# The page may run and load only its own style and script.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src "
    "'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class Limits:
    """The most of everything that a client may use.

    body: bytes. tokens: new tokens per text, 0 for the rest of the capacity. prompt: tokens, 0 for the capacity.
    seconds: decoding time per text, without waiting. queue: texts that wait for a stream. choices: texts per request.
    patience: seconds for a body to arrive, and for a client to read sent data.
    """

    body: int = 8 << 20
    tokens: int = 0
    prompt: int = 0
    seconds: float = 600.0
    queue: int = 32
    choices: int = 16
    patience: float = 30.0


class Server:
    """Answers requests for one model."""

    def __init__(self, model: Model, name: str, limits: Limits, access: Access, log_prompts: bool = False) -> None:
        """name: the model's name in requests. log_prompts: whether to log texts too."""
        self._model = model
        self._name = name
        self._limits = limits
        self._access = access
        self._log_prompts = log_prompts
        self._longest_token = max(map(len, model.bundle.tokenizer.get_vocab()), default=1)
        self._slots = Slots(model.streams, limits.queue)
        self._grammars = Grammars(model.matchers, len(model.streams), limits.queue)
        self._metrics = Metrics(self._slots)
        self._completions = Completions(model, self._slots, self._metrics)
        self._spelling = Spelling(model.bundle.tokenizer)
        self._started = int(time())
        self._guard = Guard(access, self._metrics)

    def app(self) -> Starlette:
        guard = self._guard
        gets = {"/metrics": self._text_metrics, "/v1/models": self._models, "/v1/models/{name:path}": self._one_model}
        posts = {"/v1/chat/completions": self._chat, "/v1/completions": self._text}
        routes = [
            Route("/", guard(self._page, keyed=False), methods=["GET"]),
            Route("/health", guard(self._health, keyed=False), methods=["GET"]),
            *(Route(path, guard(work), methods=["GET"]) for path, work in gets.items()),
            *(Route(path, guard(work), methods=["POST"]) for path, work in posts.items()),
        ]
        cors = Middleware(
            CORSMiddleware, allow_origins=self._access.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            returning = asyncio.create_task(return_regularly())
            yield
            returning.cancel()
            self._grammars.close()
            self._slots.close()

        return Starlette(
            routes=routes,
            middleware=[cors] if self._access.origins else [],
            exception_handlers={HTTPException: self._refused},
            lifespan=lifespan,
        )

    async def _refused(self, request: HttpRequest, error: Exception) -> Response:
        """The response for unknown paths and methods."""
        problem = Problem(
            404, f"{request.scope['path']} is not supported: see docs/serving.md", code="unsupported_path"
        )
        if isinstance(error, HTTPException) and error.status_code == 405:
            problem = Problem(
                405,
                f"{request.scope['path']} does not take {request.method}: see docs/serving.md",
                headers=error.headers or {},
            )
        self._guard.ended(request, Line(), problem.status)
        return problem.response()

    async def _page(self, request: HttpRequest, line: Line) -> Response:
        return HTMLResponse(_PAGE.read_text("utf-8"), headers=_PAGE_HEADERS)

    async def _health(self, request: HttpRequest, line: Line) -> Response:
        return JSONResponse({"status": "ok"})

    async def _text_metrics(self, request: HttpRequest, line: Line) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: HttpRequest, line: Line) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: HttpRequest, line: Line) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        sizes = {"max_model_len": self._model.capacity}
        return {"id": self._name, "object": "model", "created": self._started, "owned_by": "gumiho", **sizes}

    def _require_model(self, name: str) -> None:
        if name != self._name:
            raise Problem(
                404, f"there is no model {name!r}: this server has {self._name!r}", "model", "model_not_found"
            )

    async def _chat(self, request: HttpRequest, line: Line) -> Response:
        body = ChatBody.of(await self._body(request, line))
        self._require_model(body.model)
        template = self._model.chat_template
        if template is None:
            raise Problem(
                400,
                "this model has no chat template: send a prompt to /v1/completions",
                "messages",
                "unsupported_parameter",
            )
        tools = body.offered(template.with_tools.text)
        listed = [tool.model_dump(exclude_none=True) for tool in body.tools] if tools else None
        self._require_choices(body.n)
        self._require_room(body.written)
        messages = body.conversation(template.all_text)
        # In a thread, like everything that can take long, so that other requests are answered meanwhile.
        prompt = await asyncio.to_thread(self._model.chat, messages, listed, body.variables, body.special_tokens)
        if tools and tools.mark:
            prompt += self._model.encode(tools.mark, special=False)
        asked = self._asked(body, [prompt], body.limit, tools.guide() if tools else body.guide())
        answer = ChatAnswer(self._name, self._spelling, body.logprobs, body.streams_usage, tools=tools)
        return await self._answer(request, line, body, asked, answer, tools or body)

    async def _text(self, request: HttpRequest, line: Line) -> Response:
        body = CompletionBody.of(await self._body(request, line))
        self._require_model(body.model)
        encode, given = self._model.encode, body.prompts()
        self._require_choices(body.n * len(given))
        self._require_room(max((len(one) for one in given if isinstance(one, str)), default=0))
        prompts = [await asyncio.to_thread(encode, one) if isinstance(one, str) else one for one in given]
        asked = self._asked(body, prompts, body.limit, body.guide())
        listed = body.logprobs is not None
        answer = TextAnswer(self._name, self._spelling, listed, body.streams_usage)
        return await self._answer(request, line, body, asked, answer, body)

    async def _body(self, request: HttpRequest, line: Line) -> Any:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "the content type is not application/json: send JSON")
        content = await read(request, self._limits.body, self._limits.patience)
        line.body = content if self._log_prompts else b""
        return decoded(content)

    def _require_choices(self, count: int) -> None:
        if not 1 <= count <= self._limits.choices:
            raise Problem(400, f"{count} texts in one request: ask for 1 to {self._limits.choices}", "n")

    def _require_room(self, characters: int) -> None:
        """Raises Problem for a text that cannot fit however it is tokenized, before tokenizing it. characters: its
        length."""
        if characters > self._model.capacity * self._longest_token:
            raise Problem(
                400,
                f"the prompt has {characters} characters, more than {self._model.capacity} tokens hold: shorten it",
                code="context_length_exceeded",
            )

    def _asked(self, body: Body, prompts: Sequence[Sequence[int]], limit: int | None, guide: Grammar | None) -> Request:
        """The request of a body, within the limits. Raises Problem and InputError."""
        limits = self._limits
        if limits.prompt and (longest := max(map(len, prompts))) > limits.prompt:
            raise Problem(
                400,
                f"the prompt has {longest} tokens and this server takes {limits.prompt}: shorten it",
                code="context_length_exceeded",
            )
        most = min(limit if limit is not None else self._model.capacity, limits.tokens or self._model.capacity)
        seconds = limits.seconds or inf
        return Request(prompts, [body.settings(most, seconds, guide, choice) for choice in range(body.n)])

    async def _answer(
        self, request: HttpRequest, line: Line, body: Body, asked: Request, answer: Answer, guide: Body | Tools
    ) -> Response:
        """guide: the source of the grammar, if there is one."""
        line.asked, line.streams = asked, body.stream
        try:
            await unless_gone(request.receive, self._check(asked, line))
        except GrammarError as error:
            raise guide.refused(error) from None
        line.held.callback(self._slots.admit(asked.choices))
        if body.stream:
            return EventStream(self._chunks(body, asked, answer), self._limits.patience)
        choices: list[list[Part]] = [[] for _ in range(asked.choices)]

        async def whole() -> None:
            async for index, part in self._completions.run(asked):
                choices[index].append(part)

        await unless_gone(request.receive, whole())
        return JSONResponse(answer.whole(choices, asked.usage))

    async def _check(self, asked: Request, line: Line) -> None:
        """Compiles the request's grammar. Raises InputError if the request cannot be decoded."""
        if guide := asked.settings[0].grammar:
            prepared = await self._grammars.prepare(guide, line.held)
            asked.settings = [replace(settings, grammar=prepared) for settings in asked.settings]
        await asyncio.to_thread(self._completions.check, asked)

    async def _chunks(self, body: Body, asked: Request, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        for index in range(asked.choices):
            for chunk in answer.openings(index):
                yield chunk
        async for index, part in self._completions.run(asked):
            for chunk in answer.chunks(index, part):
                yield chunk
        if body.streams_usage:
            yield answer.usage(asked.usage)
