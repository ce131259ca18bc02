import json
from collections import Counter

import pytest

from saccade.config import DataConfig
from saccade.data.datasets import Dataset, Part, Stream
from saccade.errors import ConfigError, DataError
from saccade.types import Message, Sample


def dataset(*sizes, weights=(None,) * 3, hash="h", lengths=(), **columns):
    samples, parts = [], []
    for name, size, weight in zip("abc", sizes, weights, strict=False):
        start = len(samples)
        for n in range(size):
            extra = {name: values[len(samples)] for name, values in columns.items()}
            samples.append(Sample(id=f"{name}{n}", messages=(Message(role="user", parts=(str(n),)),), extra=extra))
        parts.append(Part(name=name, format="qa", start=start, stop=start + size, rows=size, weight=weight))
    return Dataset(samples=tuple(samples), parts=tuple(parts), lengths=lengths, hash=hash)


def stream(data, seed=7, **options):
    return Stream(data, seed=seed, config=DataConfig(**options))


def ids(samples):
    return [sample.id for sample in samples]


def test_an_epoch_shows_every_row_once_in_an_order_of_seed_and_epoch():
    shuffled, other = stream(dataset(10, 5)), stream(dataset(10, 5))
    first, second = ids(shuffled.take(15)), ids(shuffled.take(15))
    assert sorted(first) == sorted(second) and first != second
    assert shuffled.rows_per_epoch == 15 and shuffled.epoch == 2
    assert ids(other.take(1) + other.take(20) + other.take(9)) == first + second
    assert ids(stream(dataset(10, 5), seed=8).take(15)) != first
    plain = stream(dataset(10))
    plain.take(7)
    coming = ids(plain.peek(5))
    assert ids(plain.take(5))[: len(coming)] == coming and len(coming) == 3


@pytest.mark.parametrize("order", ["shuffle", "sequential", "length", "column:level"])
@pytest.mark.parametrize("weights", [(None, None), (1.0, 2.0)])
@pytest.mark.parametrize("taken", [3, 12, 40])
def test_a_restored_stream_goes_on_with_the_next_row(order, weights, taken):
    data = dataset(8, 4, weights=weights, lengths=tuple(range(12)), level=list(range(12)))
    first = stream(data, order=order)
    first.take(taken)
    if taken == 12 and weights[0] is None:  # at the end of an epoch the next one begins
        assert (first.epoch, first.state()["cursor"]) == (1, 0)
    again = stream(data, order=order)
    again.restore(json.loads(json.dumps(first.state())))
    assert again.epoch == first.epoch
    assert ids(again.take(30)) == ids(first.take(30))


def test_state_of_other_data_or_another_seed_is_refused():
    state = stream(dataset(6)).state()
    with pytest.raises(DataError, match="changed"):
        stream(dataset(6, hash="other")).restore(state)
    with pytest.raises(ConfigError, match=r"run.seed=7"):
        stream(dataset(6), seed=8).restore(state)
    with pytest.raises(DataError, match="no usable row"):
        stream(dataset(0))


def test_orders():
    data = dataset(3, lengths=(5, 1, 3), level=["10", "9", "11"], name=["b", "c", "a"], mixed=[1, "n/a", 2])
    assert ids(stream(data, order="sequential").take(3)) == ["a0", "a1", "a2"]
    assert ids(stream(data, order="length").take(3)) == ["a1", "a2", "a0"]
    assert ids(stream(data, order="column:level").take(6)) == ["a1", "a0", "a2"] * 2
    assert ids(stream(data, order="column:name").take(3)) == ["a2", "a0", "a1"]
    for order, said in {
        "column:depth": "row a0 has no such column; it has level",
        "column:mixed": "must hold numbers or text throughout",
        "random": "write shuffle, sequential, length or column:NAME",
    }.items():
        with pytest.raises(ConfigError, match=said):
            stream(data, order=order)
    with pytest.raises(ConfigError, match="needs token lengths"):
        stream(dataset(3), order="length")


def test_a_mixture_goes_on_until_every_source_was_seen_or_the_first():
    mixed = stream(dataset(20, 100, weights=(0.5, 0.5)))
    seen = Counter(ids(mixed.take(mixed.rows_per_epoch)))
    assert mixed.epoch == 1 and len(seen) == 120
    assert min(seen[f"a{n}"] for n in range(20)) >= 3  # the small source went round several times
    assert {seen[f"b{n}"] for n in range(100)} == {1}
    mixed = stream(dataset(20, 100, weights=(0.5, 0.5)), mixing="first_exhausted")
    seen = Counter(ids(mixed.take(mixed.rows_per_epoch)))
    assert set(seen.values()) == {1} and sum(id.startswith("a") for id in seen) == 20
    assert 5 < sum(id.startswith("b") for id in seen) < 60
    taken = ids(stream(dataset(50, 50, weights=(3.0, 1.0))).take(4000))
    assert sum(id.startswith("a") for id in taken) / 4000 == pytest.approx(0.75, abs=0.03)
