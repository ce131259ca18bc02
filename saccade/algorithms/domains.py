"""How often and how well each domain was answered so far: the memory of the `drpo` estimator.

A domain has ten bins of success y in [0, 1]; old groups fade with a half-life, so the state neither
grows nor freezes. Pure functions on records that go into a checkpoint as JSON. Knows nothing of
groups, ranks or how an advantage uses the weights.

    >>> domains = observe({}, [("xray", 0.25), ("ct", 0.625)])
    >>> weight(domains, "xray", 0.25), weight(domains, "ct", 0.625)
    (16.0, 2.56)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from saccade.errors import ConfigError

BINS = 10
HALF_LIFE = 5000  # groups of the domain
LEAST_SUCCESS = 0.05  # a domain that always fails must not weigh infinitely
FADED = 1e-12  # of a group; smaller counts are empty, for their inverse would overflow in the end


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Faded number of groups and sum of their success, by success."""

    counts: tuple[float, ...] = (0.0,) * BINS
    sums: tuple[float, ...] = (0.0,) * BINS


Domains = dict[str, Bins]


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


def observe(domains: Mapping[str, Bins], seen: Sequence[tuple[str, float]]) -> Domains:
    """After a step: `seen` is (domain, success) of every scored group, in the order of the uids."""
    updated = dict(domains)
    for domain, groups in Counter(domain for domain, _ in seen).items():
        bins = updated.get(domain, Bins())
        keep = 2.0 ** (-groups / HALF_LIFE)
        counts = [keep * n if keep * n > FADED else 0.0 for n in bins.counts]
        sums = [keep * y if n else 0.0 for y, n in zip(bins.sums, counts, strict=True)]
        for y in (y for name, y in seen if name == domain):
            counts[_bin(y)] += 1
            sums[_bin(y)] += y
        updated[domain] = Bins(counts=tuple(counts), sums=tuple(sums))
    return updated


def weight(domains: Mapping[str, Bins], domain: str, y: float) -> float:
    """Of a group with success `y` that was observed: larger where the domain is rare and hard."""
    bins = domains[domain]
    used = [(n, total / n) for n, total in zip(bins.counts, bins.sums, strict=True) if n > 0]
    count, mean = bins.counts[_bin(y)], bins.sums[_bin(y)]
    assert count > 0, f"no group of {domain} with success {y} was observed"
    domain_mean = sum(m / n for n, m in used) / sum(1 / n for n, _ in used)
    in_domain = sqrt(sum(bins.counts)) * max(domain_mean, LEAST_SUCCESS)
    in_bin = sqrt(count) * max(mean / count, LEAST_SUCCESS)
    return 1 / (max(in_domain, LEAST_SUCCESS) * in_bin)


def to_json(domains: Mapping[str, Bins]) -> dict[str, Any]:
    return {name: asdict(bins) for name, bins in domains.items()}


def from_json(saved: Mapping[str, Any]) -> Domains:
    return {name: Bins(counts=tuple(bins["counts"]), sums=tuple(bins["sums"])) for name, bins in saved.items()}


def _bin(y: float) -> int:
    assert 0 <= y <= 1, y
    return min(int(y * BINS), BINS - 1)
