"""Real vLLM with prescribed tokens instead of samples: schedules can be compared on exactly the same trajectories."""

from __future__ import annotations

import functools
import math
import random

from arpo.protocol import Codec
from benchmarks.shared.tiny_model import LETTERS


class PrescribedTokens:
    """The prescribed tokens of each request, by the request's id "prompt|trajectory|turn".

    The first `tool_turns` turns are calls, the next one is an answer and the end token. The number of letters is
    log-uniform from `shortest` to `longest`.
    """

    def __init__(self, codec: Codec, shortest: int = 1, longest: int = 1, *, tool_turns: int = 0):
        self.codec = codec
        self.shortest = shortest
        self.longest = longest
        self.tool_turns = tool_turns
        self.of = functools.cache(self.make)

    def make(self, request_id: str) -> list[int]:
        rng = random.Random(request_id)
        count = round(math.exp(rng.uniform(math.log(self.shortest), math.log(self.longest))))
        text = "".join(rng.choices(LETTERS, k=count))
        is_last = int(request_id.rsplit("|", 1)[1]) == self.tool_turns
        ids = self.codec.tokenizer.encode(text if is_last else f"<search>{text}</search>", add_special_tokens=False)
        return [*ids, self.codec.tokenizer.eos_token_id]

    def install(self, worker) -> None:
        """Wrap the sampler: it computes as before, then the prescribed token replaces the sampled one."""
        runner = worker.model_runner
        sample = runner.sampler.sample

        def prescribed(*args, **kwargs):
            sampled, logprobs = sample(*args, **kwargs)
            for row, request_id in enumerate(runner.input_batch.req_ids):
                ids = self.of(request_id.rsplit("-", 1)[0])
                num_done = len(runner.requests[request_id].output_token_ids)
                # With asynchronous scheduling a finished request is in one more step. Nobody reads that token.
                sampled[row] = ids[min(num_done, len(ids) - 1)]
            return sampled, logprobs

        runner.sampler.sample = prescribed
