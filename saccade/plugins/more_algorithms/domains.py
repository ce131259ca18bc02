"""How often and how well each domain was answered so far: the memory of the `drpo` estimator.

A domain has ten bins of success y in [0, 1]; old groups fade with a half-life, so the state neither
grows nor freezes. Plain lists that go into a checkpoint as JSON.

    >>> domains = noted({}, [("xray", 0.25), ("ct", 0.625)])
    >>> weight(domains, "xray", 0.25), weight(domains, "ct", 0.625)
    (16.0, 2.56)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt

from saccade.algorithms.algorithm_state import outcomes_of
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.errors import ConfigError
from saccade.types import Group

BINS = 10
HALF_LIFE = 5000  # groups of the domain
LEAST_SUCCESS = 0.05  # a domain that always fails must not weigh infinitely
FADED = 1e-12  # of a group; smaller counts are empty, for their inverse would overflow in the end

Domains = Mapping[str, Mapping[str, Sequence[float]]]  # faded groups and sums of their success, by bin


def observe(domains: Domains, groups: Sequence[Group], algorithm: Algorithm) -> Domains:
    """After a step: every scored group is noted, in the order of the uids."""
    ordered = sorted(groups, key=lambda group: group.uid)
    return noted(domains, [(domain_of(g), y) for g in ordered if (y := success_of(g, algorithm)) is not None])


def weigh(domains: Domains, group: Group, algorithm: Algorithm) -> float:
    """Of a group that was observed; 1 where no member counts."""
    y = success_of(group, algorithm)
    return 1.0 if y is None else weight(domains, domain_of(group), y)


def domain_of(group: Group) -> str:
    domain = group.sample.extra.get("domain")
    return "default" if domain in (None, "") else str(domain)


def success_of(group: Group, algorithm: Algorithm) -> float | None:
    """Mean raw outcome as a share of what is possible; None when no member counts."""
    outcomes = outcomes_of(group, algorithm)
    return success(outcomes, algorithm.reward_range) if outcomes else None


def success(outcomes: Sequence[float], reward_range: tuple[float, float]) -> float:
    """Mean raw outcome of a group as a share of the declared range."""
    low, high = reward_range
    rounding = 1e-6 * (high - low)
    for outcome in outcomes:
        if not low - rounding <= outcome <= high + rounding:
            wider = [min(low, outcome), max(high, outcome)]
            raise ConfigError(
                f"an outcome of {outcome} is outside algorithm.reward_range=[{low}, {high}]; "
                f"declare what the reward can give, such as {wider}"
            )
    mean = sum(outcomes) / len(outcomes)
    return min(1.0, max(0.0, (mean - low) / (high - low)))


def noted(domains: Domains, seen: Sequence[tuple[str, float]]) -> Domains:
    """With what was `seen`: the domain and the success of each group."""
    updated = dict(domains)
    for domain, groups in Counter(domain for domain, _ in seen).items():
        bins = updated.get(domain, {"counts": [0.0] * BINS, "sums": [0.0] * BINS})
        keep = 2.0 ** (-groups / HALF_LIFE)
        counts = [keep * n if keep * n > FADED else 0.0 for n in bins["counts"]]
        sums = [keep * y if n else 0.0 for y, n in zip(bins["sums"], counts, strict=True)]
        for y in (y for name, y in seen if name == domain):
            counts[_bin(y)] += 1
            sums[_bin(y)] += y
        updated[domain] = {"counts": counts, "sums": sums}
    return updated


def weight(domains: Domains, domain: str, y: float) -> float:
    """Of a group with success `y` that was noted: larger where the domain is rare and hard."""
    counts, sums = domains[domain]["counts"], domains[domain]["sums"]
    used = [(n, total / n) for n, total in zip(counts, sums, strict=True) if n > 0]
    count, mean = counts[_bin(y)], sums[_bin(y)]
    assert count > 0, f"no group of {domain} with success {y} was observed"
    domain_mean = sum(m / n for n, m in used) / sum(1 / n for n, _ in used)
    in_domain = sqrt(sum(counts)) * max(domain_mean, LEAST_SUCCESS)
    in_bin = sqrt(count) * max(mean / count, LEAST_SUCCESS)
    return 1 / (max(in_domain, LEAST_SUCCESS) * in_bin)


def _bin(y: float) -> int:
    assert 0 <= y <= 1, y
    return min(int(y * BINS), BINS - 1)
