"""`saccade data …`: commands that make data sets.

saccade data visual-search scenes --rows 1000 --level medium
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade import __version__
from saccade.cli_run import command, read_config
from saccade.errors import ConfigError

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")]
SCENES = "saccade data visual-search scenes --rows 1000 --level hard --view 448"
COLDSTART = "saccade data coldstart scenes/train.jsonl coldstart env.min_pixels=12544 env.max_pixels=12544"
ENVIRONMENT = (
    "The environment of the RL run that follows: env.call, env.max_pixels, …; "
    "env.name=single_turn, the default, becomes crop."
)


File = Annotated[Path, typer.Argument(metavar="OUT", help="Rows to write, .jsonl; pictures and a card go beside it.")]
Rows = Annotated[int, typer.Option(help="Rows to draw.", min=1)]
Seed = Annotated[int, typer.Option(help="Other rows for another seed.")]
SIDE = "Side of a picture in pixels."
Side = Annotated[int, typer.Option("--size", help=SIDE, min=64, max=2048)]
Reply = Annotated[str, typer.Option(metavar="TEXT", help="Rows for sft: what the assistant says, with {answer}.")]
Workers = Annotated[int, typer.Option(help="Processes that draw; the rows are the same.", min=1)]
Fonts = Annotated[
    list[Path] | None,
    typer.Option("--font", metavar="FILE", help="Of these one is drawn for each row.", show_default=False),
]
Kinds = Annotated[list[str] | None, typer.Option("--kind", help="Of questions; may be repeated.", show_default=False)]
UNCHECKABLE = "describe"  # a kind that no verifier can check; drawn only if --kind names it


group = typer.Typer(help="Make data sets.", no_args_is_help=True)


@command("visual-search", group=group, example=SCENES)
def visual_search(
    out: Out,
    rows: Annotated[int, typer.Option(help="Scenes to draw.", min=1)] = 1000,
    level: Annotated[str, typer.Option(help="easy | medium | hard.")] = "medium",
    kind: Annotated[str, typer.Option(help="What is asked: digit | letter | orientation | colour.")] = "digit",
    view: Annotated[int, typer.Option(help="Side of a picture as the model reads it, in pixels.")] = 112,
    grid: Annotated[int, typer.Option(help="Places along a side of a scene.")] = 4,
    name: Annotated[str, typer.Option(help="OUT/NAME.jsonl is written.")] = "train",
    seed: Annotated[int, typer.Option(help="Other scenes for another seed.")] = 0,
) -> None:
    """Scenes with a small target that can be read only after zooming."""
    from saccade.config.schema.section import is_name
    from saccade.plugins.drawn.drawn_sets import answer_lines, flags, write_card
    from saccade.plugins.quickstart.counting import write_jsonl
    from saccade.plugins.visual_search.search_scenes import search_split
    from saccade.system.disk import require_new

    if not is_name(name):
        raise ConfigError(f"--name {name}: wants one file name without its ending, try train")
    require_new(out, "OUT", inside=f"{name}.jsonl", other="folder or --name")
    samples = search_split(rows, seed=seed, level=level, kind=kind, grid=grid, view=view)
    path = write_jsonl(samples, out, name=name, budgets=True)
    options = {"rows": rows, "level": level, "kind": kind, "view": view, "grid": grid, "name": name, "seed": seed}
    answers = {kind: Counter(str(sample.answer) for sample in samples)}
    what = f"{rows:,} scenes with a small target that saccade {__version__} drew"
    write_card(path, what, ["visual-search", out.name, *flags(options)], facts=["", *answer_lines(answers)])
    zoom = f"env.name=crop env.min_pixels={view * view} env.max_pixels={view * view}"
    print(f"wrote {path}: {rows} scenes of {samples[0].media[0].width} pixels; zoom with {zoom}")


@command("coldstart", group=group, example=COLDSTART)
def coldstart(
    source: Annotated[Path, typer.Argument(help="Trajectories, or scenes of `saccade data visual-search`.")],
    out: Out,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="RUN.YAML | KEY=VALUE", help=ENVIRONMENT, show_default=False)
    ] = None,
    turns: Annotated[int, typer.Option(help="Most turns of a trajectory.", min=2)] = 6,
    mistakes: Annotated[float, typer.Option(help="Share of wrong calls of the searcher.", min=0, max=1)] = 0.05,
    verifier: Annotated[str | None, typer.Option(help="Keep what this verifier calls right.")] = None,
) -> None:
    """Multi-turn conversations for `saccade sft`, with the observations that the environment gives in RL."""
    from saccade.plugins.visual_search.coldstart import run

    counts = run(read_config(arguments), source, out, turns=turns, mistakes=mistakes, verifier=verifier)
    aside = ", ".join(f"{n} {reason}" for reason, n in counts.items() if reason != "written")
    print(f"wrote {counts['written']} rows to {out / 'train.jsonl'}; excluded: {aside or 0}")


def write(command: str, draw: Callable[..., Any], *, file: Path, options: Mapping[str, Any], **plan: Any) -> None:
    """Draw rows with the options of a command, and print what was written."""
    from saccade.plugins.drawn.drawn_sets import Plan, write_set

    print(write_set(draw, Plan(command=command, file=file, options=options, **plan)))


def selected_names(flag: str, wanted: Sequence[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """The names given to an option, by default all that a verifier can check; refuses unknown names."""
    for one in wanted or ():
        if one not in known:
            raise ConfigError(f"{flag} {one}: expected one of {', '.join(known)}")
    return tuple(wanted or (name for name in known if name != UNCHECKABLE))


def add_picture_command(name: str, kind_of_picture: str, does: str, smallest: int = 64) -> None:
    """Register a command that draws pictures of one kind with questions; `does` is its help text."""

    def run(
        file: File,
        rows: Rows = 1000,
        split: Annotated[str, typer.Option(help="What the pictures are like; see above.")] = "same",
        kind: Kinds = None,
        side: Annotated[int, typer.Option("--size", help=SIDE, min=smallest, max=2048)] = 224,
        seed: Seed = 0,
        reply: Reply = "",
        workers: Workers = 1,
    ) -> None:
        module = import_module(f"saccade.plugins.drawn.{kind_of_picture}_questions")
        splits, known = (getattr(module, f"{kind_of_picture.upper()}_{table}") for table in ("SPLITS", "KINDS"))
        (split,), kinds = selected_names("--split", [split], splits), selected_names("--kind", kind, known)
        draw = partial(getattr(module, f"draw_{kind_of_picture}_row"), split=split, kinds=kinds, side=side)
        options = {"split": split, "kind": kinds, "size": side}
        write(name, draw, file=file, options=options, rows=rows, seed=seed, reply=reply, workers=workers)

    run.__doc__ = does
    command(name, group=group, example=f"saccade data {name} {name}/train.jsonl --rows 5000 --size 224")(run)


add_picture_command(
    "scenes",
    "scene",
    """Solids as in CLEVR, with questions: count, exist, compare, attribute, relation (and describe).

    Splits other than `same` hold what a model trained on it has not seen. more: 7 to 10 objects, not 2 to 6;
    colours: four others; backgrounds: patterns; renderer: another one.
    """,
)
add_picture_command(
    "charts",
    "chart",
    """Bars, rows, lines and pies, with questions: value, which, difference, compare, count (and describe).

    Splits other than `same`. more: 7 to 10 marks, not 3 to 5; style: dark pages in other colours.
    """,
    smallest=192,  # in smaller pictures, neighbouring names would touch
)
add_picture_command(
    "diagrams",
    "diagram",
    """Boxes and arrows, with questions: next, exist, reach, count, shape.

    Splits other than `same`. more: 6 to 8 boxes, not 3 to 5.
    """,
)


@command("words", group=group, example="saccade data words words/train.jsonl --rows 5000 --size 112")
def words(
    file: File,
    rows: Rows = 1000,
    kind: Kinds = None,
    side: Side = 224,
    font: Fonts = None,
    seed: Seed = 0,
    reply: Reply = "",
    workers: Workers = 1,
) -> None:
    """Pictures of words, numbers and sums to read: read, number, word, sum."""
    from saccade.plugins.drawn.text_pages import WORD_KINDS, draw_words_row, font_files

    kinds, fonts = selected_names("--kind", kind, WORD_KINDS), font_files(font)
    draw = partial(draw_words_row, kinds=kinds, side=side, fonts=fonts)
    options = {"kind": kinds, "size": side, "font": fonts}
    write("words", draw, file=file, options=options, rows=rows, seed=seed, reply=reply, workers=workers)


@command("text-pictures", group=group, example="saccade data text-pictures gsm8k.jsonl pictures/train.jsonl")
def text_pictures(
    source: Annotated[Path, typer.Argument(help="Questions in words, in any format that `data.train` reads.")],
    file: File,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN.YAML | KEY=VALUE", help="How rows are read: data.format, …", show_default=False),
    ] = None,
    width: Annotated[
        int, typer.Option(help="Of a page in pixels; at most four times as high.", min=64, max=4096)
    ] = 448,
    font: Fonts = None,
    font_size: Annotated[str, typer.Option(metavar="LEAST-MOST", help="In pixels; drawn for each row.")] = "16-28",
    seed: Seed = 0,
    reply: Reply = "",
) -> None:
    """Pictures of the questions of a text set, options included; an answer that is an option becomes its letter.

    Formulas of TeX are typeset if matplotlib is there. Rows with a character that the font lacks, or that fill more
    than a page, are left out and listed.
    """
    from saccade.config import DataSource
    from saccade.data import datasets
    from saccade.plugins.doctor.machine import version_of
    from saccade.plugins.drawn.text_pages import AS_SOURCE, draw_question_row, font_files, size_range
    from saccade.plugins.evaluation.results import read_lines

    sizes, fonts = size_range(font_size), font_files(font)
    samples = datasets.load([DataSource(path=str(source))], read_config(arguments).data).samples
    draw = partial(draw_question_row, samples=samples, width=width, sizes=sizes, fonts=fonts)
    options = {"width": width, "font": fonts, "font-size": font_size}
    read = {"source": (str(source), *(arguments or ())), "rows": len(samples)}
    also = f" and matplotlib {version}" if (version := version_of("matplotlib")) else ""
    write("text-pictures", draw, file=file, options=options, seed=seed, reply=reply, also=also, **read)
    if kept := [row for row in read_lines(file) if AS_SOURCE in row]:
        print(f"{len(kept)} rows show TeX as source, such as {kept[0]['id']}: {kept[0][AS_SOURCE]}")


@command("sokoban", group=group, example="saccade data sokoban sokoban/train.jsonl --rows 1000 --boxes 2")
def sokoban(
    file: File,
    rows: Rows = 1000,
    cells: Annotated[int, typer.Option(help="Along a side, walls included.", min=5, max=16)] = 7,
    boxes: Annotated[int, typer.Option(help="To push onto goals.", min=1, max=3)] = 2,
    side: Side = 224,
    seed: Seed = 0,
    workers: Workers = 1,
) -> None:
    """Solvable levels of Sokoban, with pictures and a shortest solution."""
    from saccade.plugins.drawn.sokoban_levels import draw_sokoban_row

    draw = partial(draw_sokoban_row, cells=cells, boxes=boxes, side=side)
    options = {"cells": cells, "boxes": boxes, "size": side}
    write("sokoban", draw, file=file, options=options, rows=rows, seed=seed, workers=workers)


Asking = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN.YAML | KEY=VALUE", help="The model that is asked, and its rewards.", show_default=False
    ),
]
TEACHER = "rollout.engine=http rollout.http.url=http://127.0.0.1:8000/v1"


@command("distill", group=group, example=f"saccade data distill scenes.jsonl taught reward.terms=[exact] {TEACHER}")
def distill(
    source: Annotated[Path, typer.Argument(help="Questions with answers, in any format that `data.train` reads.")],
    out: Out,
    arguments: Asking = None,
    describe: Annotated[
        str, typer.Option(metavar="COLUMN", help="What the teacher reads instead of pictures, such as description.")
    ] = "",
) -> None:
    """Correct answers of a teacher model as rows for `saccade sft`; generate.n answers per question."""
    counts = import_module("saccade.plugins.drawn.taught_sets").distil(
        read_config(arguments, "generate"), source, out, describe
    )
    print(f"wrote {out / 'train.jsonl'}: {counts['right']} of {counts['answers']} answers were right")


@command("rewrite", group=group, example=f"saccade data rewrite vqa.jsonl checked {TEACHER}")
def rewrite(
    source: Annotated[Path, typer.Argument(help="Questions with free answers, in any format that `data.train` reads.")],
    out: Out,
    arguments: Asking = None,
) -> None:
    """Let a model rewrite questions with free answers so that a rule can check the answer."""
    counts = import_module("saccade.plugins.drawn.taught_sets").rewrite(read_config(arguments, "generate"), source, out)
    aside = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count and reason != "rewritten")
    print(f"wrote {out / 'train.jsonl'}: {counts['rewritten']} rows; left out: {aside or 0}")
