"""helpers.fakes.ScriptedEngine behind HTTP, as vLLM's server would be, or one that knows nothing of token ids."""

from __future__ import annotations

import json

from aiohttp import web
from helpers.fakes import ScriptedEngine, byte_tokenizer
from helpers.web_service import WebService

from arpo.engine import SamplingSpec
from arpo.protocol import TagsCodec


class ScriptedServer(WebService):
    """Answers completions with the script's turn for the results that stand in the prompt. `plain`: without vLLM's
    fields, the stop string cut off."""

    def __init__(self, script, *, plain: bool = False, max_model_len: int | None = 700):
        super().__init__(plan=[self.answer])
        self.script, self.plain, self.max_model_len = script, plain, max_model_len
        self.codec = TagsCodec(byte_tokenizer())

    async def answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/models"):
            room = {} if self.plain else {"max_model_len": self.max_model_len}
            return web.json_response({"object": "list", "data": [{"id": "tiny", **room}]})
        assert request.path == "/v1/completions", request.path
        body = json.loads(self.requests[-1].body if self.num_running == 1 else await request.read())
        return web.json_response({"choices": [self.choice(body)]})

    def choice(self, body: dict) -> dict:
        turn = self.codec.decode(body["prompt"]).count("<result>\n")  # the system prompt speaks of <result> too
        engine = ScriptedEngine(self.codec.tokenizer, lambda *_: self.script("", "", turn), tokens_per_step=10**6)
        engine.submit("p|0|0", body["prompt"], SamplingSpec(body["max_tokens"], stop=tuple(body.get("stop", ()))))
        [chunk] = engine.step()
        text = self.codec.tokenizer.decode(chunk.token_ids, skip_special_tokens=True)
        finish = "length" if chunk.finish == "length" else "stop"
        if self.plain:
            return {"text": text.removesuffix(chunk.stop_string or ""), "finish_reason": finish}
        ids = {"token_ids": chunk.token_ids, "stop_reason": chunk.stop_string}
        return {"text": text, "finish_reason": finish, **ids}
