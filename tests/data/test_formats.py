import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.config import DataConfig
from saccade.data.chats import RowError
from saccade.data.formats import FORMATS, detect, read_row
from saccade.data.records import content_hash
from saccade.errors import ConfigError, DataError
from saccade.media.images import ImageError, open_media
from saccade.plugins.check_data.canonical_rows import to_row
from saccade.types import Media


@pytest.fixture
def read(tmp_path):
    """Reads a row in the format that its columns show; any image name opens a small image."""

    def open_image(source, *, min_pixels=None, max_pixels=None, **more):
        size = sum(map(ord, str(source))) % 50 + 10  # a size of its own for every name
        pixels = np.zeros((size, size, 3), np.uint8)
        return open_media(pixels, min_pixels=min_pixels, max_pixels=max_pixels)

    def call(row, **options):
        config = DataConfig(**options)
        return read_row(row, detect(set(row), config), config, open_image=open_image, default_source="file")

    call.open_image = open_image
    return call


def shape(sample):
    """Roles and parts, an image written as *."""
    return [(m.role, "|".join("*" if isinstance(p, Media) else p for p in m.parts)) for m in sample.messages]


TURNS = [("user", "<image>Number?"), ("assistant", "<think>Small.</think>"), ("user", "Observation 1: <image>")]
TURNS.append(("assistant", "<answer>12</answer>"))
SPOKEN = [{"from": "human" if role == "user" else "gpt", "value": text} for role, text in TURNS]
SHOWN = '[{"role": "user", "content": [{"type": "image", "image": "file:///a"}, {"type": "text", "text": "Find x."}]}]'
ASKED = [("user", "2+2?")]
VERL = {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}}
PROBE = {"images": ["probe/7.jpg"], "problem": "<image>\nWhat number?", "doc_id": "vp-7", "data_source": "probe"}
ROWS = {  # the row; messages, answer and source of its sample
    "messages": ({"message": SHOWN, "answer": "$42$"}, [("user", "*|Find x.")], "$42$", "file"),
    "r1v": (
        {"image": {"bytes": b"x"}, "problem": "How many?", "solution": "<answer> 4 </answer>"},
        *([("user", "*|How many?")], "4", "file"),
    ),
    "easyr1": (
        {"problem": "<image><image>Which?", "answer": "2", "images": ["a.jpg", b"x"]},
        *([("user", "*|*|Which?")], "2", "file"),
    ),
    "minio3": (PROBE | {"solution": "B"}, [("user", "*|\nWhat number?")], "B", "probe"),
    "lightrft": (VERL | {"extra_info": {"label": "gsm8k_rule", "index": 0}}, ASKED, "4", "gsm8k_rule"),
    "qa": ({"question": "2+2?", "answer": "2 and 2 is 4. #### 4"}, ASKED, "4", "file"),
    "sharegpt": (
        {"conversations": SPOKEN, "images": ["bus.jpg", "crop.jpg"]},
        *([("user", "*|Number?"), TURNS[1], ("user", "Observation 1: |*"), TURNS[3]], None, "file"),
    ),
    "pairs": (
        {"prompt": "<image>Describe.", "images": ["a.png"], "chosen": "A red cube.", "rejected": "A dog."},
        *([("user", "*|Describe.")], None, "file"),
    ),
    "sides": ({"prompt": "2+2?", "a": "5", "b": "4", "labels": {"preference": "B"}}, ASKED, None, "file"),
    "labels": ({"input": "2+2?", "output": "4", "label": 1}, ASKED, None, "file"),
    "steps": ({"input": "2+2? 5 !", "label": ["-"]}, [("user", "2+2? 5 !")], None, "file"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_detected_and_read(name, read):
    row, *wanted = ROWS[name]
    sample = read(row)
    assert detect(set(row), DataConfig()).name == name
    assert [shape(sample), sample.answer, sample.data_source] == wanted


def test_the_rows_in_the_docs_are_of_the_format_they_stand_under(read):
    text = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    found = re.findall(r"\*\*(\w+)\.\*\*[^`]*(?:`[^`]+`[^`]*)*```json\n(.*?)\n```", text)
    assert {name for name, _ in found} == set(FORMATS)
    for name, row in found:
        row = json.loads(row)
        assert detect(set(row), DataConfig()).name == name
        assert read(row).messages


def test_ambiguous_and_unknown_columns_formats_and_roles_are_refused():
    with pytest.raises(DataError, match=r"easyr1, r1v.*data\.format=easyr1"):
        detect({"problem", "solution", "answer"}, DataConfig())
    assert detect({"problem", "solution", "answer"}, DataConfig(format="easyr1")).name == "easyr1"
    chosen = DataConfig(keys={"answer": "solution"})
    assert detect({"problem", "solution", "answer"}, chosen).name == "r1v"
    for columns, options, error, said in (
        ({"text", "label"}, {}, DataError, "columns label, text belong to no known format"),
        ({"gt", "id", "pic", "length"}, {}, DataError, "prompt=COLUMN data.keys.answer=gt data.keys.images=pic$"),
        ({"prefix", "chosen"}, {}, DataError, "no known format"),
        ({"question"}, {"format": "csv"}, ConfigError, "unknown; choose auto, messages"),
        ({"question"}, {"keys": {"gold": "question"}}, ConfigError, r"data.keys.gold: unknown role"),
        ({"question"}, {"keys": {"answer": "y"}}, DataError, r"data.keys.answer=y is no column; there are question"),
    ):
        with pytest.raises(error, match=said):
            detect(columns, DataConfig(**options))


def test_columns_can_be_renamed(read):
    row = {"text": "<image>?", "gold": 7, "pics": "a.png", "key": 12, "set": "x", "image": "no.png"}
    keys = {"prompt": "text", "answer": "gold", "images": "pics", "id": "key", "data_source": "set"}
    sample = read(row, keys=keys)
    assert (sample.id, sample.answer, sample.data_source) == ("12", "7", "x")
    assert shape(sample) == [("user", "*|?")] and sample.extra == {"image": "no.png"}
    nested = read({"q": "2+2?", "meta": {"gold": "4"}}, keys={"prompt": "q", "answer": "meta.gold"})
    assert nested.answer == "4" and nested.extra == {"meta": {"gold": "4"}}


def row(text, *images):
    return {"problem": text, "answer": "1", "images": list(images)}


def test_placeholders_place_images(read):
    assert shape(read(row("a <image> b <image> c", "1", "2"))) == [("user", "a |*| b |*| c")]
    assert shape(read(row("What?", "1", "2"))) == [("user", "*|*|What?")]
    assert shape(read(row("no image"))) == [("user", "no image")]
    assert shape(read(row(r"<image>Type \<image> or \<image2>.", "1"))) == [("user", "*|Type <image> or <image2>.")]


def test_numbered_placeholders_choose_images_and_wrong_ones_are_refused(read):
    plain = read(row("<image>x<image>", "1", "2")).media
    turned = read(row("<image2>x<image 1>", "1", "2")).media
    assert turned == plain[::-1]
    for text in ("<image1><image1>", "<image1><image3>", "<image1><image>"):
        with pytest.raises(RowError, match="must name each of 2 images once"):
            read(row(text, "1", "2"))
    for images in (["1"], ["1", "2", "3"], []):
        with pytest.raises(RowError, match=f"2 <image> placeholder.s. but {len(images)} image"):
            read(row("<image><image>?", *images))
    with pytest.raises(RowError, match="strict"):
        read(row("What?", "1"), placeholder="strict")
    with pytest.raises(RowError, match=r"3 images, data.max_images is 2"):
        read(row("?", "1", "2", "3"), max_images=2)


def chat(*content, **columns):
    return {"messages": [{"role": "user", "content": list(content)}], **columns}


def test_image_items_of_every_style(read):
    uri = "data:image/png;base64," + base64.b64encode(b"png").decode()
    files = {"image": "a.png"}, {"path": "a.png"}, {"image": "a.png", "text": None}
    urls = ({"type": "image_url", "image_url": url} for url in (uri, {"url": uri}))
    for item in (*({"type": "image"} | file for file in files), *urls):
        assert shape(read(chat(item, {"type": "text", "text": "?"}))) == [("user", "*|?")]
    # One without a source takes the next image of the row.
    sample = read(chat({"type": "image"}, {"type": "text", "text": "?"}, images=["a.png"]))
    assert shape(sample) == [("user", "*|?")]
    # Where the chat places images, a placeholder is text.
    sample = read(chat({"type": "image", "image": "a.png"}, "the tag <image> means a picture"))
    assert shape(sample) == [("user", "*|the tag <image> means a picture")]
    item = {"type": "image", "image": "a.png", "min_pixels": 784, "max_pixels": 9000}
    media = read(chat(item)).media[0]
    assert (media.min_pixels, media.max_pixels) == (784, 9000)
    with pytest.raises(RowError, match="max_pixels of an image must be a positive integer"):
        read(chat(item | {"max_pixels": "big"}))


def test_all_turns_and_the_system_message_are_kept(read):
    said = [("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?")]
    prompt = [{"role": role, "content": text} for role, text in said]
    sample = read({"prompt": prompt, "reference": "2"})
    assert shape(sample) == said
    assert shape(read(ROWS["qa"][0] | {"system": "Be brief."}))[0] == ("system", "Be brief.")
    with pytest.raises(RowError, match="keep one of them"):
        read({"prompt": prompt, "system": "Be long."})


@pytest.mark.parametrize(("prompt", "reason"), [
    ('[{"role": "user", "content": ', "not valid JSON"),
    ([{"role": "king", "content": "x"}], "unknown role 'king'"),
    ([{"role": "assistant", "content": "x"}], "no user message"),
    ([{"role": "user", "content": [{"type": "smell", "smell": "a.sm"}]}], "'smell'"),
    ([{"role": "user", "content": [{"type": "video", "video": "a", "fps": 0}]}], "fps of a v"),
    ([{"role": "user", "content": [{"video": "a.mp4", "use_audio_in_video": True}]}], "add it as an audio item"),
    ([{"role": "user", "content": ""}], "empty"),
])  # fmt: skip
def test_chats_that_cannot_be_read(read, prompt, reason):
    with pytest.raises(RowError, match=reason):
        read({"messages": prompt, "answer": "1"})


def test_media_that_cannot_be_read_are_not_dropped(read):
    assert shape(read(row("?") | {"videos": ["a.mp4"], "audio": "b.wav"})) == [("user", "*|*|?")]
    assert read(row("?") | {"videos": []}).answer == "1"
    with pytest.raises(RowError, match="both filled"):
        read(row("?", "1") | {"image": "2"})


NAMES = st.sampled_from(["role", "from", "content", "value", "type", "text", "image", "user"])
WORDS = st.sampled_from(["user", "text", "image"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 99) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner | WORDS, max_size=4),
    max_leaves=12,
)


@settings(max_examples=20, deadline=None)
@given(format=st.sampled_from(list(FORMATS.values())), values=st.lists(JSON_VALUES, min_size=9, max_size=9))
def test_any_row_is_a_sample_or_a_reason(format, values):
    names = [format.prompt[0], format.answer[0], "images", "id", "data_source", "choices", "system"]
    names += [*format.thinking, *(columns[0] for columns in format.candidates.values())]
    row = dict(zip([*names, *format.label], values, strict=False))
    try:
        assert read_row(row, format, DataConfig(), open_image=open_media).id
    except (RowError, ImageError) as reason:
        assert str(reason)


def test_golds(read):
    assert read({"question": "?", "answer": "a #### b\n#### 1,000"}).answer == "1,000"
    assert read({"problem": "?", "solution": "7"}).answer == "7"
    assert read({"question": "?", "answer": ["4", "four"]}).answer == ("4", "four")
    assert read({"question": "?", "answer": True}).answer == "true"
    assert read({"question": "?", "answer": [1, 2.5]}).answer == "[1, 2.5]"
    assert read({"question": "?"}).answer is None
    golds = {"reference": "r", "ground_truth": "g", "answer": "a"}
    assert read({"prompt": "?", **golds}).answer == "r"
    assert read({"prompt": "?", **golds, "reference": None}).answer == "g"
    # The SFT variant of r1v gets an assistant turn.
    sample = read({"problem": "?", "thinking": "Two and two.", "solution": "4", "image": "a.png"})
    assert shape(sample) == [("user", "*|?"), ("assistant", "<think>Two and two.</think><answer>4</answer>")]
    tagged = {"thinking": "<think>t</think>", "solution": "<answer>4</answer>"}
    assert read({"problem": "?", **tagged}).messages[-1].text == "<think>t</think><answer>4</answer>"


def test_choices(read):
    question = {"question": "?", "choices": ["red", "blue", "green"]}
    assert read(question | {"answer": "B"}).choices == ("red", "blue", "green")
    assert read(question | {"answer": 1}).answer == "B"
    assert read({"question": "?", "answer": 2, "choices": [1, 2, 3]}).answer == "2"
    assert read(question | {"answer": "1"}).answer == "B"  # as from CSV
    assert [read(question | {"answer": other}).answer for other in ("3", "01", -1, True, 1.0)] == [
        "3", "01", "-1", "true", "1.0"
    ]  # fmt: skip
    assert read({"question": "?", "answer": "2", "choices": ["2 cm", "3 cm", "4 cm"]}).answer == "2"
    lettered = read({"question": "?", "A": "red", "B": 7, "C": None, "D": "x", "answer": "B"})
    assert (lettered.choices, lettered.answer, lettered.extra) == (("red", "7"), "B", {"C": None, "D": "x"})
    assert read({"question": "?", "A": "red", "answer": "B"}).extra == {"A": "red"}
    assert read({"question": "?", "A": "red", "B": "blue"}, keys={"choices": ""}).choices == ()
    assert read({"question": "?", "options": {"A": "x", "B": "y"}}).choices == ("x", "y")
    assert read({"question": "?", "options": '["x", "y"]'}).choices == ("x", "y")
    unused = read({"question": "?", "options": "verbose"}, keys={"choices": ""})
    assert unused.choices == () and unused.extra == {"options": "verbose"}
    with pytest.raises(RowError, match="the choices is not valid JSON"):
        read({"question": "?", "options": "['x', 'y']"})


def test_an_id_is_given_or_follows_from_the_content(read):
    assert read(ROWS["minio3"][0]).id == "vp-7"
    assert read({"question": "?", "id": 0}).id == "0"
    one, same, other = (read(row("?", name)) for name in ("a", "a", "b"))
    assert one.id == same.id != other.id and len(one.id) == 16


def test_canonical_rows_read_back_as_the_same_sample(read, picture):
    path = str(picture())
    items = {"type": "image", "image": path, "max_pixels": 5000}, r"what is \<image> or \\<image2>?"
    given = chat(*items, answer=["a", "b"], choices=["x", "y"], level=3, question="not the prompt")
    sample = read_row(given, FORMATS["messages"], DataConfig(), open_image=open_media)
    row_again = json.loads(json.dumps(to_row(sample)))
    again = read_row(row_again, detect(set(row_again), DataConfig()), DataConfig(), open_image=open_media)
    assert again == sample
    assert content_hash(again, everything=True) == content_hash(sample, everything=True)
    text = read(row(r"\<image> only"))
    assert read(to_row(text)).messages == text.messages
