"""Rows as the device reads them, and which of them begin alike."""

import numpy as np

from saccade.plugins.gpu import decode_state


def test_neighbours_with_the_same_first_pages_are_a_family():
    table = np.array(
        [
            [1, 2, 3, 9],
            [1, 2, 4, 9],
            [1, 2, 5, 9],
            [7, 8, 6, 9],  # alone
            [1, 2, 10, 0],  # not next to the others
            [11, 12, 0, 0],
            [11, 13, 0, 0],
        ]
    )
    lengths = np.array([13, 14, 12, 12, 12, 7, 4])
    prefix_groups, shared = decode_state.find_prefix_groups(table, lengths, page=4, most=8)
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
