"""The text of a prompt with media, as the folder's own processor writes it (`PictureReader`): expanded from what a chat
template shows, and back, for whoever runs the processor again.

    text = expand(reader, "Look at <image>.", [media])
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.families.picture_processor import SENSES, PictureReader
from saccade.types import Media, MediaSpan


def expand(reader: PictureReader, text: str, media: Sequence[Media]) -> str:
    """What the processor writes, with one placeholder in the place of those of each medium."""
    rows = [reader.known(one) for one in media]
    pieces = re.split("(" + "|".join(map(re.escape, reader.markers.values())) + ")", text)
    texts, found = pieces[::2], pieces[1::2]
    if found != [reader.markers[one.kind] for one in media]:
        kinds = " and ".join(sorted({f"{one.kind}s" for one in media}))
        hint = "this model or its template does not take them all: try prompt.chat_template=FILE"
        raise ConfigError(f"the chat template shows {len(found)} of {len(media)} {kinds}; {hint}")
    tokens = [reader.listening.convert_ids_to_tokens(reader.placeholders[one.kind]) for one in media]
    if reader.apart:
        shown = [row.before + token + row.after for row, token in zip(rows, tokens, strict=True)]
        return "".join(a + b for a, b in zip(texts, (*shown, ""), strict=True))
    reader.call(text, [reader.blank(*reader.size(one)) for one in media])
    written, rest = "", reader.listening.heard.text
    for row, token in zip(rows, tokens, strict=True):
        before, inside, rest = rest.partition(row.inside)
        if not inside:
            raise EnvironmentProblem(f"{reader.path}: its processor writes a picture in more than one way")
        written += before + token
    return written + rest


def collapse(reader: PictureReader, ids: np.ndarray, spans: Sequence[MediaSpan]) -> list[int]:
    """Ids with what a template shows in the place of each medium: its placeholders and the text that is written
    around them go, for whoever runs the processor again.
    """
    rows = [reader.blank_row(*reader.size(span.media)) for span in spans]
    pieces = np.split(ids, [place for span in spans for place in (span.start, span.end)])[::2]
    texts = [piece.tolist() for piece in pieces]
    for number, (row, span) in enumerate(zip(rows, spans, strict=True)):
        texts[number] = _without(reader.listening, texts[number], row.before, end=True)
        texts[number + 1] = _without(reader.listening, texts[number + 1], row.after, end=False)
        texts[number] += reader.listening.encode(reader.markers[span.media.kind], add_special_tokens=False)
    return [i for text in texts for i in text]


def _without(tokenizer: Any, ids: list[int], text: str, *, end: bool) -> list[int]:
    """Without a text at the end or the start. A token that it shares with what stands beside it is written again;
    ids that do not end or begin so stay as they are.
    """
    for count in range(len(text.encode()) + 2):
        kept, part = (ids[: len(ids) - count], ids[len(ids) - count :]) if end else (ids[count:], ids[:count])
        shown = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if shown.endswith(text) if end else shown.startswith(text):
            rest = shown[: len(shown) - len(text)] if end else shown[len(text) :]
            beside = tokenizer.encode(rest, add_special_tokens=False)
            return kept + beside if end else beside + kept
    return ids


def special(reader: PictureReader) -> set[int]:
    """Tokens that are written for media alone, or said to be theirs: nobody may sample them. Not blank lines, which
    stand around pictures and are tokens of their own, too.
    """
    tokenizer, found = reader.processor.tokenizer, set(reader.media_ids.tolist())
    added = {token for token, known in tokenizer.added_tokens_decoder.items() if known.content.strip()}
    known = {*tokenizer.all_special_ids, *added, *found}
    for kind, (frame, *_) in reader.frames.items():
        rows = [reader.blank_row(*size) for size in SENSES[kind].sizes]
        texts = ["".join(frame), *(frame[0] + row.before + row.inside + row.after + frame[1] for row in rows)]
        bare, *shown = (set(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        found |= (set().union(*shown) & known) - bare
    return found | {token for table in reader.kinds.values() for token, _ in table} & known
