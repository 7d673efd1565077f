"""A completions server as the sampler: the part of arpo.engine.Engine used by the rollout, over HTTP.

    python evaluate.py ... --eval.server extras/server_engine.py:ServerEngine=http://host:8000

    submit -> POST /v1/completions, the prompt as token ids -> the whole turn as one chunk

vLLM's server returns token ids (`return_token_ids`) and the matched stop string. Any other server must take prompts as
token ids and ignore unknown fields (`transformers serve` does not). The text of its answers is tokenised again. Such a
server cuts off the stop string, so this client restores the stop string of the open tool tag. Each request has a seed.
The client does not request logprobs (they are NaN) and entropies, so branching is not possible.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import Future
from typing import Any

from arpo.config.bounded import parse_json
from arpo.engine.requests import Chunk, SamplingSpec
from arpo.errors import Outage, UserError
from arpo.protocol import Codec
from arpo.tools.http.client import HttpClient, Unusable, bearer, check_url, read_key
from arpo.tools.http.policy import HttpPolicy

logger = logging.getLogger(__name__)

KEY_VARIABLE = "POLICY_API_KEY"
PROBE_S = 30.0
MAX_PROBE_BYTES = 4 << 20
TURN_DEADLINE_S = 1800.0
MAX_TOKEN_ID = 2**31 - 1
"""Limit for token ids. No vocabulary is as large, and a tokenizer accepts no larger number."""
MAX_WAIT_S = 0.05
"""`step` returns after this many seconds without news, so that the rollout can look after its tools."""


class ServerEngine:
    """A server's client with the methods `submit`, `step`, `num_running` and `abort` of arpo.engine.Engine."""

    def __init__(
        self,
        url: str,
        model: str,
        codec: Codec,
        *,
        max_model_len: int,
        max_concurrent: int,
        deadline_s: float = TURN_DEADLINE_S,
    ):
        """url: http://host:8000, or the base URL (.../v1). model: "" = the only model of the server.

        Raises UserError if the server does not answer, or does not serve this model with room for `max_model_len`
        tokens.
        """
        self.url, served = find_model(url, model, max_model_len)
        self.model = served["id"]
        self.codec = codec
        self._client = HttpClient(
            "eval.server",
            f"{self.url}/completions",
            HttpPolicy(deadline_s=2 * deadline_s, max_concurrent=max_concurrent),  # a try may take half of the deadline
            setting=f"eval.server {self.url}",
            key_variable=KEY_VARIABLE,
        )
        self._running: dict[str, tuple[SamplingSpec, Future]] = {}
        # (request id, None): the request got its turn; (request id, choice): the request is finished
        self._news: queue.SimpleQueue[tuple[str, dict | None] | Exception] = queue.SimpleQueue()
        # Waiting for a turn is not part of a request's time, so the turn is taken here and not in the client.
        self._slots = asyncio.Semaphore(max_concurrent)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="arpo-server", daemon=True)
        self._thread.start()
        self._probe()

    @staticmethod
    def served(url: str, model: str, max_model_len: int) -> str:
        """Return the name of the server's model, and the model's folder if the server reports it.

        Raises UserError like the constructor.
        """
        _, found = find_model(url, model, max_model_len)
        return f"{found['id']} ({found['root']})" if found.get("root", found["id"]) != found["id"] else found["id"]

    @property
    def num_running(self) -> int:
        """Number of unfinished requests."""
        return len(self._running)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        """Send one request as soon as there is room."""
        assert request_id not in self._running, f"{request_id} is already in flight"
        assert spec.num_top_logprobs == 0, "a server's logprobs are not asked for"
        payload = completion_request(self.model, token_ids, spec)
        future = asyncio.run_coroutine_threadsafe(self._complete(request_id, payload), self._loop)
        self._running[request_id] = spec, future

    def step(self) -> list[Chunk]:
        """Wait for news, for MAX_WAIT_S at most. Raises UserError if the server has stopped answering."""
        chunks = []
        while True:
            try:
                news = self._news.get(timeout=0 if chunks else MAX_WAIT_S)
            except queue.Empty:
                return chunks
            if isinstance(news, Exception):
                raise news
            request_id, choice = news
            if request_id not in self._running:
                continue  # aborted
            if choice is None:
                chunks.append(Chunk(request_id))
            else:
                spec, _ = self._running.pop(request_id)
                chunks.append(completion_chunk(request_id, choice, spec, self.codec))

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests; unknown or finished ones are ignored."""
        for request_id in request_ids:
            if running := self._running.pop(request_id, None):
                running[1].cancel()

    def close(self) -> None:
        """Drop all requests in flight, and close the connections."""
        self.abort(list(self._running))
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    async def _end(self) -> None:
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        await self._client.aclose()

    async def _complete(self, request_id: str, payload: dict) -> None:
        try:
            async with self._slots:
                self._news.put((request_id, None))
                self._news.put((request_id, await self._client.post(payload, _choice)))
        except OSError as error:
            fix = "what is finished is saved; start the server again, and repeat the command"
            kind = UserError if isinstance(error, Unusable) else Outage
            self._news.put(kind(f"{error} ({self.url}); {fix}"))
        except Exception as error:  # a bug, or a UserError of the client: `step` raises it in the caller's thread
            self._news.put(error)

    def _probe(self) -> None:
        """Sample one token, to see errors of the server before the first real request."""
        spec = SamplingSpec(max_tokens=1, temperature=0.0)
        payload = completion_request(self.model, self.codec.encode("1"), spec)
        asking = asyncio.run_coroutine_threadsafe(self._client.post(payload, _choice), self._loop)
        try:
            choice = asking.result(timeout=PROBE_S)
        except (OSError, TimeoutError) as error:
            asking.cancel()
            reason = str(error) or f"no answer within {PROBE_S:g} s"
            kind = UserError if isinstance(error, Unusable) else Outage
            raise kind(f"eval.server: {self.url}/completions cannot be used: {reason}") from None
        if "token_ids" not in choice:
            logger.warning("%s does not return token ids; what it samples is tokenised again", self.url)


def completion_request(model: str, token_ids: list[int], spec: SamplingSpec) -> dict[str, Any]:
    """Return the body of POST /v1/completions. Its last six fields are vLLM's own."""
    request = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "stop": list(spec.stop),
        "seed": spec.seed,
        # All off explicitly: vLLM takes missing fields from the model's generation_config.json.
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    return {name: value for name, value in request.items() if value not in (None, [])}


def completion_chunk(request_id: str, choice: dict, spec: SamplingSpec, codec: Codec) -> Chunk:
    """Make a chunk, the whole turn, from the server's choice (already checked by `_choice`)."""
    text = choice["text"]
    token_ids = choice.get("token_ids")
    finish = choice["finish_reason"]
    stop_string = None
    if finish == "stop":
        stop_string = choice["stop_reason"] if "stop_reason" in choice else left_open(text, spec.stop)
        if not isinstance(stop_string, str):  # vLLM's reason may be the id of an end token
            stop_string = None
        finish = "stop" if stop_string else "eos"
    if token_ids is None:
        if stop_string and not text.endswith(stop_string):
            text += stop_string
        token_ids = codec.tokenizer.encode(text, add_special_tokens=False)
        token_ids += [codec.tokenizer.eos_token_id] if finish == "eos" else []
    logprobs = [float("nan")] * len(token_ids)
    return Chunk(request_id, list(token_ids), logprobs, finish=finish, stop_string=stop_string)


def left_open(text: str, stop_strings: tuple[str, ...]) -> str | None:
    """Return the stop string at the end of a text, even if cut off: it closes the last opened tag. None if no tag is
    open.

    >>> left_open("<search> a </search> <python> 1 + 1", ("</python>", "</search>"))
    '</python>'
    """
    opened = {text.rfind(stop.replace("</", "<")): stop for stop in stop_strings}
    position = max(opened, default=-1)
    stop = opened.get(position) if position >= 0 else None
    return stop if stop and (stop not in text[position:] or text.endswith(stop)) else None


def find_model(url: str, model: str, max_model_len: int) -> tuple[str, dict]:
    """Return the server's base URL, and the server's description of the model.

    Raises UserError if `model` is not served, or has too little room.
    """
    check_url(url, "eval.server")
    url = url.rstrip("/") + ("" if urllib.parse.urlsplit(url).path.strip("/") else "/v1")
    answer = _get_json(f"{url}/models", bearer(read_key(KEY_VARIABLE)))
    rows = answer.get("data") if isinstance(answer, dict) else None
    rows = rows if isinstance(rows, list) else []
    served = {row["id"]: row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)}
    if not served:
        raise UserError(f"eval.server: {url}/models lists no model; is it an OpenAI-compatible server?")
    if not model and len(served) > 1:
        raise UserError(f"eval.server_model is empty, and {url} serves {', '.join(served)}; choose one")
    name = model or next(iter(served))
    if name not in served:
        raise UserError(f"eval.server_model: {url} does not serve {name!r}; it has {', '.join(served)}")
    room = served[name].get("max_model_len")
    if isinstance(room, int) and room < max_model_len:
        raise UserError(
            f"eval.server: {name} has room for {room} tokens, eval.max_prompt_tokens + rollout.max_response_tokens is "
            f"{max_model_len}; lower one of them, or serve it with a larger --max-model-len"
        )
    return url, served[name]


def _choice(answer: Any) -> dict:
    """Return the one choice of a completion. Raises ValueError for an answer that is not a completion."""
    try:
        choice = answer["choices"][0]
        text = choice["text"]
        finish = choice["finish_reason"]
        token_ids = choice.get("token_ids")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("no choices[0] with text and finish_reason") from None
    if not isinstance(text, str) or finish not in ("stop", "length"):
        raise ValueError(f"choices[0] ended with {finish!r}")
    if token_ids is None:
        choice.pop("token_ids", None)
    elif not isinstance(token_ids, list) or not all(type(t) is int and 0 <= t < MAX_TOKEN_ID for t in token_ids):
        raise ValueError(f"choices[0].token_ids must be a list of numbers from 0 to {MAX_TOKEN_ID}")
    return choice


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, because the key would go to the new address too."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _get_json(url: str, headers: dict[str, str]) -> Any:
    """Return a short answer of JSON. Raises UserError if no complete answer comes within PROBE_S."""
    asking: Future = Future()

    def ask() -> None:
        try:
            asking.set_result(_fetch(url, headers))
        except Exception as error:
            asking.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # headers sent byte by byte pass any socket timeout
    try:
        return asking.result(timeout=PROBE_S)
    except TimeoutError:
        raise Outage(f"eval.server: {url}: no answer within {PROBE_S:g} s; is it a server of models?") from None


def _fetch(url: str, headers: dict[str, str]) -> Any:
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=PROBE_S) as response:
            body = response.read(MAX_PROBE_BYTES + 1)
            if len(body) > MAX_PROBE_BYTES:
                raise ValueError(f"an answer of more than {MAX_PROBE_BYTES >> 20} MiB")
            return parse_json(body)
    except urllib.error.HTTPError as error:
        fix = f"set {KEY_VARIABLE} to a key that it takes" if error.code in (401, 403) else "is it the base URL?"
        kind = Outage if error.code == 429 or error.code >= 500 else UserError
        raise kind(f"eval.server: {url} answers HTTP {error.code}; {fix}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        kind = UserError if isinstance(error, ValueError) else Outage
        reason = getattr(error, "reason", error)
        raise kind(f"eval.server: cannot reach {url} ({reason}); start the server, or correct the URL") from None
