"""Pages: nothing is owned twice or lost, whoever writes in one writes alone; and which rows begin alike."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engines.embedded.pages import Pages
from saccade.plugins.gpu import decode_state

SLOTS, COUNT, PAGE = 5, 40, 4


def fresh(page=PAGE, count=COUNT):
    pages = Pages(page=page)
    pages.reshape(SLOTS, 200)
    pages.grow(count)
    return pages


def extend(pages, slot, tokens):
    pages.extend(np.array([slot]), np.array([tokens]))


def places_of(pages, slot, first, count):
    return pages.places(np.array([slot]), np.array([first]), np.array([count]))


def test_tokens_lie_where_their_pages_say():
    pages = fresh()
    pages.extend(np.array([2, 0]), np.array([9, 3]))
    assert pages.held.tolist() == [1, 0, 3, 0, 0] and pages.free == COUNT - 4
    places = places_of(pages, 2, 0, 9)
    assert places.tolist() == [p * PAGE + i for p in pages.of(2) for i in range(PAGE)][:9]
    assert places_of(pages, 2, 5, 4).tolist() == places[5:].tolist()
    assert pages.lacking(np.array([2, 0, 1]), np.array([13, 4, 1])) == 2
    extend(pages, 2, 12)  # it fits already
    assert pages.held[2] == 3


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "fork", "release", "park", "resume", "keep", "forget", "grow"]),
        st.integers(0, SLOTS - 1),
        st.integers(1, 60),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_every_page_is_counted_and_has_one_writer(steps):
    pages = fresh()
    lengths = {}  # tokens of each busy slot
    parked = []
    kept = []  # readers: they write no more
    for action, slot, tokens in steps:
        slots, counts = np.array([slot]), np.array([tokens])
        if action == "extend" and pages.lacking(slots, counts) <= pages.free:
            pages.extend(slots, counts)
            lengths[slot] = max(tokens, lengths.get(slot, 0))
        elif action == "fork" and slot not in lengths and (lengths or kept):
            owner = next(iter(lengths), None)
            numbers, n = (pages.of(owner), lengths[owner]) if owner is not None else kept[0]
            if n % PAGE == 0 or pages.free:
                copied = pages.fork(numbers, n, slot)
                assert (copied is None) == (n % PAGE == 0)
                lengths[slot] = n
        elif action == "release" and slot in lengths:
            pages.drop(pages.detach(slot))
            del lengths[slot]
        elif action == "park" and slot in lengths:
            parked.append((pages.detach(slot), lengths.pop(slot)))
        elif action == "resume" and parked and slot not in lengths:
            numbers, lengths[slot] = parked.pop()
            pages.attach(slot, numbers)
        elif action == "keep" and slot in lengths:
            kept.append((pages.share(pages.of(slot)), lengths[slot]))
        elif action == "forget" and kept:
            pages.drop(kept.pop()[0])
        elif action == "grow" and pages.count < 3 * COUNT:
            pages.grow(pages.count + 7)

        owners = [(pages.of(s), n) for s, n in lengths.items()] + parked
        holders = [numbers for numbers, _ in owners + kept]
        counted = np.bincount(np.concatenate([*holders, np.zeros(0, np.int32)]).astype(int), minlength=pages.count)
        assert (counted == pages.references).all()
        assert pages.free == int((pages.references == 0).sum())
        free = pages._stack[: pages.free]
        assert len(set(free.tolist())) == pages.free and (pages.references[free] == 0).all()
        # Where a sequence will write next belongs to no other that may write.
        tails = [int(x) for numbers, n in owners for x in numbers[n // PAGE :]]
        assert len(set(tails)) == len(tails)
        for numbers, n in owners:
            others = [int(x) for more, _ in owners if more is not numbers for x in more]
            assert not set(numbers[n // PAGE :].tolist()) & set(others)


def test_neighbours_with_the_same_first_pages_are_a_family():
    table = [[1, 2, 3, 9], [1, 2, 4, 9], [1, 2, 5, 9], [7, 8, 6, 9]]  # three alike, one alone
    table += [[1, 2, 10, 0], [11, 12, 0, 0], [11, 13, 0, 0]]  # one that is not next to the others, two alike
    lengths = np.array([13, 14, 12, 12, 12, 7, 4])
    prefix_groups, shared = decode_state.find_prefix_groups(np.array(table), lengths, page=4, most=8)
    assert prefix_groups.T.tolist() == [[0, 3, 8], [5, 2, 4]]
    assert shared.tolist() == [8, 8, 8, 0, 0, 4, 4]


def test_a_family_is_as_large_as_one_program_can_read_and_shares_whole_pages():
    table, lengths = np.ones((10, 3), dtype=np.int32), np.full(10, 8)
    prefix_groups, _ = decode_state.find_prefix_groups(table, lengths, page=4, most=4)
    assert prefix_groups.T.tolist() == [[0, 4, 8], [4, 4, 8], [8, 2, 8]]
    prefix_groups, shared = decode_state.find_prefix_groups(table, lengths, page=4, most=3)
    assert prefix_groups.T.tolist() == [[0, 3, 8], [3, 3, 8], [6, 3, 8]] and shared[9] == 0
    # One row; and two whose common pages lie behind their own tokens, and so belong to nobody.
    for rows, tokens in ((1, [8]), (2, [7, 3])):
        prefix_groups, shared = decode_state.find_prefix_groups(table[:rows], np.array(tokens), page=4, most=8)
        assert prefix_groups.shape == (3, 0) and not shared.any()
