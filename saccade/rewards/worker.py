"""The process for verifiers that may hang, crash or belong to the user.

A request holds its id, a verifier, its arguments, a deadline, samples and whether they are scored
apart. The first reply says that the function is loaded, or why not; one reply follows per sample,
none where there are no samples. Every reply names the request that it answers. The parent enforces
the deadline: it ends this process.

    $ python -m saccade.rewards.worker    # started by rewards/pool.py
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from saccade.rewards import user_functions as custom
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS
from saccade.system.process import connect, listen
from saccade.types import Score

Emit = Callable[[Mapping[str, Any]], None]
Failure = Callable[[BaseException], Score]
RAISED = (Exception, SystemExit, KeyboardInterrupt)  # by user code


def main() -> None:
    channel = connect(tied=True)
    inbox = listen(channel)
    while True:
        request = inbox.get().row
        answer = {"id": request["id"]}
        serve(request, lambda reply: channel.send({**reply, **answer}))  # noqa: B023


def serve(request: Mapping[str, Any], emit: Emit) -> None:
    """Answer one request: `ready` or `failed`, then `{index, score}` for every sample."""
    args = request["args"]
    file = (custom.split_name(request["verifier"]) or ("",))[0]
    try:
        function, form = _function(request["verifier"], args)
    except RAISED as error:
        emit({"failed": _described(error, file)})
        return
    coroutine = _is_async(function)
    together = coroutine or (form.batch and not request["apart"])
    emit({"ready": True, "together": together})
    samples = [RewardSample(**json.loads(row)) for row in request["samples"]]
    if not samples:
        return  # only asked whether it loads: a function need not know what to do with none
    failure = partial(_failure, file=file)
    if form.batch:
        _batch(function, form, samples, args, emit, failure, together=together)
    elif coroutine:
        deadline = request["deadline"]
        asyncio.run(_concurrently(function, form, samples, args, deadline, emit, failure))
    else:
        _one_by_one(lambda sample: custom.to_score(custom.call(function, form, sample, args)), samples, emit, failure)


def _function(verifier: str, args: Mapping[str, Any]) -> tuple[Callable[..., Any], custom.Form]:
    if verifier in VERIFIERS:
        prepare = VERIFIERS[verifier].prepare
        if prepare is not None:
            prepare()
        return VERIFIERS[verifier].function, custom.SAMPLE
    function = custom.load(verifier)
    custom.check_arguments(function, args)
    return function, custom.form_of(function)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _one_by_one(
    score: Callable[[RewardSample], Score], samples: Sequence[RewardSample], emit: Emit, failure: Failure
) -> None:
    for index, sample in enumerate(samples):
        try:
            result = score(sample)
        except RAISED as error:
            result = failure(error)
        emit(_reply(index, result))


def _batch(
    function: Callable[..., Any],
    form: custom.Form,
    samples: Sequence[RewardSample],
    args: Mapping[str, Any],
    emit: Emit,
    failure: Failure,
    *,
    together: bool,
) -> None:
    """All at once; when that fails, one at a time, so that only the culprits fail."""

    def scores(part: Sequence[RewardSample]) -> list[Score]:
        result = custom.call(function, form, part, args)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        found = custom.to_scores(result, len(part))
        if found is None:
            size = len(result) if hasattr(result, "__len__") else type(result).__name__
            raise BadLength(f"{size} results for {len(part)} samples")
        return found

    if together and len(samples) > 1:
        try:
            found = scores(samples)
        except RAISED as error:
            emit({"together": False, "apart": failure(error).reason})
        else:
            for index, score in enumerate(found):
                emit(_reply(index, score))
            return
    _one_by_one(lambda sample: scores([sample])[0], samples, emit, failure)


class BadLength(ValueError):
    """A batch function did not return one result per sample."""


async def _awaited(result: Any) -> Any:
    return await result


async def _concurrently(
    function: Callable[..., Any],
    form: custom.Form,
    samples: Sequence[RewardSample],
    args: Mapping[str, Any],
    deadline: float,
    emit: Emit,
    failure: Failure,
) -> None:
    async def scored(sample: RewardSample) -> Score:
        try:
            return custom.to_score(await custom.call(function, form, sample, args))
        except RAISED as error:  # here: outside of its task an exit would end all of them
            return failure(error)

    async def one(index: int, sample: RewardSample) -> None:
        try:
            score = await asyncio.wait_for(scored(sample), deadline)
        except asyncio.TimeoutError:
            score = Score(kind="error", reason=f"timeout: {custom.late(deadline)}")
        emit(_reply(index, score))

    await asyncio.gather(*(one(index, sample) for index, sample in enumerate(samples)))


def _failure(error: BaseException, file: str) -> Score:
    length = isinstance(error, BadLength)
    reason = f"bad_length: {error}" if length else f"raised: {_described(error, file)}"
    return Score(kind="error", reason=reason)


def _described(error: BaseException, file: str) -> str:
    """The exception and the line: of the syntax error, or the last that it passed in the user's
    file; of a built-in verifier (no file) the last of all.
    """
    message, places = str(error), traceback.extract_tb(error.__traceback__)
    lines = [(place.filename, place.lineno) for place in places if file in ("", place.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        message, lines = error.msg, [(error.filename, error.lineno)]
    where = f" ({os.path.basename(lines[-1][0])}:{lines[-1][1]})" if lines else ""
    return f"{type(error).__name__}{message and f': {message}'}{where}"


def _reply(index: int, score: Score) -> dict[str, Any]:
    plain = {**vars(score), "parts": dict(score.parts), "info": dict(score.info)}
    return {"index": index, "score": plain}


if __name__ == "__main__":
    main()
