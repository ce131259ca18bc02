"""Five thousand ways to say an answer; whether it is right follows from how the sentence was made."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from saccade.plugins.verifiers.wording import HAN, ONES, TENS
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS

CASES = 5_000
SEED = 20
MISSED = 0.01  # the share of right answers that may score 0

OPTIONS = ("dog", "cat", "horse", "bird", "whale")

# Namings of one answer.
INTEGER = (
    "{n}", "{n}", "{n}.0", "+{n}", "{word}", "{n} ({word})", "{word} ({n})", "{han}", "{script}",
)  # fmt: skip
FRACTION = (
    "{t}/{b}", "{t} / {b}", r"\frac{{{t}}}{{{b}}}", r"\tfrac{{{t}}}{{{b}}}",
    r"\dfrac{{{tt}}}{{{bb}}}", r"\left({t}/{b}\right)", "{value}", "{value:.4f}", "{value:.2%}",
)  # fmt: skip
OPTION = (
    "{L}", "{L}", "({L})", "({low})", "option {L}", "option {low}", "{w}", "the {w}", "a {w}", "{L} ({w})", "{L}, {w}",
    "{L} - {w}", "{L} {w}", "{L}. {w}", "({L}) {w}", "{L}: a {w}", "{low}. {w}", "{low}) {w}", "{low}: {w}",
)  # fmt: skip
# Frames that keep what they hold.
TIGHT = (
    "{}", "{}", "{}", " {} ", "**{}**", "*{}*", "__{}__", "`{}`", '"{}"', "'{}'", "\u201c{}\u201d",
    "[{}]", "({})", "{{{}}}", "${}$", "$${}$$", r"\({}\)", r"\[{}\]", r"\text{{{}}}",
    r"\textbf{{{}}}", r"\boxed{{{}}}", r"\fbox{{{}}}", r"\underline{{{}}}", r"\color{{red}}{}",
    r"\color{{red}}{{{}}}", r"\textcolor{{red}}{{{}}}", r"**${}$**",
)  # fmt: skip
LOOSE = (
    "{}", "{}", "{}.", "{},", "{};", "Answer: {}", "**Answer:** {}", "Answer: {}.",
    "Final answer: {}", "The answer is {}", "The final answer is {}.", "the answer is: {}",
    "The correct answer is {}.", "My answer is {}.", "It is {}", "It's {}.", "This is {}.",
    "So the answer is {}.", "Therefore, {}", "Thus, the answer is {}.", "Hence {}.",
    "\u7b54\u6848\uff1a{}", "\u7b54\u6848\u662f{}\u3002", "\u2705 {}", "{} \u2705",
)  # fmt: skip
ABOUT = (
    "about {}", "approximately {}", "Roughly {}", "around {}", "\u2248 {}", r"\approx {}", "= {}",
)  # fmt: skip
# Frames that take it back, or leave it open; {other} is another answer of the same kind.
DENIED = (
    "not {}", "Not {}.", "It is not {}", "It isn't {}.", "The answer is not {}", "never {}", "anything but {}",
    "Anything other than {}.", "other than {}", "everything except {}", "\u00ac{}", "~~{}~~", r"\neg {}", r"\lnot {}",
    r"\cancel{{{}}}", r"\sout{{{}}}", "<s>{}</s>", "<del>{}</del>", "{} is wrong", "{} is incorrect.",
    "{} is not the answer", "neither {} nor {other}", "rather {other} than {}", "{other} instead of {}",
    "\u4e0d\u662f{}", "\u9664\u4e86{}",
)  # fmt: skip
OPEN = (
    "maybe {}", "Perhaps {}.", "possibly {}", "probably {}", "{}?", "Is it {}?", "{} or {other}", "{other} or {}",
    "either {} or {other}", "between {} and {other}", "{} / {other}", "It could be {}", "It might be {}.",
    "I am unsure, {}", "unlikely {}", "{}, but I doubt it", "Sorry, I can't help with that. {}",
    "I cannot answer this. {}", "\u53ef\u80fd\u662f{}", "{}\u6216{other}",
)  # fmt: skip
CORRECTED = (
    "{}, no, {other}", "{}. Wait, {other}", "{}. No, {other}.", "{}, sorry, I mean {other}",
    "{} ... actually {other}", "First {}, then {other}",
)  # fmt: skip
BOUNDS = (
    "nearly {}", "almost {}", "at least {}", "at most {}", "maximum {}", "minimum {}", "max. {}", "up to {}",
    "more than {}", "less than {}", "fewer than {}", "no more than {}", "over {}", "under {}", "{} if any",
    "{} at most", "{} at least", "{} maximum", "{} or more", "none of the {}", "without {}", "half of {}",
    "{} squared", "{} million", "{} zero", "{}th", "{}k", "-{}", "{}!{}", "{}.5", "1{}", "0.{}", "x + {}", "> {}",
    r"\ne {}", "\u2260 {}", r"\sqrt{{{}}}", "{}^2", "{}-{other}", "{} to {other}", "{}, {other}", "close to {}",
    "!= {}", "\u81f3\u5c11{}", "\u8d85\u8fc7{}", "{}\u4e07", "{} is ruled out", "{} each", "{} per box",
)  # fmt: skip
# Where an answer stands in a response. The last of two marked ones counts.
PLACES = (
    "<answer>{}</answer>", "<answer>\n{}\n</answer>", "<think>It may be {other}.</think> <answer>{}</answer>",
    r"\boxed{{{}}}", r"I count them. \boxed{{{}}}", "Answer: {}", "I look at it.\nAnswer: {}",
    "Answer: {other}\nI made a mistake.\nAnswer: {}", "Answer: {other}\nI made a mistake. Answer: {}",
    r"\boxed{{{other}}} Wait, no: \boxed{{{}}}", "<answer>{other}</answer> <answer>{}</answer>",
    "<answer>~~{other}~~ {}</answer>",
)  # fmt: skip
TAKEN_BACK = (
    "Answer: {}\nI made a mistake. Answer: {other}", "Answer: {}\nWait, it should be {other}.",
    r"\boxed{{{}}} Wait, no: \boxed{{{other}}}", r"\boxed{{{}}}. Wait, I made a mistake: {other}",
    "<answer>{}</answer> <answer>{other}</answer>", "<think>Answer: {}</think> <answer>{other}</answer>",
    "<think>{}</think> Answer: {other}", "<answer>{}</answer> No, that is wrong, it is {other}.",
    "<answer>{}</answer> No wait.", "<answer>{}</answer> Sorry, I mean {other}.", "Answer: {}\nCorrection: {other}",
    r"\boxed{{{}}} That is not correct.", "Answer: {}\nOn second thought, {other}.",
    "<answer>{}</answer>\nI was wrong.", r"\boxed{{{}}}. My answer is wrong.", "Answer: {}\nI miscounted.",
    "<answer>{}</answer> Scratch that.", r"It's not \boxed{{{}}}", r"The wrong answer is \boxed{{{}}}.",
    "It cannot be <answer>{}</answer>", "<answer>{}</answer> Ignore the above.", "Answer: {}\nHold on, {other}.",
    r"\boxed{{{}}} Edit: should be {other}",
)  # fmt: skip

# What may follow a right answer: it speaks of other answers, or of none.
AFTERWORDS = (
    "The other options are wrong.", "The others are incorrect.", "None of the others fit.",
    "No other answer is possible.", "No other objects are visible.", "Nothing else is visible.",
    "Actually this matches the picture.", "Sorry for the long explanation.", "I'm sorry if this is hard to see.",
    "Note that 1000 would be incorrect.", "Any other value would be wrong.", "It would be wrong to count the shadow.",
    "Wait times do not matter here.", "Let me know if I made a mistake.", "I checked it: there is no mistake.",
    "No further steps are needed.", "Wait, let me check it once more. Yes, it is correct.",
    "There is no doubt about it.", "A common mistake is to look at the background.",
    "The sign in the corner is actually blue.",
)  # fmt: skip
MARKED = (
    "<answer>{}</answer>\n", "<answer>{}</answer> ", r"\boxed{{{}}}. ", r"It is $\boxed{{{}}}$. ",
    "Answer: {}\n", "**Answer: {}**\n\n",
)  # fmt: skip

Draw = random.Random


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Golds of a verifier with another answer each, their namings, and what fits them alone."""

    pair: Callable[[Draw], tuple[str, str]]
    naming: Callable[[Draw, str], str]
    kept: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    places: tuple[str, ...] = ()  # beside those that all verifiers know


def english(n: int) -> str:
    return ONES[n] if n < 20 else TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")


def chinese(n: int) -> str:
    tens = (HAN[n // 10] if n > 19 else "") + "\u5341" if n > 9 else ""
    return tens + (HAN[n % 10] if n % 10 else "")


def integer(draw: Draw, text: str) -> str:
    n = int(text)
    zero = ord(draw.choice("\uff10\u0660\u0966"))  # full-width, Arabic, Hindi
    script = "".join(chr(zero + int(sign)) for sign in text)
    word = draw.choice([english(n), english(n).capitalize()])
    return draw.choice(INTEGER).format(n=n, word=word, han=chinese(n), script=script)


def integers(draw: Draw) -> tuple[str, str]:
    gold, other = draw.sample(range(2, 100), 2)
    return str(gold), str(other)


def fraction(draw: Draw, text: str) -> str:
    top, bottom = map(int, text.split("/"))
    value = top / bottom
    return draw.choice(FRACTION).format(t=top, b=bottom, tt=2 * top, bb=2 * bottom, value=value)


def fractions(draw: Draw) -> tuple[str, str]:
    bottom = draw.choice([4, 8, 16])
    gold, other = draw.sample(range(1, bottom, 2), 2)
    return f"{gold}/{bottom}", f"{other}/{bottom}"


def option(draw: Draw, letter: str) -> str:
    words = OPTIONS[ord(letter) - 65]
    return draw.choice(OPTION).format(L=letter, low=letter.lower(), w=words)


def options(draw: Draw) -> tuple[str, str]:
    return tuple(draw.sample("ABCDE", 2))


def mismatched(draw: Draw, letter: str) -> str:
    """A letter with the words of another option."""
    words = draw.choice([word for word in OPTIONS if word != OPTIONS[ord(letter) - 65]])
    return draw.choice([f"{letter} ({words})", f"{letter}. {words}", f"{letter}, the {words}"])


CHOSEN = ("I choose {}", "{} is correct", "{} is the answer.", "{}!", "I pick {}.")
BARE = ("{}",)  # the whole response
KINDS = {
    "count": Kind(pair=integers, naming=integer, kept=ABOUT, broken=BOUNDS, places=BARE),
    "number": Kind(pair=integers, naming=integer, kept=ABOUT, broken=BOUNDS, places=BARE),
    "math": Kind(pair=integers, naming=integer, kept=ABOUT, broken=BOUNDS),
    "math, fractions": Kind(pair=fractions, naming=fraction, kept=ABOUT),
    "choice": Kind(pair=options, naming=option, kept=CHOSEN, choices=OPTIONS, places=BARE),
}


def cases(name: str, draw: Draw) -> list[tuple[str, str, bool]]:
    """Gold, response, and whether it is right: by its value, by its frame, and by what follows."""
    kind = KINDS[name]
    gold, other = kind.pair(draw)
    said, instead = kind.naming(draw, gold), kind.naming(draw, other)

    def framed(text: str) -> str:
        text = draw.choice(TIGHT).format(text)
        return draw.choice(LOOSE if draw.random() < 0.8 or not kind.kept else kind.kept).format(text)

    broken = draw.choice([DENIED, OPEN, CORRECTED, kind.broken or DENIED])
    plain = {"math, fractions": gold}.get(name, said)
    place, after = draw.choice(PLACES + kind.places), draw.choice(TAKEN_BACK)
    made = [
        (place.format(framed(said), other=other), True),
        (draw.choice(MARKED).format(gold) + draw.choice(AFTERWORDS), True),
        (place.format(framed(instead), other=gold), False),
        (place.format(draw.choice(broken).format(plain, plain, other=instead), other=other), False),
        (after.format(framed(said), other=instead), False),
    ]
    if name == "choice":
        made.append((place.format(mismatched(draw, gold), other=other), False))
    return [(gold, text, right) for text, right in made]


@pytest.mark.parametrize("name", KINDS)
def test_no_wrong_paraphrase_passes_and_hardly_a_right_one_fails(name):
    kind, draw = KINDS[name], random.Random(f"{SEED} {name}")
    made: list[tuple[str, str, bool]] = []
    while len(made) < CASES / len(KINDS):
        made += cases(name, draw)
    wrong = []
    for gold, response, right in made:
        sample = RewardSample(id="a", response=response, answer=gold, choices=kind.choices)
        score = VERIFIERS[name.partition(",")[0]].function(sample)
        if score.kind != "value" or (score.value == 1) != right:
            wrong.append((gold, response, right))
    assert [case for case in wrong if not case[2]] == []
    assert len(wrong) <= MISSED * sum(right for *_, right in made), wrong
