import json
from collections import Counter

import pytest

from saccade.config import DataConfig
from saccade.data.datasets import Dataset, Part, Stream
from saccade.errors import ConfigError, DataError
from saccade.types import Message, Sample


def dataset(*sizes, weights=None, hash="h", lengths=(), **columns):
    samples, parts = [], []
    for index, size in enumerate(sizes):
        start = len(samples)
        for n in range(size):
            extra = {name: values[len(samples)] for name, values in columns.items()}
            message = Message(role="user", parts=(str(n),))
            samples.append(Sample(id=f"{'abc'[index]}{n}", messages=(message,), extra=extra))
        weight = weights[index] if weights else None
        parts.append(Part(name="abc"[index], format="qa", start=start, stop=start + size, rows=size, weight=weight))
    return Dataset(samples=tuple(samples), parts=tuple(parts), lengths=lengths, hash=hash)


def stream(data, seed=7, **options):
    return Stream(data, seed=seed, config=DataConfig(**options))


def ids(samples):
    return [sample.id for sample in samples]


def test_an_epoch_shows_every_row_once_in_a_new_order():
    shuffled = stream(dataset(10, 5))
    first, second = ids(shuffled.take(15)), ids(shuffled.take(15))
    assert sorted(first) == sorted(second) and first != second
    assert shuffled.rows_per_epoch == 15 and shuffled.epoch == 2


def test_the_order_depends_on_seed_and_epoch_only():
    one, other = stream(dataset(12)), stream(dataset(12))
    whole = ids(one.take(36))
    assert ids(other.take(1) + other.take(20) + other.take(15)) == whole
    assert ids(stream(dataset(12), seed=8).take(12)) != whole[:12]


@pytest.mark.parametrize("order", ["shuffle", "sequential", "length", "column:level"])
@pytest.mark.parametrize("weights", [None, (1.0, 2.0)])
@pytest.mark.parametrize("taken", [0, 3, 11, 12, 13, 40])
def test_a_restored_stream_goes_on_with_the_next_row(order, weights, taken):
    data = dataset(8, 4, weights=weights, lengths=tuple(range(12)), level=list(range(12)))
    first = stream(data, order=order)
    first.take(taken)
    state = json.loads(json.dumps(first.state()))
    again = stream(data, order=order)
    again.restore(state)
    assert again.epoch == first.epoch
    assert ids(again.take(30)) == ids(first.take(30))


def test_at_the_end_of_an_epoch_the_next_one_begins():
    data = dataset(6)
    one = stream(data)
    one.take(6)
    assert (one.epoch, one.state()["cursor"]) == (1, 0)
    again = stream(data)
    again.restore(one.state())
    assert len(again.take(6)) == 6 and again.epoch == 2


def test_state_of_other_data_or_another_seed_is_refused():
    state = stream(dataset(6)).state()
    with pytest.raises(DataError, match="changed"):
        stream(dataset(6, hash="other")).restore(state)
    with pytest.raises(ConfigError, match=r"run.seed=7"):
        stream(dataset(6), seed=8).restore(state)
    with pytest.raises(DataError, match="no usable row"):
        stream(dataset(0))


def test_orders():
    lengths, level = (5, 1, 3), ["10", "9", "11"]
    data = dataset(3, lengths=lengths, level=level)
    assert ids(stream(data, order="sequential").take(3)) == ["a0", "a1", "a2"]
    assert ids(stream(data, order="length").take(3)) == ["a1", "a2", "a0"]
    assert ids(stream(data, order="column:level").take(6)) == ["a1", "a0", "a2"] * 2
    with pytest.raises(ConfigError, match="needs token lengths"):
        stream(dataset(3), order="length")
    with pytest.raises(ConfigError, match="row a0 has no such column; it has level"):
        stream(data, order="column:depth")
    with pytest.raises(ConfigError, match="write shuffle, sequential, length or column:NAME"):
        stream(data, order="random")


def test_a_mixture_goes_on_until_every_source_was_seen():
    mixed = stream(dataset(20, 100, weights=(0.5, 0.5)))
    seen = Counter(ids(mixed.take(mixed.rows_per_epoch)))
    assert mixed.epoch == 1 and len(seen) == 120
    assert min(seen[f"a{n}"] for n in range(20)) >= 3  # the small source went round several times
    assert {seen[f"b{n}"] for n in range(100)} == {1}


def test_a_mixture_can_end_with_its_first_source():
    mixed = stream(dataset(20, 100, weights=(0.5, 0.5)), mixing="first_exhausted")
    seen = Counter(ids(mixed.take(mixed.rows_per_epoch)))
    assert set(seen.values()) == {1} and sum(id.startswith("a") for id in seen) == 20
    assert 5 < sum(id.startswith("b") for id in seen) < 60


def test_weights_set_the_shares():
    mixed = stream(dataset(50, 50, weights=(3.0, 1.0)))
    taken = ids(mixed.take(4000))
    assert sum(id.startswith("a") for id in taken) / 4000 == pytest.approx(0.75, abs=0.03)


def test_what_comes_next_can_be_seen_before_it_is_taken():
    plain = stream(dataset(10))
    plain.take(7)
    coming = ids(plain.peek(5))
    assert ids(plain.take(5))[: len(coming)] == coming and len(coming) == 3
