from dataclasses import replace

import pytest

from saccade.config import PromptConfig
from saccade.data.prompts import apply, instruction_for, permute_choices, texts_hash
from saccade.errors import ConfigError
from saccade.media.images import open_media
from saccade.types import Message


@pytest.fixture
def media(picture):
    return open_media(str(picture()))


def test_every_format_has_an_instruction():
    assert instruction_for("think_boxed").endswith(r"\boxed{result}.")
    assert instruction_for("counting") == (instruction_for("think_answer") + " The answer is one integer.")
    assert all(map(instruction_for, ("boxed", "answer_line", "hash", "letter", "direct")))
    assert instruction_for("none") == ""
    with pytest.raises(ConfigError, match=r"prompt.format=haiku: unknown; choose one of think_answer"):
        instruction_for("haiku")
    assert len(texts_hash()) == 64


def test_instruction_before_and_after_and_images_in_their_place(ask, media):
    sample = ask(media, "How many?")
    after = apply(sample, PromptConfig(), instruction="Count.")
    assert after.messages[0].parts == (media, "How many?\nCount.")
    before = apply(sample, PromptConfig(position="before"), instruction="Count.")
    assert before.messages[0].parts == (media, "Count.\nHow many?")
    assert apply(sample, PromptConfig(), instruction="") == sample
    parts = ("First ", media, " then ", media)
    done = apply(ask(*parts), PromptConfig(), instruction="Go.")
    assert done.messages[0].parts == (*parts, "\nGo.")


def test_everything_is_added_once_to_the_first_user_message(ask, media):
    config = PromptConfig(system="Be brief.")
    once = apply(ask(media, "Which?", choices=("a", "b")), config, instruction="Go.")
    assert [m.role for m in once.messages] == ["system", "user"]
    assert once.messages[1].parts == (media, "Which?\n(A) a\n(B) b\nGo.")
    assert apply(once, config, instruction="Go.") == once
    own = Message(role="system", parts=("Mine.",))
    sample = ask("?")
    sample = replace(sample, messages=(own, *sample.messages))
    done = apply(sample, PromptConfig(system="Yours."), instruction="Go.")
    assert [m.text for m in done.messages] == ["Mine.", "?\nGo."]  # that of the row wins
    turns = tuple(Message(role=role, parts=("x",)) for role in ("user", "assistant", "user"))
    done = apply(replace(ask("x"), messages=turns), PromptConfig(), instruction="Go.")
    assert [m.text for m in done.messages] == ["x\nGo.", "x", "x"]


def test_system_and_template_from_a_file(ask, tmp_path):
    (tmp_path / "system.txt").write_text("From a file.\n")
    config = PromptConfig(system=str(tmp_path / "system.txt"))
    assert apply(ask("?"), config, instruction="").messages[0].text == "From a file."
    with pytest.raises(ConfigError, match=r"prompt.system=gone\.txt: the file does not exist"):
        apply(ask("?"), PromptConfig(system="gone.txt"), instruction="")
    with pytest.raises(ConfigError, match=r"prompt.template=gone\.jinja: the file does not exist"):
        apply(ask("?"), PromptConfig(template="gone.jinja"), instruction="")


@pytest.fixture
def templated(tmp_path):
    def write(text):
        (tmp_path / "t.jinja").write_text(text)
        return PromptConfig(template=str(tmp_path / "t.jinja"))

    return write


def test_a_template_surrounds_the_question_and_may_place_the_rest(ask, media, templated):
    config = templated("Look: {{ content | trim }} (level {{ row.level }})\n")
    sample = ask(media, " How many? ", extra={"level": 3})
    done = apply(sample, config, instruction="Count.")
    assert done.messages[0].parts == ("Look: ", media, " How many? (level 3)\nCount.")
    config = templated("{{ instruction }} {{ content }} {{ choices | join('; ') }}")
    done = apply(ask("Which?", choices=("x", "y")), config, instruction="Go.")
    assert done.messages[0].text == "Go. Which? (A) x; (B) y"


@pytest.mark.parametrize(("text", "reason"), [
    ("no content", "lost, doubled or moved"),
    ("{{ content }}{{ content }}", "lost, doubled or moved"),
    ("{{ content }}{{ contnt }}", "'contnt' is undefined"),
    ("{{ content.__class__.__mro__ }}", "unsafe"),
    ("{% if %}", "line 1"),
])  # fmt: skip
def test_templates_that_do_harm_are_refused(ask, media, templated, text, reason):
    with pytest.raises(ConfigError, match=f"prompt.template.*{reason}"):
        apply(ask(media, "?"), templated(text), instruction="")


def test_the_gold_letter_follows_its_option(ask):
    sample = ask("?", choices=("red", "green", "blue", "grey"), answer="B")
    orders = set()
    for index in range(40):
        moved = permute_choices(replace(sample, id=str(index)), seed=1)
        assert moved.choices["ABCD".index(moved.answer)] == "green"
        assert sorted(moved.choices) == sorted(sample.choices)
        orders.add(moved.choices)
        golds = ("(b)", "B, D.", "b. Green", "N/A", "E")
        both = ", ".join(sorted((moved.answer, "ABCD"[moved.choices.index("grey")])))
        listed = permute_choices(replace(sample, id=str(index), answer=golds), seed=1).answer
        assert listed == (f"({moved.answer})", f"{both}.", "green", "N/A", "E")
    assert len(orders) > 10
    assert permute_choices(sample, seed=1) == permute_choices(sample, seed=1)
    for index in range(8):
        row = replace(sample, id=str(index))
        written = apply(row, PromptConfig(permute_choices=True), instruction="", choices_seed=1)
        assert written.choices == permute_choices(row, seed=1).choices
        assert f"({written.answer}) green" in written.messages[0].text
        assert apply(row, PromptConfig(), instruction="", choices_seed=1).choices == row.choices


def test_options_that_the_question_lists_gold_texts_and_lettered_options_stay(ask):
    sample = ask("Which? A. red B. green C. blue", choices=("red", "green", "blue"), answer="B")
    for index in range(8):
        assert permute_choices(replace(sample, id=str(index)), seed=1).answer == "B"
    text = permute_choices(ask("?", choices=("red", "green"), answer="red"), seed=3)
    assert text.answer == "red"
    letters = ask("?", choices=("A", "B", "C"), answer="C")
    assert permute_choices(letters, seed=3) == letters
    assert permute_choices(ask("?", answer="B"), seed=3).answer == "B"
