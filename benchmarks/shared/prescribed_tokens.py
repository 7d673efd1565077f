"""Real vLLM that samples prescribed tokens, so that schedules can be compared on exactly the same trajectories."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

from arpo.protocol import Codec
from benchmarks.shared.tiny_model import LETTERS


class PrescribedTokens:
    """The tokens that each request "samples", by its id "prompt|trajectory|turn": a call, or after `tool_turns` turns
    an answer and the end. `length` says the number of letters; None = log-uniform from `shortest` to `longest`."""

    def __init__(
        self,
        codec: Codec,
        shortest: int = 1,
        longest: int = 1,
        *,
        tool_turns: int = 0,
        length: Callable[[str], int] | None = None,
    ):
        self.codec, self.shortest, self.longest, self.tool_turns = codec, shortest, longest, tool_turns
        self.length = length
        self.of = functools.cache(self.make)

    def make(self, request_id: str) -> list[int]:
        rng = random.Random(request_id)
        count = round(math.exp(rng.uniform(math.log(self.shortest), math.log(self.longest))))
        count = self.length(request_id) if self.length else count
        text = "".join(rng.choices(LETTERS, k=count))
        is_last = int(request_id.rsplit("|", 1)[1]) == self.tool_turns
        ids = self.codec.tokenizer.encode(text if is_last else f"<search>{text}</search>", add_special_tokens=False)
        return [*ids, self.codec.tokenizer.eos_token_id]

    def install(self, worker) -> None:
        """Wrap the sampler: it computes as ever, and then the prescribed token takes the place of the sampled one."""
        runner = worker.model_runner
        sample = runner.sampler.sample

        def prescribed(*args, **kwargs):
            sampled, logprobs = sample(*args, **kwargs)
            for row, request_id in enumerate(runner.input_batch.req_ids):
                ids, done = self.of(request_id.rsplit("-", 1)[0]), len(runner.requests[request_id].output_token_ids)
                # With asynchronous scheduling a request that has ended is in one step more, whose token nobody reads.
                sampled[row] = ids[min(done, len(ids) - 1)]
            return sampled, logprobs

        runner.sampler.sample = prescribed
