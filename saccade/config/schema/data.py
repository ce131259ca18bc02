"""Options of data: where rows come from, which are refused, how one becomes a conversation."""

from typing import Literal

from saccade.config.schema.section import ANSWERING, TRAINING, Section, When, option

IMITATING = When("train.sft_coef > 0", "train.sft_coef=0.05")
WEIGHTED = When("any(source.weight is not None for source in data.train)", "data.train[].weight", "weights of the sets")


class DataSource(Section):
    path: str = option(..., "File, folder or hub id: `PATH[:CONFIG][@SPLIT][#DATA_DIR]`.", path=True)
    name: str | None = option(None, "Name of the set in metrics; empty: the file stem.")
    weight: float | None = option(None, "Share in the mixture; empty everywhere: concatenation.", gt=0)
    data_source: str | None = option(None, "Overrides the data_source of every row (chooses reward.by_source).")
    split: str | None = option(None, "Split of a data set that has several.")
    offset: int = option(0, "Rows to leave out at the beginning; max_samples counts from there.", ge=0)
    max_samples: int | None = option(None, "Use only the first rows.", ge=1)
    image_dir: str | None = option(None, "Folder that relative media paths start from; empty: the file's.", path=True)
    mapping: str | None = option(None, "Mapping of this set's rows; empty: data.mapping; none: no mapping.", path=True)
    n: int | None = option(None, "Of data.val: instead of val.n.", ge=1)
    temperature: float | None = option(None, "Of data.val: instead of val.temperature.", ge=0)
    top_p: float | None = option(None, "Of data.val: instead of val.top_p.", gt=0, le=1)
    max_tokens: int | None = option(None, "Of data.val: instead of val.max_tokens.", ge=1)


class DataConfig(Section):
    train: tuple[DataSource, ...] = option(
        (), "Training sets; a plain path also works.", commands=(*TRAINING, "generate", "check-data")
    )
    val: tuple[DataSource, ...] = option((), "Validation sets, each reported under its name.")
    demonstrations: tuple[DataSource, ...] = option(
        (), "Conversations that rl also learns from, by train.sft_coef.", commands=("rl",), when=IMITATING
    )
    keys: dict[str, str] = option(
        {},
        "Column names by role: prompt, answer, images, videos, audios, series, id, data_source, choices, "
        "system, chosen, rejected, output, label.",
    )
    format: str = option(
        "auto",
        "Of rows: auto | messages | r1v | easyr1 | minio3 | lightrft | qa | sharegpt | pairs | sides | labels | steps.",
    )
    mapping: str | None = option(None, "Reader of other preference layouts: hpdv3 … or file.py:function.", path=True)
    pair_view: Literal["apart", "verdict"] = option("apart", "verdict: one prompt with both asks for the better one.")
    pair_order_seed: int = option(0, "Draws for each compared pair which candidate is shown first; stored in the row.")
    placeholder: Literal["strict", "prepend"] = option(
        "prepend", "Media but no <image> in the text: prepend puts them first, strict refuses the row."
    )
    min_pixels: int = option(3136, "Images below are scaled up.", ge=1)
    max_pixels: int = option(1_003_520, "Images above are scaled down.", ge=1)
    max_images: int = option(64, "Most images and other media in one prompt; rows with more are bad rows.", ge=0)
    fps: float = option(2.0, "Frames per second that are taken from a video.", gt=0)
    min_frames: int = option(4, "Fewest frames of a video, where it has as many.", ge=2)
    max_frames: int = option(768, "Most frames of a video; their number is always even.", ge=2)
    max_frame_pixels: int = option(602_112, "Frames of videos above are scaled down.", ge=1)
    long_audio: Literal["truncate", "reject"] = option("truncate", "Sound over 30 seconds: the first 30, or a bad row.")
    max_series: int = option(10_000, "Most samples of each lead of a time series.", ge=1)
    long_series: Literal["reject", "truncate"] = option("reject", "A longer series: a bad row, or keep its beginning.")
    max_prompt_tokens: int = option(4096, "Longest prompt, media tokens included.", ge=1, commands=ANSWERING)
    overlong: Literal["drop", "shrink", "drop_turns", "truncate_text", "error"] = option(
        "drop", "What happens to a longer prompt. No policy ever cuts inside a media span."
    )
    max_megapixels: float = option(200, "Larger images are refused from their header.", gt=0)
    aspect: Literal["pad", "reject"] = option("pad", "What happens to an image with an aspect ratio above 200.")
    on_bad_row: Literal["quarantine", "error"] = option("quarantine", "Exclude bad rows with a reason, or stop.")
    max_bad_fraction: float = option(0.01, "Stop when more rows than this are bad.", ge=0, le=1)
    order: str = option("shuffle", "shuffle | sequential | length | column:NAME.")
    mixing: Literal["all_exhausted", "first_exhausted"] = option("all_exhausted", "When a mixture ends.", when=WEIGHTED)
    max_samples: int | None = option(None, "Use only the first rows of the whole mixture.", ge=1)
    allow_network: bool = option(False, "Fetch http(s) images and hub data sets.")
    allow_outside: Literal["absolute"] | bool = option(
        "absolute", "Media outside of the rows' folder or image_dir: by absolute path; true: also ../; false: no."
    )


class PromptConfig(Section):
    format: str | dict[str, str] = option(
        "think_answer",
        "How the model answers: think_answer | think_boxed | boxed | answer_line | hash | letter | counting | "
        "grounding | boxes_json | direct | none. By data_source: {clevr: counting, default: think_boxed}.",
    )
    instruction: str | dict[str, str] | None = option(
        None, "Replaces the format's instruction; an empty string adds none. Also by data_source."
    )
    position: Literal["before", "after"] = option("after", "Where the instruction stands in the first user message.")
    system: str | dict[str, str] | None = option(None, "System message: text, or a file with it. Also by data_source.")
    template: str | None = option(None, "Jinja file of the question: content, choices, row, instruction.", path=True)
    chat_template: str | None = option(None, "Jinja file that replaces the model's chat template.", path=True)
    permute_choices: bool = option(
        False, "Shuffle the options of each row; the gold follows.", commands=("rl", "eval", "generate", "check-data")
    )

    def of(self, source: str) -> "PromptConfig":
        """The prompt options of a data_source: those given by source take its entry, else that of `default`."""
        apart = {name: value for name, value in self if isinstance(value, dict)}
        others = {name: value.get("default", type(self).model_fields[name].default) for name, value in apart.items()}
        asked = {name: value.get(source, others[name]) for name, value in apart.items()}
        return self.model_copy(update=asked) if asked else self
