"""`saccade data …`: commands that make data sets.

saccade data visual-search scenes --rows 1000 --level medium
"""

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli_run import command, read_config

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")]
SCENES = "saccade data visual-search scenes --rows 1000 --level hard --view 448"
COLDSTART = "saccade data coldstart scenes/train.jsonl coldstart env.min_pixels=12544 env.max_pixels=12544"
ENVIRONMENT = (
    "The environment of the RL run that follows: env.call, env.max_pixels, …; "
    "env.name=single_turn, the default, becomes crop."
)


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
    from saccade.errors import ConfigError
    from saccade.plugins.quickstart.counting import write_jsonl
    from saccade.plugins.visual_search.search_scenes import search_split
    from saccade.system.disk import require_writable

    if not is_name(name):
        raise ConfigError(f"--name {name}: wants one file name without its ending, try train")
    require_writable(out, "OUT")
    samples = search_split(rows, seed=seed, level=level, kind=kind, grid=grid, view=view)
    path = write_jsonl(samples, out, name=name, budgets=True)
    side, budget = samples[0].media[0].width, view * view
    zoom = f"env.name=crop env.min_pixels={budget} env.max_pixels={budget}"
    print(f"wrote {path}: {rows} scenes of {side} pixels; zoom with {zoom}")


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
    """Multi-turn conversations for `saccade sft`, as the environment answers in RL."""
    from saccade.plugins.visual_search.coldstart import run

    counts = run(read_config(arguments), source, out, turns=turns, mistakes=mistakes, verifier=verifier)
    aside = ", ".join(f"{n} {reason}" for reason, n in counts.items() if reason != "written")
    print(f"wrote {counts['written']} rows to {out / 'train.jsonl'}; excluded: {aside or 0}")
