"""Calls as models write them: read without mercy, in bounded time, and nothing is evaluated."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.plugins.tools.calls import CallError, CallSpan, find, read


def reason(text) -> str:
    with pytest.raises(CallError) as caught:
        read(text)
    return caught.value.reason


def test_key_order_quotes_and_blanks_do_not_matter():
    wanted = {"bbox_2d": [0, 0.25, 1, 1], "source": "original_image"}
    for text in (
        '{"bbox_2d": [0, 0.25, 1, 1], "source": "original_image"}',
        "{'source':'original_image','bbox_2d':[0,2.5e-1,1,1]}",
        '\n{"source": \'original_image\',\t"bbox_2d" : [ 0 , 0.25, 1, 1 ] }\n',
    ):
        assert read(text) == wanted
    assert read(r"""{'a': 'it\'s "so"', "b": "\u00e9\n"}""") == {"a": 'it\'s "so"', "b": "é\n"}


HOSTILE = {
    "__import__('os').system('touch /tmp/owned')": "json",
    "{'a': NaN}": "number",
    "{'a': 1e400}": "number",
    "{'a': " + "9" * 4000 + "}": "number",
    "{'a': " + "9" * 10**6 + "}": "too_long",
    "{'a': '" + "é" * 2100 + "'}": "too_long",  # 4200 bytes in 2108 characters
    "[" * 4000: "json",
    "{'a': " * 9 + "1" + "}" * 9: "json",
    "{'a': 1, 'a': 2}": "json",
    "{'a': '\\ud800'}": "json",  # half a character
    "{'a': \uff11}": "json",  # a digit, but not one of JSON
    "": "json",
}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_plain_object_is_refused(text):
    assert reason(text) == HOSTILE[text]


def test_the_first_calls_with_an_end_count_and_a_mention_does_not():
    text = "I use <tool_call>: <tool_call>1</tool_call></tool_call>, <tool_call>2</tool_call>"
    assert [w.body for w in find(text, "tool_call", 1)] == ["1"]
    assert [w.body for w in find(text, "tool_call", 9)] == ["1", "2"]
    (first,) = find(text, "tool_call", 1)
    assert text[first.start : first.end] == "<tool_call>1</tool_call>"
    assert find("nothing", "tool_call", 1) == []
    assert find("x <grounding>{}", "grounding", 1) == [CallSpan(2, 15, None)]
    assert reason(None) == "unclosed"


NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(max_size=4)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw makes a table of all characters
@given(st.dictionaries(NAMES, PLAIN, max_size=3))
def test_whatever_json_writes_is_read(value):
    assert read(json.dumps(value)) == value
    assert read(json.dumps(value, ensure_ascii=False)) == value


@given(st.text(alphabet="{}[]'\":,0.5eE-+ntrufalse\\ \n", max_size=60))
def test_what_is_read_is_what_json_says(text):
    try:
        value = read(text)
    except CallError:
        return
    if "'" not in text:
        assert value == json.loads(text)
    assert isinstance(value, dict)
