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

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from saccade.config import RewardConfig
from saccade.config.schema.presets import unknown
from saccade.errors import ConfigError
from saccade.registry import HOOKS
from saccade.rewards.combine import Pending, RewardRecipe, Scored, Term, combine
from saccade.rewards.resolve import resolve_recipes
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import SERVICES, Service, split_name
from saccade.types import Sample, Score


class Scorer:
    """`submit` while generation goes on, or `score` a list; `close` ends the worker processes."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        prompt_format: str | dict[str, str],
        max_tokens: int,
        overlong: tuple[int, float, int] | None = None,
        isolate: bool = False,
        load_model: Callable[[str], Any] | None = None,
    ) -> None:
        """`overlong` is (buffer, factor, limit) of algorithm.overlong; a buffer of 0 means none.
        `isolate` runs every rule in worker processes, even those that could run in place.
        `load_model` loads the reward model of a folder; without it terms of models abstain.
        """
        self.config, self.max_tokens = config, max_tokens
        self._isolate, self._load_model = isolate, load_model
        self.pool: Any = None  # of worker processes
        self.judge: Any = None
        self.model_terms: Any = None
        self.services: dict[str, tuple[str, Service]] = {}  # (name of the first term, service)
        recipes, default = resolve_recipes(config, prompt_format, max_tokens, overlong)
        try:
            self.recipes = {source: self._with_submit(recipe) for source, recipe in recipes.items()}
            self.default = default and self._with_submit(default)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for part in (self.pool, self.judge, *(service for _, service in self.services.values())):
            if part is not None:
                part.close()

    def metrics(self) -> dict[str, float]:
        """Metrics of the judge and of services since the last call."""
        metrics = self.judge.metrics() if self.judge is not None else {}
        for name, service in self.services.values():
            metrics |= {f"service/{name}/{key}": v for key, v in service.metrics().items()}
        return metrics

    @property
    def terms(self) -> list[Term]:
        """The terms of all recipes."""
        recipes = [*self.recipes.values(), *filter(None, [self.default])]
        return [term for recipe in recipes for term in recipe.terms]

    @property
    def remote_terms(self) -> list[str]:
        """Names of the terms that are scored elsewhere: by workers, a judge or a service."""
        return list(dict.fromkeys(t.name for t in self.terms if t.function is None or t.uses_judge))

    def recipe(self, data_source: str) -> RewardRecipe:
        found = self.recipes.get(data_source, self.default)
        if found is None:
            problem = unknown("data_source", data_source, self.recipes)
            raise ConfigError(f"{problem}; add it to reward.by_source, or add 'default' there")
        return found

    def accuracy_rule(self, data_source: str) -> str:
        """The term that counts as accuracy, and the places where it looks for an answer."""
        recipe = self.recipe(data_source)
        term = recipe.terms[recipe.outcome]
        order = term.args.get("order")
        return f"{term.name} looks in {', '.join(order)}" if order else f"by {term.name}"

    def check_sources(self, sources: Iterable[str]) -> None:
        """Refuse data sources without a recipe, before the first row is scored."""
        for source in sorted(set(sources)):
            self.recipe(source)

    def check_media(self, samples: Iterable[Sample]) -> None:
        """Refuse rows with media that a service would not receive, or a reward model cannot read."""
        shown = {media.kind: media for sample in samples for media in sample.media}
        for _, service in self.services.values():
            service.check_media(set(shown))
        if self.model_terms is not None:
            self.model_terms.check_media(list(shown.values()))

    def component_weights(self, data_source: str) -> dict[str, float]:
        """Name → weight of every term, shaping ones too, for an estimator that treats terms separately.
        Refused unless the reward is their weighted sum.
        """
        recipe = self.recipe(data_source)
        weights = {term.name: term.weight for term in recipe.terms}
        if recipe.gate is not None or recipe.combination != "weighted_sum" or recipe.renormalise or len(weights) < 2:
            needs = "several reward.terms, reward.combine=weighted_sum and reward.reweight_abstained=false"
            raise ConfigError(f"separate reward components need {needs}; {data_source!r} has {', '.join(weights)}")
        return weights

    def submit(self, sample: RewardSample) -> Future[Scored]:
        """Start scoring; the future never holds an exception of a verifier."""
        recipe = self.recipe(sample.data_source)
        if not sample.max_tokens:
            sample = replace(sample, max_tokens=self.max_tokens)
        scored: Any = Scored(status="error", reason=f"unreadable: {sample.unreadable}")
        if not sample.unreadable:
            scored = _map_future(_gather([term.submit(sample) for term in recipe.terms]), partial(combine, recipe))
        if isinstance(scored, Future):
            return scored
        future: Future[Scored] = Future()
        future.set_result(scored)
        return future

    def flush(self) -> None:
        """Score all samples that are queued for reward models now, in this thread."""
        if self.model_terms is not None:
            self.model_terms.flush()

    def score(self, samples: Sequence[RewardSample]) -> list[Scored]:
        pending = [self.submit(sample) for sample in samples]
        self.flush()
        return [each.result() for each in pending]

    def _with_submit(self, recipe: RewardRecipe) -> RewardRecipe:
        return replace(recipe, terms=tuple(replace(term, submit=self._submit_of(term)) for term in recipe.terms))

    def _submit_of(self, term: Term) -> Callable[[RewardSample], Pending]:
        """The `submit` of a term. Starts the pool, judge, model or service that scores it, unless another term has."""
        if term.verifier in SERVICES:
            return self._service(term).submit
        if term.uses_model and self._load_model is not None:
            self.model_terms = self.model_terms or HOOKS["reward_model_terms"](self._load_model)
            self.model_terms.prepare(term.args)
            return partial(self.model_terms.submit, term.args)
        if term.function is not None and not self._isolate:
            first: Callable[[RewardSample], Pending] = partial(_in_place, term.function, term.args)
        else:
            self.pool = self.pool or HOOKS["reward_workers"](self.config.workers, self.config.deadline)
            problem = split_name(term.verifier) and self.pool.check(term.verifier, term.args)
            if problem:
                raise ConfigError(f"reward.terms: {term.verifier} cannot be used: {problem}")
            first = partial(self.pool.submit, term.verifier, args=term.args)
        if not term.uses_judge:
            return first
        judge = self._judge(term)
        return lambda sample: _map_future(first(sample), partial(judge.submit, sample))

    def _service(self, term: Term) -> Service:
        """The service of a term, shared by terms of the same verifier and arguments."""
        key = repr((term.verifier, sorted(term.args.items())))
        if key not in self.services:
            self.services[key] = (term.name, SERVICES[term.verifier](self.config, term.args))
            self.services[key][1].check()
        return self.services[key][1]

    def _judge(self, term: Term) -> Any:
        if term.verifier == "judge" and self.config.judge.on_failure == "rule":
            helps = "use hybrid, or try reward.judge.on_failure=abstain"
            raise ConfigError(f"reward.judge.on_failure=rule: the term judge has no rule; {helps}")
        if self.judge is None:
            self.judge = HOOKS["judge"](self.config.judge)
            self.judge.check()
        return self.judge


def _in_place(function: Callable[..., Score], args: Mapping[str, Any], sample: RewardSample) -> Score:
    try:
        return function(sample, **args)
    except Exception as error:  # one odd response must not end a run
        return Score(kind="error", reason=f"raised: {type(error).__name__}: {error}")


def _map_future(given: Any, apply: Callable[[Any], Any]) -> Any:
    """Apply `apply` to a result or to that of a future. Returns a future if either `given` or its outcome is one."""
    if not isinstance(given, Future):
        return apply(given)
    last: Future[Any] = Future()
    last.set_running_or_notify_cancel()

    def arrived(apply: Callable[[Any], Any], done: Future[Any]) -> None:
        try:
            made = apply(done.result())
        except Exception as error:  # a future swallows what its callbacks raise
            last.set_exception(error)
        else:
            if isinstance(made, Future):
                made.add_done_callback(partial(arrived, lambda result: result))
            else:
                last.set_result(made)

    given.add_done_callback(partial(arrived, apply))
    return last


def _gather(begun: Sequence[Pending]) -> Any:
    """A list of all scores, or a future of it."""
    for index, each in enumerate(begun):
        if isinstance(each, Future):
            return _map_future(each, lambda score: _gather([*begun[:index], score, *begun[index + 1 :]]))  # noqa: B023
    return begun
