"""A scripted engine and small tools, for rules that a real model cannot be made to exercise on command.

The same rollout runs on real vLLM in test_rollout_vllm.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arpo.engine import Chunk, SamplingSpec
from arpo.engine.vllm_engine import EngineStats
from arpo.tools.base import Tool, ToolResult

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A real Hugging Face tokenizer without merges: one token per byte, plus the chat tokens and two tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<search>", "</search>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT
    return fast


Script = Callable[[str, str, int], str | tuple[str, float | list[float]]]
"""(prompt_id, trajectory_id, turn index) -> the text the model "samples", or (text, entropy of its tokens in nats: one
for all, or a list with that of each of its first tokens)."""


@dataclass
class ScriptedEngine:
    """Plays a script with the interface of arpo.engine.Engine, `tokens_per_step` tokens of each request at a time."""

    tokenizer: PreTrainedTokenizerFast
    script: Script
    tokens_per_step: int = 7
    submitted: list[tuple[str, list[int], SamplingSpec]] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    num_sleeps: int = 0
    _running: dict[str, list] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        assert spec.max_tokens > 0
        self.submitted.append((request_id, token_ids, spec))
        prompt_id, trajectory_id, turn = request_id.split("|")
        text = self.script(prompt_id, trajectory_id, int(turn))
        text, entropy = text if isinstance(text, tuple) else (text, 1.0)
        ends = [(text.find(s) + len(s), s) for s in spec.stop if s in text]
        stop = min(ends)[1] if ends else None
        ids = self.tokenizer.encode(text[: min(ends)[0]] if ends else text, add_special_tokens=False)
        finish = "stop" if stop else "eos"
        if not stop:
            ids.append(self.tokenizer.eos_token_id)
        if len(ids) > spec.max_tokens:
            ids, finish, stop = ids[: spec.max_tokens], "length", None
        self._running[request_id] = [ids, entropy, finish, stop, 0, spec]

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def sleep(self) -> None:
        assert not self._running
        self.num_sleeps += 1

    def step(self) -> list[Chunk]:
        chunks = []
        for request_id, state in list(self._running.items()):
            ids, entropy, finish, stop, sent, spec = state
            new = ids[sent : sent + self.tokens_per_step]
            state[4] += len(new)
            measured = new[: max(0, spec.num_entropy_tokens - sent)]
            entropies = entropy[sent:][: len(measured)] if isinstance(entropy, list) else [entropy] * len(measured)
            done = state[4] >= len(ids)
            if done:
                del self._running[request_id]
            top = [[-0.1, -2.5]] * len(measured) if spec.num_top_logprobs else []
            chunks.append(
                Chunk(
                    request_id=request_id,
                    token_ids=new,
                    logprobs=[-0.5] * len(new),
                    entropies=entropies,
                    top_logprobs=top,
                    finish=finish if done else None,
                    stop_string=stop if done else None,
                )
            )
        return chunks


@dataclass
class EchoTool(Tool):
    """Answers with a fixed text (or what `reply` makes of the argument), after a random delay of up to `jitter_s`."""

    tag: str
    reply: str | Callable[[str], ToolResult] = "ok"
    jitter_s: float = 0.0
    arguments: list[str] = field(default_factory=list)

    async def run(self, argument: str) -> ToolResult:
        self.arguments.append(argument)
        await asyncio.sleep(random.random() * self.jitter_s)
        return self.reply(argument) if callable(self.reply) else ToolResult(self.reply, ok=True)

    async def aclose(self) -> None:
        """Nothing to release."""
