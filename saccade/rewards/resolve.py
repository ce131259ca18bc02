"""Turn the reward section of a config into recipes, one per data source; refuse what cannot run."""

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from saccade.config import PromptConfig, RewardConfig, RewardTerm
from saccade.config.schema.presets import unknown
from saccade.errors import ConfigError
from saccade.rewards.combine import COMBINATIONS, NOT, Kind, RewardRecipe, Term
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import DEFAULT_NAME, FORMATS, SERVICES, VERIFIERS, Verifier, split_name


def _math_and(shape: str, accuracy: float, form: float, **args: Any) -> tuple[dict[str, Any], ...]:
    return ({"verifier": "math", "weight": accuracy}, {"verifier": f"format:{shape}", "weight": form, "args": args})


# What a source may say beside its terms, and what holds if it does not.
COMBINED = {"combine": "weighted_sum", "accuracy_term": None, "reweight_abstained": False}
# Named lists of terms, called after the training recipes that they come from.
PRESETS: dict[str, tuple[dict[str, Any], ...]] = {
    "lmmr1_math": _math_and("think_answer", 1.0, 0.5, gap="none"),
    "r1v": _math_and("think_answer", 1.0, 1.0),
    "easyr1_r1v": _math_and("think_answer", 0.5, 0.5),
    "easyr1_math": _math_and("think_boxed", 0.9, 0.1),
    "lightrft": _math_and("think_boxed", 0.9, 0.1),
    "geo3k": ({"verifier": "geo3k"},),
    "gsm8k": ({"verifier": "gsm8k"},),
    "lmmr1_sokoban": ({"verifier": "sokoban", "args": {"mode": "lmmr1"}},),
    "medical_safe": ({"verifier": "medical", "args": {"weights": {"length": 0.0}}},),
    "hybrid_mc": ({"verifier": "hybrid"},),
    "minio3": ({"verifier": "hybrid"},),  # accuracy alone: format and tool use weigh nothing
}


def resolve_recipes(
    config: RewardConfig, prompt_format: str | dict[str, str], max_tokens: int, overlong: tuple[int, float, int] | None
) -> tuple[dict[str, RewardRecipe], RewardRecipe | None]:
    """Returns (recipes by data source, the recipe of all other sources or None). A source with its own prompt format
    has its own recipe, whose extractors match that format.
    """
    prompt = PromptConfig(format=prompt_format)
    apart = prompt_format if isinstance(prompt_format, dict) else {"default": prompt_format}
    for style in apart.values():
        if style not in FORMATS:
            raise unknown("prompt.format", style, FORMATS)

    def recipe(where: str, value: Any, source: str = "default") -> RewardRecipe:
        rows = read_terms(where, value)
        if overlong and overlong[0]:
            penalty = dict(zip(("buffer", "factor", "limit"), overlong, strict=True))
            rows = [*rows, RewardTerm(verifier="overlong", args=penalty)]
        terms = tuple(_term(where, row, str(prompt.of(source).format), max_tokens) for row in rows)
        return _recipe(where, terms, _combined(where, value, config))

    def by_format(where: str, value: Any) -> dict[str, RewardRecipe]:
        return {s: recipe(where, value, s) for s in apart if s not in (*config.by_source, "default")}

    recipes = {s: recipe(f"reward.by_source.{s}", value, s) for s, value in config.by_source.items()}
    default = recipes.pop("default", None)
    if not config.terms and config.preset is None:
        if not config.by_source:
            raise ConfigError("reward.terms is empty; for example reward.terms=[math] or reward.preset=r1v")
        others = by_format("reward.by_source.default", config.by_source["default"]) if default else {}
        return recipes | others, default
    if config.terms and config.preset is not None:
        raise ConfigError("reward.terms and reward.preset are both set; keep one of them")
    if default is not None:
        raise ConfigError("reward.by_source.default and reward.terms are both set; keep one")
    shared = _shared_rows(config)
    return recipes | by_format("reward.terms", shared), recipe("reward.terms", shared)


def verifiers_for(config: RewardConfig, data_source: str) -> set[str]:
    """Names of the verifiers that score rows of a source."""
    value = config.by_source.get(data_source, config.by_source.get("default"))
    rows = _shared_rows(config) if value is None else read_terms(f"reward.by_source.{data_source}", value)
    return {row.verifier for row in rows}


def _shared_rows(config: RewardConfig) -> Sequence[RewardTerm]:
    """The terms of reward.terms or reward.preset."""
    if config.preset is None:
        return config.terms
    if config.preset not in PRESETS:
        raise unknown("reward.preset", config.preset, PRESETS)
    return read_terms("reward.preset", config.preset)


def read_terms(where: str, value: Any) -> list[RewardTerm]:
    """Parse a preset name, a verifier, a term, a list of them; or `terms`, with how they are combined."""
    if isinstance(value, Mapping) and "terms" in value:
        value = value["terms"]
    if isinstance(value, str):
        value = PRESETS.get(value, [value])
    rows = [value] if isinstance(value, Mapping) else value
    try:
        return [RewardTerm.model_validate({"verifier": row} if isinstance(row, str) else row) for row in rows]
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"{where}: write a preset, a verifier or a list of terms; {error}") from None


# -- terms -----------------------------------------------------------------------------------------


def _term(where: str, row: RewardTerm, prompt_format: str, max_tokens: int) -> Term:
    kind: Kind = "shaping" if row.shaping else "outcome"
    plain = partial(Term, weight=row.weight, kind=kind, args=row.args, when=row.when or "")
    if custom := split_name(row.verifier):
        path, function = Path(custom[0]).expanduser(), custom[1]
        if not path.is_file():
            raise ConfigError(f"{where}: the file {custom[0]} does not exist (looked in {Path.cwd()})")
        name = function if function != DEFAULT_NAME else path.stem
        return plain(name=row.name or name, verifier=f"{path.resolve()}:{function}")
    name = row.name or row.verifier.partition(":")[0]
    if row.verifier in SERVICES:
        return plain(name=name, verifier=row.verifier, needs_answer=False)
    verifier = VERIFIERS.get(row.verifier)
    if verifier is None:
        raise unknown(f"{where}: verifier", row.verifier, [*VERIFIERS, *SERVICES, "your/file.py:function"])
    overridden = row.shaping or (row.shaping is False and verifier.kind == "shaping")
    return plain(
        name=name,
        verifier=row.verifier,
        kind=kind if overridden else verifier.kind,
        args=_arguments(where, row, verifier, prompt_format, max_tokens),
        function=None if verifier.isolated else verifier.function,
        **{known: getattr(verifier, known) for known in ("needs_answer", "uses_judge", "uses_model")},
    )


def _arguments(where: str, row: RewardTerm, verifier: Verifier, prompt_format: str, max_tokens: int) -> dict[str, Any]:
    """A term's arguments; default `order` of extractors: the prompt format's, the verifier's, the whole text last."""
    parameters = dict(list(inspect.signature(verifier.function).parameters.items())[1:])
    for name in row.args:
        if name not in parameters:
            none = ConfigError(f"{where}: {row.verifier} takes no arguments, remove {name!r}")
            raise unknown(f"{where}: argument of {row.verifier}", name, parameters) if parameters else none
    args = dict(row.args)
    if "order" in parameters and "order" not in args:
        own = parameters["order"].default
        places = (*(place for place in FORMATS[prompt_format].order if place not in own), *own)
        args["order"] = tuple(sorted(places, key=lambda place: place == "whole"))
    for response in ("", "<think>a</think><answer>1</answer>"):  # bad values of arguments raise on any
        sample = RewardSample(id="probe", response=response, answer="1", length=1, max_tokens=max_tokens)
        try:
            verifier.function(sample, **args)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {row.verifier} with {args}: {error}") from None
    return args


# -- recipes ---------------------------------------------------------------------------------------


def _combined(where: str, value: Any, config: RewardConfig) -> RewardConfig:
    """How terms are combined: as for all sources, unless a source has `terms` of its own."""
    if not (isinstance(value, Mapping) and "terms" in value):
        return config
    for name in value.keys() - {"terms", *COMBINED}:
        raise unknown(where, name, ["terms", *COMBINED])
    return config.model_copy(update={name: value.get(name, usual) for name, usual in COMBINED.items()})


def _recipe(where: str, terms: tuple[Term, ...], config: RewardConfig) -> RewardRecipe:
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two terms are called {name!r}; give one of them a name")
    if all(term.kind == "shaping" for term in terms):
        raise ConfigError(f"{where}: only shaping terms, or none; add one that judges the answer, such as math")
    combine = str(config.combine).strip()
    gate = re.fullmatch(r"gate\((.+)\)", combine)
    if not gate and combine not in COMBINATIONS:
        raise unknown("reward.combine", combine, [*COMBINATIONS, "gate(TERM)"])
    outcome = _outcome(where, config.accuracy_term, terms)
    for index, term in enumerate(terms):
        if term.when and index in (outcome, _index(f"{where}: when", term.when.removeprefix(NOT), terms)):
            raise ConfigError(f"{where}: when of {term.name}: expects another term, and not on the outcome; remove it")
    return RewardRecipe(
        terms=terms,
        outcome=outcome,
        combination="weighted_sum" if gate else combine,
        gate=_index(f"{where}: reward.combine", gate[1].strip(), terms) if gate else None,
        renormalise=config.reweight_abstained,
    )


def _outcome(where: str, name: str | None, terms: Sequence[Term]) -> int:
    if name is not None:
        return _index(f"{where}: reward.accuracy_term", name, terms)
    judging = [index for index, term in enumerate(terms) if term.kind == "outcome"]
    if not judging:
        helps = f"set reward.accuracy_term={terms[0].name} to count that one"
        raise ConfigError(f"{where}: no term judges the answer; {helps}")
    # A learned score is a weak measure of correctness: any other term is preferred.
    return min(judging, key=lambda index: terms[index].uses_model)


def _index(where: str, name: str, terms: Sequence[Term]) -> int:
    found = [index for index, term in enumerate(terms) if name in (term.name, term.verifier)]
    if not found:
        raise unknown(where, name, [term.name for term in terms])
    return found[0]
