"""Sends answers that no rule can decide to a judge model behind an endpoint; verdicts are returned as futures.

Equal cases are judged once: while a request is in flight, and permanently with `reward.judge.cache`. A failure (no
reply, no verdict in it) is handled as `reward.judge.on_failure` says and never raises.

Of the policy's text the judge sees only the extracted answer: on one line, truncated, and escaped so that it cannot
close the tags around it or contain tokens of a chat template. Only the judge's last line is read as the verdict.

    >>> read_verdict("The answer says Score: 1.\\nScore: 0", scale=1)
    0.0
"""

import hashlib
import logging
import re
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from saccade.config.schema import JudgeConfig
from saccade.data.prompts import sandboxed
from saccade.errors import ConfigError
from saccade.plugins.judges.http_client.chat_client import ChatClient, cost, key_of, store_answer, stored_answer
from saccade.plugins.judges.http_client.sender import RequestQueue
from saccade.plugins.verifiers.short_answers import ASK
from saccade.rewards.combine import DROP_GROUP, Pending
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Media, Message, Sampling, Score

SHIPPED = Path(__file__).with_name("judge.jinja")
LONGEST_ANSWER = 2000  # characters of an answer that the judge sees
NEEDED = ("question", "references", "prediction")  # variables of a template
VERDICT = re.compile(r"[*_`\s]*score[*_`\s]*[:=][*_`\s]*(\d{1,6})(?:\.0+)?[*_`\s]*\.?", re.IGNORECASE)
MARK = re.compile(r"<(?=\S)|\[(?=/?[A-Z_]{3,}\])")  # <|im_end|>, </s>, [INST]


class Case(NamedTuple):
    asked: dict[str, Any]  # template variables and image keys, which identify a case
    media: tuple[Media, ...] = ()


def case_of(sample: RewardSample, answer: str, *, images: bool = False) -> Case:
    question = "\n".join(str(m["content"]) for m in sample.messages if m["role"] == "user")
    media = tuple(sample.media) if images else ()
    shown = {
        "question": question or sample.prompt,
        "references": list(filter(None, sample.golds)),
        "prediction": _harmless(answer),
        "images": ["/".join(map(str, medium.key)) for medium in media],
    }
    return Case(shown, media)


def _harmless(answer: str) -> str:
    line = MARK.sub(lambda found: f"{found[0]} ", " ".join(answer.split()))
    line = "".join(c for c in line if c.isprintable())
    return line if len(line) <= LONGEST_ANSWER else line[:LONGEST_ANSWER] + " [cut]"


def question_of(case: Case, template: Any, scale: int) -> Message:
    return Message(role="user", parts=(*case.media, template.render(case.asked, scale=scale)))


def compiled(source: str) -> Any:
    template, used = sandboxed(source, "reward.judge.template", trim_blocks=True, lstrip_blocks=True)
    missing, unknown = set(NEEDED) - used, used - {*NEEDED, "scale"}
    if missing or unknown:
        problem = f"does not use {sorted(missing)}" if missing else f"uses unknown variables {sorted(unknown)}"
        helps = "write {{ question }}, {{ references }} and {{ prediction }}, and ask for a last line like Score: 1"
        raise ConfigError(f"reward.judge.template: it {problem}; {helps}")
    return template


def read_verdict(reply: str, scale: int) -> float | None:
    """The score in the last line divided by `scale`; None if the last line is no valid verdict."""
    found = VERDICT.fullmatch(reply.rstrip().rpartition("\n")[2])
    score = int(found[1]) if found else -1
    return score / scale if 0 <= score <= scale else None


SECTION = "reward.judge"
WARMER = 0.2  # added to the temperature after a reply without a verdict
QUOTED = 200  # characters of a reply that are quoted in a reason
CHECK = Case({"question": "What is 1 + 1?", "references": ["2"], "prediction": "two", "images": []})


class Verdict(NamedTuple):
    words: str
    value: float | None = None  # None: no verdict; `words` has the reason
    stored: bool = False


class Judge:
    """`submit` may be called from any thread; `metrics` counts since its last call."""

    def __init__(self, config: JudgeConfig) -> None:
        if not config.url:
            why = "judge and hybrid ask an endpoint, and none is named"
            raise ConfigError(f"{SECTION}.url: {why}; try {SECTION}.url=http://127.0.0.1:8000/v1")
        self.config = config
        text = (Path(config.template) if config.template else SHIPPED).read_text(encoding="utf-8")
        self._template = compiled(text)
        # The client's cache is off: only replies with a verdict are cached, by this class.
        self._client = ChatClient(config.model_copy(update={"cache": None}), fields=config.fields, section=SECTION)
        self._cache = config.cache or ""
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._key_fields: dict[str, Any] = {"model": self._client.model, "template": digest, "scale": config.scale}
        self._queue = RequestQueue(self._work, threads=config.concurrency)
        self._in_flight: dict[str, Future[Verdict]] = {}  # cases that are being judged, by key
        self._lock = threading.Lock()
        self._alive = time.monotonic()  # when the endpoint last replied
        self._counted = Counter(self._client.counters)

    def check(self) -> None:
        """Judge one small case, so that a run does not start with an unreachable endpoint."""
        self._ask(CHECK, self._key(CHECK), time.monotonic() + self.config.deadline)

    def submit(self, sample: RewardSample, first: Score) -> Pending:
        """Returns `first`, or a future of the judge's score if its info has ASK."""
        if ASK not in first.info:
            self._queue.count("by_rule")
            return first
        case = case_of(sample, first.extracted or "", images=self.config.send_images)
        key, mine, result = self._key(case), Future[Verdict](), Future[Score]()
        self._queue.count("samples")
        with self._lock:
            verdict = self._in_flight.setdefault(key, mine)
        if verdict is not mine:  # the same case is in flight for another sample
            self._queue.count("free")
        elif not self._queue.put((case, key, time.monotonic())):
            self._finish(key, Verdict("the judge is closed"))
        verdict.add_done_callback(lambda done: result.set_result(self._score(first, done.result())))
        return result

    def metrics(self) -> dict[str, float]:
        """Counts of `samples` sent to the judge, of those decided `by_rule`, and of calls, tokens and cost."""
        counts, metrics = self._queue.take_counts()
        now = Counter(self._client.counters)
        new, self._counted = now - self._counted, now
        metrics |= {name: counts[name] for name in ("samples", "by_rule", "failures")}
        metrics |= {"calls": new["sent"], "tokens": new["prompt_tokens"] + new["response_tokens"]}
        if counts["samples"]:
            metrics["cache_hit_rate"] = counts["free"] / counts["samples"]
        if self.config.price is not None:
            metrics["cost"] = cost(new, self.config.price)
        return {f"judge/{name}": value for name, value in metrics.items()}

    def expenses(self) -> str:
        return f"judge: {self._client.expenses()}"

    def close(self) -> None:
        """Pending samples get a failure; does not wait for requests in flight."""
        self._queue.close()
        self._client.stop()
        for key in list(self._in_flight):
            self._finish(key, Verdict("the judge was closed first"))

    # -- in threads --

    def _work(self, jobs: list[tuple[Case, str, float]]) -> None:
        ((case, key, since),) = jobs
        # Time in the queue does not count against the deadline while the endpoint replies to other requests.
        until = max(since, self._alive) + self.config.deadline
        began = time.monotonic()
        try:
            verdict = self._ask(case, key, until)
        except Exception as error:  # every future must get a result
            verdict = Verdict(str(error) or type(error).__name__)
        if verdict.stored:
            self._queue.count("free")
        else:
            self._queue.timed(time.monotonic() - began)
        self._finish(key, verdict)

    def _finish(self, key: str, verdict: Verdict) -> None:
        with self._lock:
            waiting = self._in_flight.pop(key, None)
        if waiting is not None:
            waiting.set_result(verdict)

    def _ask(self, case: Case, key: str, until: float) -> Verdict:
        scale, attempts = self.config.scale, self.config.retries + 1
        if (stored := stored_answer(self._cache, key)) is not None:
            return Verdict(stored.text, read_verdict(stored.text, scale), stored=True)
        messages = (question_of(case, self._template, scale),)
        for attempt in range(attempts):
            sampling = Sampling(temperature=min(1.0, WARMER * attempt), max_tokens=self.config.max_tokens)
            answer = self._client.ask(messages, sampling, attempt, until=until)
            self._alive = time.monotonic()
            value = read_verdict(answer.text, scale)
            if value is not None and answer.finish == "stop":
                store_answer(self._cache, key, self._key_fields | case.asked, answer)
                return Verdict(answer.text, value)
        return Verdict(f"no verdict (attempts: {attempts}); the last reply ended with {answer.text[-QUOTED:]!r}")

    def _score(self, first: Score, verdict: Verdict) -> Score:
        if verdict.value is not None:
            why = " ".join(verdict.words.rpartition("\n")[0].split())[-QUOTED:]
            reason = "" if verdict.value >= 1 else f"judged: {why}"
            return Score(kind="value", value=verdict.value, reason=reason, extracted=first.extracted)
        if self._queue.count("failures") == 1:  # warn once; metrics count the others
            logging.getLogger("saccade").warning("an answer could not be judged: %s", verdict.words)
        if self.config.on_failure == "rule":
            return replace(first, info={})
        reason = f"{DROP_GROUP if self.config.on_failure == 'drop_group' else 'judge'}: {verdict.words}"
        return Score(
            kind="abstain" if self.config.on_failure == "abstain" else "error", reason=reason, extracted=first.extracted
        )

    def _key(self, case: Case) -> str:
        return key_of(self._key_fields | case.asked)
