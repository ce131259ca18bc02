"""Chat templates and the traps in them."""

import pytest

from saccade.models.tiny import TEMPLATE, build

TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
TEXT_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
FORGETS = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}",
    1,
)
OPENS = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
SKIPS_TOOLS = TEMPLATE.replace("in messages %}", "in messages if m['role'] != 'tool' %}", 1)
BLIND_TOOLS = TEMPLATE.replace(
    "{% if c['type'] == 'image' %}", "{% if c['type'] == 'image' and m['role'] == 'user' %}", 1
).replace("{{ c['text'] }}", "{{ c['text'] if c['text'] is defined }}", 1)

TRAPS = {
    "default system": (DEFAULT_SYSTEM + TEMPLATE, "warning", "'You are a helpful assistant.'"),
    "forgets thoughts": (FORGETS, "note", "drops thoughts of earlier turns"),
    "opens a thought": (OPENS, "note", "opens <think>"),
    "no system": (REFUSES_SYSTEM + TEMPLATE, "warning", "refuses system turns"),
    "no tools": (SKIPS_TOOLS, "warning", "leaves out tool turns"),
    "no pictures from tools": (BLIND_TOOLS, "warning", "drops pictures in tool turns"),
    "no pictures": (TEXT_ONLY, "failure", "drops pictures of a question"),
}


def test_a_plain_template(found, healthy):
    said = found(1, healthy)
    assert said.keys() == {"ok"} and said["ok"][1].startswith("system and tool turns")
    assert said["ok"][0] == "264 of 272 ids, 13 never sampled, ends with <|im_end|>, <|endoftext|>"


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_found_and_no_other(found, healthy, tmp_path, name):
    template, status, text = TRAPS[name]
    (tmp_path / "trap.jinja").write_text(template)
    said = found(1, healthy, f"prompt.chat_template={tmp_path / 'trap.jinja'}")
    assert any(text in line for line in said[status])
    if name not in ("no pictures", "no tools"):  # what shows none shows none of tools either
        assert sum(map(len, said.values())) == 2  # the tokenizer, and this


def test_words_in_no_vocabulary_do_not_matter(found, word_model):
    """Templates are judged by what they write, whatever a small vocabulary makes of it."""
    assert found(1, word_model).keys() == {"ok"}


def test_words_of_the_rows_that_are_in_no_vocabulary_are_told(found, word_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "how many teapots ?", "answer": "1"}\n')
    [said] = found(1, word_model, f"data.train={tmp_path / 'rows.jsonl'}")["warning"]
    assert "does not know 25% of the words of these rows, such as 'teapots'" in said
    assert "warning" not in found(1, word_model, "data.train=gone.jsonl")


def test_a_tokenizer_that_is_larger_than_the_model(found, tmp_path):
    path = build("qwen3", tmp_path, text={"vocab_size": 262})
    assert found(1, path)["failure"] == ["it has 264 ids, the model 262"]
