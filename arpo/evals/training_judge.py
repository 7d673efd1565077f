"""The judge as a reward: it works beside the rollout, and never holds a step up past its deadline.

    a prompt's trajectories have ended -> `begin` looks into the cache, and asks for the rest, in a thread of its own
    the rollout has ended -> `collect` waits for what is under way, at most deadline_s, and breaks the others off

An answer without a verdict is a warning and a count; sampling/health.py ends the run where there are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path

from arpo.config.evals import TrainingJudgeConfig
from arpo.errors import UserError
from arpo.evals.grading import predicted
from arpo.evals.judge import Judge, JudgeTask, Verdict
from arpo.metrics import Metrics
from arpo.tools.http.client import HttpClient
from arpo.trajectory import Group, StopReason, Trajectory

CLOSE_TIMEOUT_S = 30.0
Asked = Future[tuple[Verdict, float]]
"""The verdict, and the seconds that it took."""


class TrainingJudge:
    """Judges the answers of one rank's trajectories. Its methods are for one thread."""

    def __init__(self, cfg: TrainingJudgeConfig, cache: str | Path, *, form: str = "tags", probes: bool = True):
        """`cache` is the file of replies if `cfg.cache` is empty; `form` the protocol.format of the responses. With
        `probes` it asks something small first: raises UserError where the judge cannot be reached.
        """
        self.cfg, self._form = cfg, form
        self._judge = Judge(cfg, cache, deadline_s=cfg.deadline_s)
        if probes:
            self._judge.probe()
        self._start_step()
        self._client: HttpClient | None = None
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(cfg.max_concurrent)
        self._thread = threading.Thread(target=self._loop.run_forever, name="arpo-judge", daemon=True)
        self._thread.start()

    def _start_step(self) -> None:
        self._metrics = Metrics()
        self._asked: dict[str, Asked] = {}  # by the judge's prompt: equal answers are asked about once

    def begin(self, group: Group, seconds: list[float] | None = None) -> None:
        """Begin to judge a group whose trajectories have all ended (but for those that an error of ours did end).

        A verdict that need not be asked for is filled in at once, the others by `collect`.
        """
        for t, task in self._unjudged(group):
            self._begin_one(t, task)

    def _unjudged(self, group: Group) -> list[tuple[Trajectory, JudgeTask]]:
        question, answers = group.prompt.messages[-1]["content"], tuple(group.prompt.answers)
        return [
            (t, JudgeTask(question, answers, predicted(t.segments, self._form)))
            for t in group.trajectories
            if t.stop_reason != StopReason.ERROR and t.verdict is None and not t.verdict_reason
        ]

    def _begin_one(self, t: Trajectory, task: JudgeTask) -> None:
        if not task.prediction:
            t.verdict = 0.0
        elif task.prompt in self._asked:
            return
        elif (verdict := self._judge.recorded(task)) is not None:
            self._metrics.sum("judge/cached", 1)
            _fill(t, verdict)
        else:
            self._asked[task.prompt] = asyncio.run_coroutine_threadsafe(self._ask(task), self._loop)

    async def _ask(self, task: JudgeTask) -> tuple[Verdict, float]:
        if self._client is None:
            self._client = self._judge.client()
            self._client.was_probed()
        async with self._slots:
            started = time.perf_counter()
            try:
                verdict = await self._judge.ask(self._client, task)
            except (OSError, UserError) as error:  # UserError: the key is refused from now on
                verdict = Verdict("failed", str(error))
            return verdict, time.perf_counter() - started

    def collect(self, groups: list[Group]) -> None:
        """Fill in the verdicts of all trajectories, or why there is none, unless an error of ours ended them."""
        for group in groups:
            self.begin(group)
        wait(self._asked.values(), timeout=self.cfg.deadline_s)
        for asked in self._asked.values():
            asked.cancel()  # of those that are done nothing changes
        for t, task in (pair for group in groups for pair in self._unjudged(group)):
            asked = self._asked[task.prompt]
            if asked.cancelled():
                t.verdict_reason = "judge_late"
            else:
                _fill(t, asked.result()[0])

    def end_step(self) -> Metrics:
        """Return the numbers of the step, and begin the next one. Its verdicts have been collected."""
        metrics = self._metrics
        metrics.sum("judge/calls", len(self._asked))
        for name in ("cached", "failed", "late", "unparsable"):
            metrics.sum(f"judge/{name}", 0)
        for asked in self._asked.values():
            if asked.cancelled():
                metrics.sum("judge/late", 1)
                continue
            verdict, seconds = asked.result()
            if verdict.status in ("failed", "unparsable"):
                metrics.sum(f"judge/{verdict.status}", 1)
            metrics.percentiles("judge/seconds", seconds)
        self._start_step()
        return metrics

    def close(self) -> None:
        """Break off what is under way; close the client, the loop and the cache."""

        async def close() -> None:
            asking = asyncio.all_tasks() - {asyncio.current_task()}
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            if self._client is not None:
                await self._client.aclose()

        with contextlib.suppress(TimeoutError):  # the work is done, and the thread is a daemon
            asyncio.run_coroutine_threadsafe(close(), self._loop).result(timeout=CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_TIMEOUT_S)
        self._loop.close()
        self._judge.close()


def _fill(t: Trajectory, verdict: Verdict) -> None:
    if verdict.status in ("failed", "unparsable"):
        t.verdict_reason = f"judge_{verdict.status}"
    else:
        t.verdict = float(verdict.status == "correct")
