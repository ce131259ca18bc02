"""Scores episodes as they finish: cheap terms in place, others in workers or by a judge.

Everything that can be wrong with `reward:` is refused when the scorer is built.

    >>> from saccade.config import RewardConfig
    >>> config = RewardConfig(terms=["count", "format:think_answer"])
    >>> with Scorer(config, prompt_format="think_answer", max_tokens=64) as scorer:
    ...     sample = RewardSample(id="a", response="<answer>7</answer>", answer="7")
    ...     [scored] = scorer.score([sample])
    >>> scored.parts
    {'count': 1.0, 'format': 0.0}
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from saccade.config import RewardConfig
from saccade.errors import ConfigError
from saccade.rewards.combine import RewardRecipe, Scored, Term, combine
from saccade.rewards.judge import Judge
from saccade.rewards.pool import WorkerPool
from saccade.rewards.remote import Remote
from saccade.rewards.resolve import resolve_recipes, unknown
from saccade.rewards.reward_model_term import Learned, RewardModel
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.services import SERVICES, TermScorer
from saccade.rewards.user_functions import split_name
from saccade.rewards.verifiers import VERIFIERS
from saccade.types import Sample, Score


class Scorer:
    """`submit` while generation goes on, or `score` a list; `close` ends the worker processes."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        prompt_format: str,
        max_tokens: int,
        overlong: tuple[int, float, int] | None = None,
        isolate: bool = False,
        load_model: Callable[[str], RewardModel] | None = None,
    ) -> None:
        """`overlong` is (buffer, factor, limit) of algorithm.overlong; a buffer of 0 means none.
        `isolate` puts every rule into the worker processes, also those that need not be there.
        `load_model` makes a folder into what scores; without it terms of models abstain.
        """
        self.max_tokens = max_tokens
        self._for_others = next((n for n in ("terms", "preset") if getattr(config, n)), None)
        self.recipes: Mapping[str, RewardRecipe]
        self.default: RewardRecipe | None
        self.recipes, self.default = resolve_recipes(
            config, prompt_format=prompt_format, max_tokens=max_tokens, overlong=overlong
        )
        if isolate:
            self.recipes = {source: _isolated(recipe) for source, recipe in self.recipes.items()}
            self.default = self.default and _isolated(self.default)
        terms = self.terms
        isolated = [t for t in terms if not (t.function or t.elsewhere or t.learned)]
        judged = {term.verifier for term in terms if term.judged}
        if "judge" in judged and config.judge.on_failure == "rule":
            raise ConfigError(
                "reward.judge.on_failure=rule: the term judge has no rule; use hybrid, or try "
                "reward.judge.on_failure=abstain"
            )
        self.judge = Judge(config.judge) if judged else None
        if self.judge is not None:
            self.judge.check()
        learned = [term for term in terms if term.learned and load_model is not None]
        self.learned = Learned(load_model) if learned and load_model is not None else None
        for term in learned:
            assert self.learned is not None
            self.learned.prepare(term.args)
        self.pool = WorkerPool(config.workers, config.deadline) if isolated else None
        self.elsewhere: dict[str, tuple[str, TermScorer]] = {}  # and the name of its first term
        for term in isolated:
            self._check_custom(term)
        for term in terms:
            self._open_elsewhere(term, config)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for part in (self.pool, self.judge, *(scorer for _, scorer in self.elsewhere.values())):
            if part is not None:
                part.close()

    def metrics(self) -> dict[str, float]:
        """What the judge, services and models did since this was last called."""
        metrics = self.judge.metrics() if self.judge is not None else {}
        for name, scorer in self.elsewhere.values():
            metrics |= {f"service/{name}/{key}": v for key, v in scorer.metrics().items()}
        return metrics

    @property
    def terms(self) -> list[Term]:
        """Those of all recipes."""
        recipes = [*self.recipes.values(), *filter(None, [self.default])]
        return [term for recipe in recipes for term in recipe.terms]

    @property
    def awaited(self) -> list[str]:
        """The terms that are scored elsewhere: by workers, a judge, a service or a model."""
        return list(dict.fromkeys(t.name for t in self.terms if t.function is None or t.judged))

    def recipe(self, data_source: str) -> RewardRecipe:
        found = self.recipes.get(data_source, self.default)
        if found is None:
            raise ConfigError(
                f"{unknown('data_source', data_source, self.recipes)}; add it to reward.by_source, "
                "or add 'default' there"
            )
        return found

    def looks_in(self, data_source: str) -> str:
        """The term that counts as accuracy, and the places where it looks for an answer."""
        recipe = self.recipe(data_source)
        term = recipe.terms[recipe.outcome]
        order = term.args.get("order")
        if order is None and term.verifier in VERIFIERS:
            parameters = inspect.signature(VERIFIERS[term.verifier].function).parameters
            order = parameters["order"].default if "order" in parameters else None
        return f"{term.name} looks in {', '.join(order)}" if order else f"by {term.name}"

    def check_sources(self, sources: Iterable[str]) -> None:
        """Refuse rows that nothing is written for, before the first is scored."""
        for source in sorted(set(sources)):
            self.recipe(source)

    def unused(self, sources: Iterable[str], *, shared: bool = True) -> list[str]:
        """Warnings of recipes that no row asks for; `shared`: also of that for all others, which
        an evaluation of other sets may well not need.
        """
        there = sorted(set(sources))
        idle, known = sorted(set(self.recipes) - set(there)), ", ".join(there)
        found = []
        if idle:
            listed = ", ".join(idle)
            found = [f"reward.by_source: no row has the data_source {listed}; there is {known}"]
        if shared and self._for_others and there and set(there) <= set(self.recipes):
            found.append(
                f"reward.{self._for_others}: scores no row, as reward.by_source names the "
                f"data_source of all ({known}); remove it, or those"
            )
        return [f"WARNING: {text}" for text in found]

    def check_media(self, samples: Iterable[Sample]) -> None:
        """Refuse rows whose pictures a service needs and does not get, or a model cannot read."""
        shown = {media.kind: media for sample in samples for media in sample.media}
        for _, scorer in self.elsewhere.values():
            if isinstance(scorer, Remote):
                scorer.check_media(set(shown))
        if self.learned is not None:
            self.learned.check_media(list(shown.values()))

    def component_weights(self, data_source: str) -> dict[str, float]:
        """Name → weight of every term, shaping ones too, for an estimator that keeps them apart.
        Refused where the reward is anything but their weighted sum.
        """
        recipe = self.recipe(data_source)
        weights = {term.name: term.weight for term in recipe.terms}
        gated = recipe.gate is not None
        if gated or recipe.combination != "weighted_sum":
            how = f"gate({recipe.terms[recipe.gate or 0].name})" if gated else recipe.combination
            problem = f"they are combined by {how}"
        elif recipe.renormalise:
            problem = "with reward.renormalise an abstaining term has no value; turn it off"
        elif len(weights) < 2:
            problem = f"{data_source!r} has {list(weights)} alone, for example add format:boxed"
        else:
            return weights
        raise ConfigError(
            "an advantage of separate reward components needs two or more reward.terms and "
            f"reward.combine=weighted_sum; {problem}"
        )

    def submit(self, sample: RewardSample) -> Future[Scored]:
        """The result as a future that never holds an exception of a verifier."""
        begun = self._begin(sample)
        if isinstance(begun, Future):
            return begun
        future: Future[Scored] = Future()
        future.set_result(begun)
        return future

    def flush(self) -> None:
        """What waits for a model is scored now, in this thread; nothing without models."""
        if self.learned is not None:
            self.learned.flush()

    def score(self, samples: Sequence[RewardSample]) -> list[Scored]:
        begun = [self._begin(sample) for sample in samples]
        self.flush()
        return [each.result() if isinstance(each, Future) else each for each in begun]

    def _begin(self, sample: RewardSample) -> Scored | Future[Scored]:
        recipe = self.recipe(sample.data_source)
        if sample.unreadable:
            return Scored(status="error", reason=f"unreadable: {sample.unreadable}")
        if not sample.max_tokens and recipe.knows_limit:
            sample = replace(sample, max_tokens=self.max_tokens)
        if not recipe.waits:
            return combine(recipe, [_in_place(term, sample) for term in recipe.terms])
        asked = [self._elsewhere(term, sample) for term in recipe.terms]
        scores = [
            _in_place(term, sample) if future is None else None
            for term, future in zip(recipe.terms, asked, strict=True)
        ]
        return _when_all(recipe, scores, asked)

    def _elsewhere(self, term: Term, sample: RewardSample) -> Future[Score] | None:
        """By a worker, a judge, one after the other, by a model, or by whoever is named; None where
        the term is scored in place.
        """
        if term.learned and self.learned is not None:
            return self.learned.submit(term.args, sample)
        if term.elsewhere:
            return self.elsewhere[_key(term)][1].submit(sample)
        working = None
        if term.function is None:
            assert self.pool is not None
            working = self.pool.submit(term.verifier, sample, term.args)
        if not term.judged:
            return working
        assert self.judge is not None
        if working is None:
            return self.judge.submit(sample, _in_place(term, sample))
        return _then(working, partial(self.judge.submit, sample))

    def _check_custom(self, term: Term) -> None:
        if split_name(term.verifier) is None:
            return
        assert self.pool is not None
        problem = self.pool.check(term.verifier, term.args)
        if problem:
            self.close()
            raise ConfigError(f"reward.terms: {term.verifier} cannot be used: {problem}")

    def _open_elsewhere(self, term: Term, config: RewardConfig) -> None:
        if not term.elsewhere or _key(term) in self.elsewhere:
            return
        try:
            scorer = SERVICES[term.verifier](config, term.args)
            self.elsewhere[_key(term)] = (term.name, scorer)
            scorer.check()
        except BaseException:
            self.close()
            raise


def _key(term: Term) -> str:
    """Terms that are alike share whoever scores them."""
    return json.dumps([term.verifier, term.args], sort_keys=True, default=str)


def _isolated(recipe: RewardRecipe) -> RewardRecipe:
    return replace(recipe, terms=tuple(replace(term, function=None) for term in recipe.terms))


def _in_place(term: Term, sample: RewardSample) -> Score:
    assert term.function is not None
    try:
        return term.function(sample, **term.args)
    except Exception as error:  # one odd response must not end a run
        return Score(kind="error", reason=f"raised: {type(error).__name__}: {error}")


def _then(first: Future[Score], second: Callable[[Score], Future[Score]]) -> Future[Score]:
    """What the second makes of the first, both as futures that hold no exception."""
    result: Future[Score] = Future()

    def go_on(done: Future[Score]) -> None:
        second(done.result()).add_done_callback(lambda last: result.set_result(last.result()))

    first.add_done_callback(go_on)
    return result


def _when_all(
    recipe: RewardRecipe, scores: list[Score | None], asked: Sequence[Future[Score] | None]
) -> Future[Scored]:
    """Combine when the last of the futures is done."""
    result: Future[Scored] = Future()
    result.set_running_or_notify_cancel()
    lock = threading.Lock()
    left = sum(future is not None for future in asked)

    def arrived(index: int, score: Score) -> None:
        nonlocal left
        with lock:
            scores[index] = score
            left -= 1
            last = left == 0
        if last:
            try:
                result.set_result(combine(recipe, [s for s in scores if s is not None]))
            except Exception as error:  # a future swallows what its callbacks raise
                result.set_exception(error)

    for index, future in enumerate(asked):
        if future is not None:
            future.add_done_callback(lambda done, index=index: arrived(index, done.result()))  # type: ignore[misc]
    return result
