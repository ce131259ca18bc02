"""What a judge is asked and how its reply is read. Sends nothing.

Of the policy's text only the extracted answer is shown: on one line, shortened, and unable to close
the tags around it or to write the marks of a chat template. The verdict is the judge's own last
line and nothing else.

    >>> read_verdict("The answer says Score: 1.\\nScore: 0", scale=1)
    0.0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.errors import ConfigError
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Media, Message

if TYPE_CHECKING:
    from jinja2 import Template

SHIPPED = Path(__file__).with_name("judge.jinja")
LONGEST_ANSWER = 2000  # characters of an answer that the judge sees
NEEDED = ("question", "references", "prediction")  # variables of a template
VERDICT = re.compile(r"[*_`\s]*score[*_`\s]*[:=][*_`\s]*(\d{1,6})(?:\.0+)?[*_`\s]*\.?", re.IGNORECASE)
MARK = re.compile(r"<(?=\S)|\[(?=/?[A-Z_]{3,}\])")  # <|im_end|>, </s>, [INST]


@dataclass(frozen=True, kw_only=True)
class Case:
    question: str
    references: tuple[str, ...]
    prediction: str
    media: tuple[Media, ...] = ()

    @property
    def shown(self) -> dict[str, Any]:
        """What a verdict depends on, pictures by name."""
        return {
            "question": self.question,
            "references": list(self.references),
            "prediction": self.prediction,
            "images": ["/".join(map(str, media.key)) for media in self.media],
        }


def case_of(sample: RewardSample, answer: str, *, images: bool = False) -> Case:
    asked = [str(m["content"]) for m in sample.messages if m["role"] == "user"]
    return Case(
        question="\n".join(asked) or sample.prompt,
        references=tuple(filter(None, sample.golds)),
        prediction=_harmless(answer),
        media=tuple(sample.media) if images else (),
    )


def _harmless(answer: str) -> str:
    line = MARK.sub(lambda found: f"{found[0]} ", " ".join(answer.split()))
    line = "".join(c for c in line if c.isprintable())
    return line if len(line) <= LONGEST_ANSWER else line[:LONGEST_ANSWER] + " [cut]"


def question_of(case: Case, template: Template, scale: int) -> Message:
    text = template.render(question=case.question, references=case.references, prediction=case.prediction, scale=scale)
    return Message(role="user", parts=(*case.media, text))


def template_text(path: str | None) -> str:
    return (Path(path) if path else SHIPPED).read_text(encoding="utf-8")


def compiled(source: str) -> Template:
    from jinja2 import StrictUndefined, TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    try:
        used = meta.find_undeclared_variables(environment.parse(source))
        template = environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"reward.judge.template: line {error.lineno}: {error.message}") from None
    missing, unknown = set(NEEDED) - used, used - {*NEEDED, "scale"}
    if missing or unknown:
        problem = f"does not use {sorted(missing)}" if missing else f"knows no {sorted(unknown)}"
        raise ConfigError(
            f"reward.judge.template: it {problem}; write {{{{ question }}}}, {{{{ references }}}} "
            "and {{ prediction }}, and ask for a last line such as Score: 1"
        )
    return template


def read_verdict(reply: str, scale: int) -> float | None:
    """The score of the last line as a share of the best one; None where there is no such line."""
    found = VERDICT.fullmatch(reply.rstrip().rpartition("\n")[2])
    score = int(found[1]) if found else -1
    return score / scale if 0 <= score <= scale else None
