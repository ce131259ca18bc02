"""Answers that no rule can settle go to a model behind an endpoint; verdicts come back as futures.

Answers that are the same are judged once: while in flight, and with `reward.judge.cache` for good.
Whatever goes wrong (no reply, no verdict in it) becomes what `reward.judge.on_failure` says, never
an exception.

    judge = Judge(config.reward.judge)
    judge.submit(sample, first).result()
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from saccade.config.schema import JudgeConfig
from saccade.errors import ConfigError
from saccade.plugins.judges.http_client.answer_cache import AnswerCache, key_of
from saccade.plugins.judges.http_client.chat_client import ChatClient
from saccade.plugins.judges.judge_prompt import Case, case_of, compiled, question_of, read_verdict, template_text
from saccade.plugins.judges.request_queue import RequestQueue
from saccade.plugins.verifiers.hybrid import ASK
from saccade.rewards.combine import DROP_GROUP, Pending
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Sampling, Score

SECTION = "reward.judge"
WARMER = 0.2  # added to the temperature after a reply without a verdict
QUOTED = 200  # characters of a reply that a reason keeps
CHECK = Case(question="What is 1 + 1?", references=("2",), prediction="two")
FAILURES: Mapping[str, tuple[Literal["error", "abstain"], str]] = {
    "error": ("error", "judge"),
    "abstain": ("abstain", "judge"),
    "drop_group": ("error", DROP_GROUP),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    value: float | None = None  # None: there is none, and `words` say why
    words: str = ""
    stored: bool = False


@dataclass(frozen=True, kw_only=True)
class _Job:
    case: Case
    key: str
    verdict: Future[Verdict] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Judge:
    """`submit` from any thread; `metrics` tells what happened since it was last called."""

    def __init__(self, config: JudgeConfig) -> None:
        if not config.url:
            raise ConfigError(
                f"{SECTION}.url: judge and hybrid ask an endpoint, and none is named; "
                f"try {SECTION}.url=http://127.0.0.1:8000/v1"
            )
        self.config = config
        text = template_text(config.template)
        self._template = compiled(text)
        # Verdicts are cached here, and not every reply there: one without a verdict is no answer.
        self._client = ChatClient(config.model_copy(update={"cache": None}), fields=config.fields, section=SECTION)
        self._cache = AnswerCache(config.cache) if config.cache else None
        self._about: dict[str, Any] = {
            "model": self._client.model,
            "template": hashlib.sha256(text.encode()).hexdigest(),
            "scale": config.scale,
        }
        self._queue: RequestQueue[_Job] = RequestQueue(self._work, threads=config.concurrency)
        self._open: dict[str, _Job] = {}
        self._lock = threading.Lock()
        self._alive = time.monotonic()  # when the endpoint last replied
        self._counted = replace(self._client.counters)

    def check(self) -> None:
        """One small question: an endpoint that cannot be reached stops a run before it starts."""
        self._ask(CHECK, self._key(CHECK), time.monotonic() + self.config.deadline)

    def submit(self, sample: RewardSample, first: Score) -> Pending:
        """What becomes of a score that may ask for a judge."""
        if ASK not in first.info:
            self._queue.count("by_rule")
            return first
        result: Future[Score] = Future()
        case = case_of(sample, first.extracted or "", images=self.config.send_images)
        job = self._job(case)
        job.verdict.add_done_callback(lambda done: result.set_result(self._score(first, done)))
        return result

    def metrics(self) -> dict[str, float]:
        counts, latency = self._queue.take_counts()
        before, self._counted = self._counted, replace(self._client.counters)
        prompt = self._counted.prompt_tokens - before.prompt_tokens
        response = self._counted.response_tokens - before.response_tokens
        metrics: dict[str, float] = {
            "samples": counts["samples"],  # that went to the judge
            "by_rule": counts["by_rule"],  # that did not have to
            "calls": self._counted.sent - before.sent,
            "tokens": prompt + response,
            "failures": counts["failures"],
            **latency,
        }
        if counts["samples"]:
            metrics["cache_hit_rate"] = counts["free"] / counts["samples"]
        if self.config.price is not None:
            each = self.config.price
            metrics["cost"] = (prompt * each[0] + response * each[1]) / 1e6
        return {f"judge/{name}": value for name, value in metrics.items()}

    def expenses(self) -> str:
        return f"judge: {self._client.counters.describe(self.config.price)}"

    def close(self) -> None:
        """Whoever still waits gets a failure; replies under way are not waited for."""
        self._queue.close()
        self._client.stop()
        for job in list(self._open.values()):
            self._finish(job, Verdict(words="the judge was closed first"))

    # -- in threads --

    def _job(self, case: Case) -> _Job:
        """The job of a case; one for all samples that ask the same at the same time."""
        job = _Job(case=case, key=self._key(case))
        self._queue.count("samples")
        with self._lock:
            same = self._open.setdefault(job.key, job)
        if same is not job:
            self._queue.count("free")
        elif not self._queue.put(job):
            self._finish(job, Verdict(words="the judge is closed"))
        return same

    def _work(self, jobs: list[_Job]) -> None:
        (job,) = jobs
        # As long as it answers others, a judge may take its time with a long queue.
        until = max(job.since, self._alive) + self.config.deadline
        began = time.monotonic()
        try:
            verdict = self._ask(job.case, job.key, until)
        except Exception as error:  # whatever happens here, nobody may wait for ever
            verdict = Verdict(words=str(error) or type(error).__name__)
        if verdict.stored:
            self._queue.count("free")
        else:
            self._queue.timed(time.monotonic() - began)
        self._finish(job, verdict)

    def _finish(self, job: _Job, verdict: Verdict) -> None:
        with self._lock:
            mine = self._open.pop(job.key, None) is job
        if mine:
            job.verdict.set_result(verdict)

    def _ask(self, case: Case, key: str, until: float) -> Verdict:
        stored = self._cache.get(key) if self._cache else None
        if stored is not None:
            value = read_verdict(stored.text, self.config.scale)
            return Verdict(value=value, words=stored.text, stored=True)
        messages = (question_of(case, self._template, self.config.scale),)
        for attempt in range(self.config.retries + 1):
            sampling = Sampling(temperature=min(1.0, WARMER * attempt), max_tokens=self.config.max_tokens)
            answer = self._client.ask(messages, sampling, attempt, until=until)
            self._alive = time.monotonic()
            value = read_verdict(answer.text, self.config.scale)
            if value is not None and answer.finish == "stop":
                if self._cache:
                    self._cache.put(key, self._about | case.shown, answer)
                return Verdict(value=value, words=answer.text)
        return Verdict(
            words=f"no verdict (attempts: {self.config.retries + 1}); the last reply ended with "
            f"{answer.text[-QUOTED:]!r}"
        )

    def _score(self, first: Score, done: Future[Verdict]) -> Score:
        verdict = done.result()
        if verdict.value is None:
            return self._failed(first, verdict.words)
        why = " ".join(verdict.words.rpartition("\n")[0].split())[-QUOTED:]
        return Score(
            kind="value",
            value=verdict.value,
            reason="" if verdict.value >= 1 else f"judged: {why}",
            extracted=first.extracted,
        )

    def _failed(self, first: Score, why: str) -> Score:
        if self._queue.count("failures") == 1:  # the others are in the metrics
            logging.getLogger("saccade").warning("an answer could not be judged: %s", why)
        if self.config.on_failure == "rule":
            return replace(first, info={})
        kind, reason = FAILURES[self.config.on_failure]
        return Score(kind=kind, reason=f"{reason}: {why}", extracted=first.extracted)

    def _key(self, case: Case) -> str:
        return key_of(self._about | case.shown)
