"""The worker process for verifiers that may hang or crash, and for the user's functions.

A request holds its id, a verifier, its arguments, a deadline, samples, and `apart`: whether to score
them one by one. The first reply says that the function is loaded, or why not; then one reply per
sample follows. Every reply has the id of its request. The parent enforces the deadline by killing
this process.

    $ python -m saccade.plugins.reward_workers.worker    # started by pool.py
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from saccade.plugins.reward_workers import user_functions as custom
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS, split_name
from saccade.system.process import connect, listen
from saccade.types import Score
from saccade.user_code import raised_at

Emit = Callable[[Mapping[str, Any]], None]
RAISED = (Exception, SystemExit, KeyboardInterrupt)  # that user code may raise


def main() -> None:
    channel = connect(tied=True)
    inbox = listen(channel)
    while True:
        request = inbox.get().row
        answer = {"id": request["id"]}
        serve(request, lambda reply: channel.send({**reply, **answer}))  # noqa: B023


def serve(request: Mapping[str, Any], emit: Emit) -> None:
    """Answer one request: `together` or `failed`, then `{index, score}` per sample; `apart` if a batch call fails."""
    verifier, args = request["verifier"], json.loads(request["args"])
    file = (split_name(verifier) or (None,))[0]
    try:
        function, form = _function(verifier, args)
    except RAISED as error:
        emit({"failed": raised_at(error, file)})
        return
    concurrent = inspect.iscoroutinefunction(function) and not form.batch
    together = concurrent or (form.batch and not request["apart"])
    emit({"together": together})
    samples = [RewardSample(**json.loads(row)) for row in request["samples"]]

    def score(index: int, value: Score) -> None:
        emit({"index": index, "score": asdict(value)})

    def failure(error: BaseException) -> Score:
        short = f"bad_length: {error}" if isinstance(error, custom.BadLength) else ""
        return Score(kind="error", reason=short or f"raised: {raised_at(error, file)}")

    def scores(part: Sequence[RewardSample]) -> list[Score]:
        result = custom.call(function, form, part if form.batch else part[0], args)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return custom.to_scores(result, len(part)) if form.batch else [custom.to_score(result)]

    async def awaited(sample: RewardSample) -> Score:
        try:
            return custom.to_score(await custom.call(function, form, sample, args))
        except RAISED as error:  # caught within the task: a SystemExit outside would end all tasks
            return failure(error)

    async def in_time(index: int, sample: RewardSample) -> None:
        try:
            score(index, await asyncio.wait_for(awaited(sample), request["deadline"]))
        except asyncio.TimeoutError:
            score(index, Score(kind="error", reason=f"timeout: {custom.late(request['deadline'])}"))

    async def all_of_them() -> None:
        await asyncio.gather(*map(in_time, range(len(samples)), samples))

    if concurrent:
        asyncio.run(all_of_them())
        return
    if together and len(samples) > 1:
        try:
            found = scores(samples)
        except RAISED as error:  # then score them one at a time, so that only faulty samples fail
            emit({"apart": failure(error).reason})
        else:
            for index, value in enumerate(found):
                score(index, value)
            return
    for index, sample in enumerate(samples):
        try:
            (value,) = scores([sample])
        except RAISED as error:
            value = failure(error)
        score(index, value)


def _function(verifier: str, args: Mapping[str, Any]) -> tuple[Callable[..., Any], custom.Form]:
    if verifier in VERIFIERS:
        if prepare := VERIFIERS[verifier].prepare:
            prepare()
        return VERIFIERS[verifier].function, custom.SAMPLE
    function = custom.load(verifier)
    custom.check_arguments(function, args)
    return function, custom.form_of(function)


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main()
