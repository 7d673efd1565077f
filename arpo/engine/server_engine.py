"""An OpenAI-compatible server as the sampler: the interface that the rollout needs of arpo.engine.Engine, over HTTP.

    submit -> POST /v1/completions, the prompt as token ids -> the whole turn as one chunk

vLLM's server says what it sampled (`return_token_ids`) and which stop string it met. Of a server that does not, the
text is tokenised again, and the stop string, which it cuts off, is that of the tool tag left open. Seeds are sent with
each request; logprobs are not asked for (NaN), entropies neither, so there is no branching.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from arpo.engine.requests import Chunk, SamplingSpec
from arpo.errors import UserError
from arpo.protocol import Codec
from arpo.tools.http.client import HttpClient, bearer, check_url, read_key
from arpo.tools.http.policy import HttpPolicy

logger = logging.getLogger(__name__)

KEY_VARIABLE = "POLICY_API_KEY"
PROBE_S = 30.0
TURN_DEADLINE_S = 1800.0
MAX_WAIT_S = 0.05
"""`step` returns after this long without any news, so that the rollout can look after its tools."""


@dataclass(frozen=True)
class _Sent:
    """A request got its turn: the chunk that says so has no tokens."""

    request_id: str


@dataclass(frozen=True)
class _Done:
    request_id: str
    choice: dict


class ServerEngine:
    """One server, one process. `submit`, `step`, `num_running`, `abort` are as in arpo.engine.Engine."""

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
        """`url`: http://host:8000 or what a client calls the base URL (.../v1); `model` "" = the only one there.

        Raises UserError, one line, where the server does not answer, has no such model, or one with less room than
        `max_model_len` tokens.
        """
        check_url(url, "eval.server")
        self.url = url.rstrip("/") + ("" if urllib.parse.urlsplit(url).path.strip("/") else "/v1")
        models = _get_json(f"{self.url}/models", bearer(read_key(KEY_VARIABLE)))
        self.model = choose_model(models, model, max_model_len, self.url)
        self.codec = codec
        self._client = HttpClient(
            "eval.server",
            f"{self.url}/completions",
            HttpPolicy(deadline_s=2 * deadline_s, max_concurrent=max_concurrent),  # a try may take half of it
            setting=f"eval.server {self.url}",
            key_variable=KEY_VARIABLE,
        )
        self._specs: dict[str, SamplingSpec] = {}
        self._tasks: dict[str, asyncio.Task] = {}
        self._news: queue.SimpleQueue[_Sent | _Done | BaseException] = queue.SimpleQueue()
        # Waiting for a turn is not part of a request's time, so the turn is taken here and not in the client.
        self._slots = asyncio.Semaphore(max_concurrent)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="arpo-server", daemon=True)
        self._thread.start()
        self._probe()

    @property
    def num_running(self) -> int:
        """Unfinished requests."""
        return len(self._specs)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        """Send one request as soon as there is room."""
        assert request_id not in self._specs, f"{request_id} is already in flight"
        assert spec.num_top_logprobs == 0, "a server's logprobs are not asked for"
        self._specs[request_id] = spec
        payload = completion_request(self.model, token_ids, spec)
        asyncio.run_coroutine_threadsafe(self._begin(request_id, payload), self._loop)

    def step(self) -> list[Chunk]:
        """Wait for news, a moment at most. Raises UserError where the server has stopped answering."""
        chunks = []
        while True:
            try:
                news = self._news.get(timeout=0 if chunks else MAX_WAIT_S)
            except queue.Empty:
                return chunks
            if isinstance(news, BaseException):
                raise news
            if news.request_id not in self._specs:
                continue  # aborted
            if isinstance(news, _Sent):
                chunks.append(Chunk(news.request_id))
            else:
                spec = self._specs.pop(news.request_id)
                chunks.append(completion_chunk(news.request_id, news.choice, spec, self.codec))

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests; unknown or finished ones are ignored."""
        for request_id in request_ids:
            if self._specs.pop(request_id, None):
                self._loop.call_soon_threadsafe(self._cancel, request_id)

    def close(self) -> None:
        """Give up what is in flight, and close the connections."""
        self._specs.clear()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    async def _begin(self, request_id: str, payload: dict) -> None:
        task = self._tasks[request_id] = asyncio.create_task(self._complete(request_id, payload))
        task.add_done_callback(lambda _: self._tasks.pop(request_id))

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _cancel(self, request_id: str) -> None:
        if task := self._tasks.get(request_id):
            task.cancel()

    async def _complete(self, request_id: str, payload: dict) -> None:
        try:
            async with self._slots:
                self._news.put(_Sent(request_id))
                self._news.put(_Done(request_id, await self._client.post(payload, _choice)))
        except OSError as error:
            fix = "what is finished is saved; start the server again, and repeat the command"
            self._news.put(UserError(f"{error} ({self.url}); {fix}"))
        except Exception as error:  # a bug, or a UserError of the client: raised by `step`, in the caller's thread
            self._news.put(error)

    def _probe(self) -> None:
        """One token, so that what is wrong is known before anything is generated."""
        spec = SamplingSpec(max_tokens=1, temperature=0.0)
        payload = completion_request(self.model, self.codec.encode("1"), spec)
        asking = asyncio.run_coroutine_threadsafe(self._client.post(payload, _choice), self._loop)
        try:
            choice = asking.result(timeout=PROBE_S)
        except (OSError, TimeoutError) as error:
            asking.cancel()
            reason = str(error) or f"no answer within {PROBE_S:g} s"
            raise UserError(f"eval.server: {self.url}/completions is of no use: {reason}") from None
        if "token_ids" not in choice:
            logger.warning("%s does not return token ids; what it samples is tokenised again", self.url)


def completion_request(model: str, token_ids: list[int], spec: SamplingSpec) -> dict[str, Any]:
    """The body of POST /v1/completions; its last three fields are vLLM's."""
    request = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "stop": list(spec.stop),
        "seed": spec.seed,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    return {name: value for name, value in request.items() if value not in (None, [])}


def completion_chunk(request_id: str, choice: dict, spec: SamplingSpec, codec: Codec) -> Chunk:
    """A whole turn from the server's choice (checked by `_choice`)."""
    text, token_ids = choice["text"], choice.get("token_ids")
    finish, stop_string = choice["finish_reason"], None
    if finish == "stop":
        reason = choice.get("stop_reason")
        stop_string = reason if isinstance(reason, str) else None
        if "stop_reason" not in choice:
            stop_string = left_open(text, spec.stop)
        finish = "stop" if stop_string else "eos"
    if token_ids is None:
        if stop_string and not text.endswith(stop_string):
            text += stop_string
        token_ids = codec.tokenizer.encode(text, add_special_tokens=False)
        token_ids += [codec.tokenizer.eos_token_id] if finish == "eos" else []
    logprobs = [float("nan")] * len(token_ids)
    return Chunk(request_id, list(token_ids), logprobs, finish=finish, stop_string=stop_string)


def left_open(text: str, stop_strings: tuple[str, ...]) -> str | None:
    """The stop string that ends a text, or that was cut off it: it would close the tag opened last.

    >>> left_open("<search> a </search> <python> 1 + 1", ("</python>", "</search>"))
    '</python>'
    """
    opened = {text.rfind(stop.replace("</", "<")): stop for stop in stop_strings}
    position = max(opened, default=-1)
    stop = opened.get(position) if position >= 0 else None
    return stop if stop and (stop not in text[position:] or text.endswith(stop)) else None


def choose_model(answer: Any, model: str, max_model_len: int, url: str) -> str:
    """The model's name there. Raises UserError where it is not served, or has too little room."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    served = {row["id"]: row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)}
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
    return name


def _choice(answer: Any) -> dict:
    """The one choice of a completion; ValueError where the answer is none."""
    try:
        choice = answer["choices"][0]
        text, finish, token_ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("no choices[0] with text and finish_reason") from None
    if not isinstance(text, str) or finish not in ("stop", "length"):
        raise ValueError(f"choices[0] ended with {finish!r}")
    if token_ids is None:
        choice.pop("token_ids", None)
    elif not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
        raise ValueError("choices[0].token_ids must be a list of numbers")
    return choice


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to wherever it points."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _get_json(url: str, headers: dict[str, str]) -> Any:
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=PROBE_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        fix = f"set {KEY_VARIABLE} to a key that it takes" if error.code in (401, 403) else "is it the base URL?"
        raise UserError(f"eval.server: {url} answers HTTP {error.code}; {fix}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"eval.server: cannot reach {url} ({reason}); start the server, or correct the URL") from None
