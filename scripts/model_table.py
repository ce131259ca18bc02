"""Write docs/models.md: every image-text-to-text type that this transformers ships, what works, how it was proved,
and why the rest is refused. Types with a tiny folder (tiny_kinds.yaml, tiny models of the package) are run: proof,
gradients of all weights, greedy tokens against `generate`. Others are looked at by the gate, with their type's config.

    python scripts/model_table.py [kinds …]     # a few minutes on two cores; with names: prints these alone
"""

import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

import saccade.models  # noqa: E402, F401  before transformers
from saccade.errors import SaccadeError  # noqa: E402
from saccade.models.families import FAMILIES, load_family  # noqa: E402
from saccade.models.load import load_model  # noqa: E402
from saccade.plugins.families import generic, proof, tiny_kinds  # noqa: E402
from saccade.recipes.model_setup import quiet_libraries  # noqa: E402
from tests.models import test_generic  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
SPECIAL = {  # of families with code of their own
    "qwen2_vl": "images, videos",
    "qwen2_5_vl": "images, videos",
    "qwen3_vl": "images",
    "qwen3_vl_moe": "images",
    "qwen3_5": "images",
    "qwen3_5_moe": "images",
    "qwen2_5_omni_thinker": "images, videos, sounds",
    "internvl": "images",
    "llava": "images",
}
INTRO = """# Models

saccade has code of its own for some families. Every other image-text-to-text model of transformers goes through the
generic family: its own processor, its own forward up to its decoder, its own positions
([architecture](architecture.md#model-families)). Nothing of that is believed. Before weights are read, what a config
tells is looked at; when they are loaded, the model is compared with transformers, and refused if anything differs
([doctor](doctor.md#models-without-a-family-of-their-own)).

The generic family takes images, and videos and sounds where the model's processor and chat template do and the proof
of them holds; media that may not stand beside an image in one row are said to be *alone*. A model is used for the
others if the proof of one kind fails, and rows with that kind are refused with the reason. It needs
`pip install -c constraints.txt -e '.[vision]'` for most processors, and generates with the embedded engine, or, for
images, with vLLM where that knows the model ([engines](engines.md#vllm)). A picture
over `data.max_pixels` is scaled down before the model's processor sees it; what the processor makes of it then (tiles,
crops, its own limits) is its own business.

It trains like the others: all weights, frozen towers, adapters on the linear layers of its decoder, also over 4-bit
weights, with a critic, as a reward model, on several GPUs, whole or sharded; `saccade estimate` counts memory and FLOPs
from its modules. [Recipes](recipes.md#models-of-today) start from some of them, and `saccade quickstart --kind gemma3`
shows one learn.

InternVL and LLaVA have families of their own although the generic one serves them, too, because users feel the
difference. Own family / generic, with processors of published sizes (tiles of 448 pixels, squares of 336), single
readings on a shared CPU:

| | InternVL | LLaVA 1.5 |
|---|---|---|
| tokens of a picture of 640x480 at the usual `data.max_pixels` | 256 / 3,328 | 576 / 576 |
| of 1200x800 | 1,280 / 1,792 | 576 / 576 |
| milliseconds for a size that was not there yet | 0 / 20 to 35 | 0 / 8 to 38 |
| milliseconds to prepare a picture, 333x222 to 1920x1080 | 7 to 113 / 44 to 143 | 4 to 44 / 22 to 151 |
| MB of a picture that is kept (of 2 GiB) | 0.6 to 3 / 17 to 31 | 0.3 / 1.4 |
| needs torchvision | no / yes | no / yes |

InternVL's processor cuts a picture by its shape, however small it is; its own family, by the pixel budget. For other
models that do so, `max_patches` in the folder's image processor config is the limit. `model.family=generic` chooses
the generic family for a model that has one of its own, for videos of Qwen3-VL, Qwen3.5 and InternVL, say.

This page is written by `python scripts/model_table.py`, which runs a tiny random model of each kind on a CPU in
float32: *logits* is the largest gap between packed rows and transformers (of the largest logit), *gradients* that of
any weight (of its largest entry), *greedy* counts prompts whose tokens are those of `generate`. Weights of published
models were not run. transformers {version}.

"""


def row_of(kind, folder):
    """(what works, how it was proved)."""
    import torch

    family = load_family(folder, name=kind if kind not in FAMILIES else "generic")
    family = replace(family, spec=replace(family.spec, prove=lambda model, family: None))
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    found = {}
    media = {"image": "images"}
    for row in proof.comparisons(model, family):
        if not row.agrees and not row.kind:
            return "refused by the proof", str(row)
        if row.agrees and row.kind in ("video", "audio"):
            media[row.kind] = {"video": "videos", "audio": "sounds"}[row.kind]
        elif row.kind.partition(" ")[0] in media and not row.agrees:
            media[row.kind.partition(" ")[0]] += " (alone)"
        found[row.what] = row.gap
    worst = test_generic.gradient_gap(family, model)
    stock = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    right, asked = test_generic.greedy_prompts(family, model, stock)
    said = f"logits {found['logits of answers']:.1e}, gradients {worst:.1e}, greedy {right} of {asked}"
    return (f"works: {', '.join(media.values())}" if right == asked and worst < 1e-3 else "fails"), said


def looked_at(kind, scratch):
    """What the gate says to the config of a type."""
    import transformers

    try:
        transformers.CONFIG_MAPPING[kind]().save_pretrained(scratch)
    except Exception as error:
        return "not known", f"the config of its type does not build ({type(error).__name__})"
    try:
        generic.gate(scratch)
    except SaccadeError as error:
        said = str(error).partition("a model of type ")[2].partition("; use one")[0]
        return "refused before weights", said.splitlines()[0]
    return "passes the gate", "not run; the proof decides when it is loaded"


def main(names):
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SHIPPED

    quiet_libraries()
    kinds = names or sorted({*SHIPPED, *tiny_kinds.KINDS})
    rows = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                if kind in tiny_kinds.ALL:
                    verdict = row_of(kind, tiny_kinds.build(kind, scratch))
                else:
                    verdict = looked_at(kind, scratch)
            except Exception as error:
                lines = [line for line in str(error).splitlines() if line]
                verdict = (
                    "refused at load",
                    f"{type(error).__name__}: {lines[0] if lines else ''}".replace(scratch, "it"),
                )
        own = f"own family ({SPECIAL[kind]}); generic: " if kind in SPECIAL else ""
        rows.append((kind, own + verdict[0], verdict[1].replace("|", "\\|")))
        print(" | ".join(rows[-1]), flush=True)
    if not names:
        table = ["| type | what works | shown by |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
        PAGE.write_text(INTRO.format(version=transformers.__version__) + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
