"""A language model's verdict as a reward in training: 1 for an answer judged right, 0 for an answer judged wrong.

    from extras.judge_reward import JudgeReward      # in my_judge.py: --reward.terms answer=1 my_judge.py:judge=0.5

    judge = JudgeReward("http://host:8001", "NAME")  # a key: in JUDGE_API_KEY

Evaluations use the same judge (arpo/evals/judge.py). The judge works beside the rollout, and never delays a step beyond
the deadline:

    a prompt's trajectories have ended -> `begin` asks about the answers, in a separate thread
    the rollout has ended -> the call waits for open requests, at most deadline_s, and then cancels the rest

Replies are cached, so no question is asked twice. An answer without a verdict never counts as wrong.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from concurrent.futures import Future, wait
from typing import Literal

from arpo.config.evals import JudgeConfig
from arpo.errors import UserError, require
from arpo.evals.grading import extract_prediction
from arpo.evals.judge import Judge, JudgeTask, Verdict
from arpo.rewards import accuracy_function
from arpo.tools.http.client import HttpClient
from arpo.trajectory import Group, Prompt, StopReason, Trajectory

CLOSE_TIMEOUT_S = 30.0
MAX_BY_RULE_SHARE = 0.5
"""Largest share of answers scored by rule for lack of a verdict. With more, a step would learn another reward."""
Score = dict[str, float | str | None]


class JudgeReward:
    """A term for reward.terms. Its methods are for one thread."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        fallback: Literal["rule", "drop"] = "rule",
        deadline_s: float = 60.0,
        max_concurrent: int = 16,
        cache: str = "runs/judge.sqlite",
        extra_body: str = "",
        form: str = "tags",
    ):
        """url, model: of an OpenAI-compatible server.
        fallback: score of an answer without a verdict (late, failed, unclear): rule = accuracy by rule, unless more
            than half of the answers lack a verdict; drop = no score, and the trajectory is not trained on.
        deadline_s: longest time of one judgement; also the longest wait of a step for verdicts after the rollout.
        max_concurrent: requests of a rank under way at the same time.
        cache: SQLite file of the judge's replies. Runs may share the file.
        extra_body: JSON object with more fields of every request, as judge.extra_body.
        form: the run's protocol.format, to find the answer in a response.
        """
        require(fallback in ("rule", "drop"), f"fallback={fallback!r} must be rule or drop")
        require(deadline_s > 0, f"deadline_s={deadline_s} must be above 0")
        self.cfg = JudgeConfig(url=url, model=model, extra_body=extra_body, max_concurrent=max_concurrent, cache=cache)
        self.fallback, self.deadline_s, self.form = fallback, deadline_s, form
        self._judge: Judge | None = None
        self._client: HttpClient | None = None
        self._asked: dict[str, Future[tuple[Verdict, float]]] = {}
        """The judge's prompt -> verdict and seconds. Equal answers are judged once."""

    def begin(self, group: Group) -> None:
        """Begin to judge a group. All trajectories of the group must have ended."""
        for t in group.trajectories:
            if task := self._task(t, group.prompt):
                self._begin(task)

    def __call__(self, trajectories: list[Trajectory], prompts: list[Prompt]) -> list[Score]:
        """Return 1 or 0 for each trajectory; None without a verdict, if no rule may replace the verdict."""
        tasks = [self._task(t, prompt) for t, prompt in zip(trajectories, prompts, strict=True)]
        for task in filter(None, tasks):
            self._begin(task)
        asked = {task.prompt: self._asked[task.prompt] for task in tasks if task}
        wait(asked.values(), timeout=self.deadline_s)
        for prompt, future in asked.items():
            future.cancel()  # no effect on finished futures
            del self._asked[prompt]
        scores = [
            _score(asked[task.prompt]) if task else _unasked(t) for t, task in zip(trajectories, tasks, strict=True)
        ]
        missing = [i for i, score in enumerate(scores) if score.get("no_verdict")]
        if self.fallback == "rule" and len(missing) <= MAX_BY_RULE_SHARE * len(scores):
            for i in missing:
                measure = accuracy_function(prompts[i].answers, prompts[i].data_source, prompts[i].meta.get("ability"))
                by_rule = measure(tasks[i].prediction, prompts[i].answers)
                scores[i] |= {"score": by_rule, "accuracy": by_rule}
        return scores

    def _task(self, t: Trajectory, prompt: Prompt) -> JudgeTask | None:
        """Return the judge's task for a trajectory; None without an answer, or after an infrastructure error."""
        prediction = extract_prediction(t.segments, self.form)
        if not prediction or t.stop_reason == StopReason.ERROR:
            return None
        return JudgeTask(prompt.messages[-1]["content"], tuple(prompt.answers), prediction)

    def _begin(self, task: JudgeTask) -> None:
        if self._judge is None:
            self._open()
        if task.prompt not in self._asked:
            self._asked[task.prompt] = asyncio.run_coroutine_threadsafe(self._ask(task), self._loop)

    def _open(self) -> None:
        """Connect to the judge. This happens before the run, in the trial with an invented answer."""
        judge = Judge(self.cfg, self.cfg.cache, deadline_s=self.deadline_s)
        judge.probe()
        self._judge, self._slots = judge, asyncio.Semaphore(self.cfg.max_concurrent)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="arpo-judge", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    async def _ask(self, task: JudgeTask) -> tuple[Verdict, float]:
        if (recorded := self._judge.cached_verdict(task)) is not None:
            return recorded, 0.0
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

    def close(self) -> None:
        """Cancel open requests; close the client, the loop and the cache. Safe to call twice."""
        if self._judge is None:
            return

        async def close() -> None:
            asking = asyncio.all_tasks() - {asyncio.current_task()}
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            if self._client is not None:
                await self._client.aclose()

        atexit.unregister(self.close)
        with contextlib.suppress(TimeoutError):  # the work is done, and the thread is a daemon
            asyncio.run_coroutine_threadsafe(close(), self._loop).result(timeout=CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_TIMEOUT_S)
        self._loop.close()
        self._judge.close()
        self._judge = self._client = None


def _score(asked: Future[tuple[Verdict, float]]) -> Score:
    """Return the score of a finished or cancelled judgement."""
    if asked.cancelled():
        return {"score": None, "no_verdict": 1.0, "reason": "judge_late"}
    verdict, seconds = asked.result()
    timed = {"seconds": seconds} if seconds else {}
    if verdict.status in ("failed", "unparsable"):
        return {"score": None, "no_verdict": 1.0, "reason": f"judge_{verdict.status}"} | timed
    correct = float(verdict.status == "correct")
    return {"score": correct, "accuracy": correct, "no_verdict": 0.0} | timed


def _unasked(t: Trajectory) -> Score:
    if t.stop_reason == StopReason.ERROR:
        return {"score": None, "reason": "error"}
    return {"score": 0.0, "accuracy": 0.0, "no_verdict": 0.0}
