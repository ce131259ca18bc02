"""Write docs/models.md: every image-text-to-text type of the installed transformers, what works, how it was tested,
and why the rest is refused. Types with a tiny model (tiny_kinds.yaml, tiny models of the package) are run: proof,
gradients of all weights, greedy tokens against `generate`, a second turn, steps of adapters and the exported folder.
Of the others, the gate checks the default config.

    python scripts/model_table.py [kinds …]     # some minutes; with names: prints these alone
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
from tests.models import against  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
MEDIA = {"image": "images", "video": "videos", "audio": "sounds"}
SERVED = dict.fromkeys(("smolvlm", "llava_onevision", "internvl", "llava", "qwen2_5_vl", "qwen3_vl"), "tested")
SERVED["gemma3"] = "but blocks"  # tests/vllm/test_served_kinds.py
WORKS = ("type", "own family", "logits", "gradients", "embedded", "turn", "adapters", "vLLM", "videos", "sounds")
# What published configs have, and default ones do not.
PUBLISHED = {
    "diffusion_gemma": {
        "text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        "vision_config": {},
    },
    "minimax_m3_vl": {"text_config": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 59]}},
}
WHOLE = {"qwen3_omni_moe": "qwen3_omni_moe_thinker"}  # folders that hold more than the model that is run
OTHERS = ("type", "own family", "verdict", "why")
INTRO = """# Models

saccade has code of its own for some families. A type without a family of its own (InternVL and LLaVA, too) is served by
the generic one, after a proof: its own processor, its own forward up to its decoder, its own positions
([architecture](architecture.md#model-families)). Nothing of that is believed. Before weights are read, what a config
tells is looked at; when they are loaded, the model is compared with transformers, and refused if anything differs
([doctor](doctor.md#models-without-a-family-of-their-own)).

The generic family takes images, and videos and sounds where the model's processor and chat template do and the proof
of them holds; media that may not stand beside an image in one row are said to be *alone*. A model is used for the
others if the proof of one kind fails, and rows with that kind are refused with the reason. It needs `pip install -c
constraints.txt -e '.[vision]'` for most processors, and generates with the embedded engine, or with vLLM where that
knows the model ([engines](engines.md#vllm)): images, and videos where vLLM's own class of the model takes them
(LLaVA-OneVision is tested with one beside a picture; SmolVLM's takes none, and a request with one is refused). Gemma 3
agrees but for its *blocks*, tokens of a picture that see each other both ways, which vLLM's build for CPUs cannot, and
is refused for. SGLang has run with none of these models: there are tests of its protocol alone
([engines](engines.md#sglang)).

A picture over `data.max_pixels` is scaled down before the model's processor sees it, or, where that saves no tokens,
the budget becomes options of the processor ([data](data.md#images)). The image processor config in its folder is the
limit of both: `max_patches` (Llama 4, Ovis2, Cohere2, Aya), `size.longest_edge` (SmolVLM, Idefics3), `max_slice_nums`
(MiniCPM-V), `max_num_tiles` (Perception LM, whose processor reads no other limit, so `data.max_pixels` does nothing),
`image_grid_pinpoints` (LLaVA-NeXT, LLaVA-OneVision), `max_soft_tokens` (Gemma 4). The last must be below
`sliding_window` in a gemma4_unified, whose pictures see past it: the proof refuses it otherwise.

It trains like the others: all weights, frozen towers, adapters on the linear layers of its decoder, also over 4-bit
weights, with a critic, as a reward model, on several GPUs, whole or sharded; `saccade estimate` counts memory and
FLOPs from its modules. Latent attention (DeepSeek, Kimi) is cached as the keys
and values of all heads, not as latents: 4.8 MiB for each token in the shape of DeepSeek-V3 (61 layers of 128 heads,
bfloat16), where latents would be 69 KiB; their 576 numbers are more than a head of the decoding kernels may have (512).
[Recipes](recipes.md#models-of-today) start from some of them, and `saccade
quickstart --kind gemma3` shows one learn.

`model.family=generic` chooses the generic family for a model that has one of its own.

This page is written by `python scripts/model_table.py`, which runs a tiny random model of each kind on a CPU in
float32, through the generic family also where a type has its own; of qwen3_omni_moe its thinker is run. Weights of
published models were not run.
transformers {version}.

## What works

| column | what was run | works below |
|---|---|---|
| logits | packed rows with pictures against transformers: the largest gap, of the largest logit | {limit:g} |
| gradients | of a log-likelihood by every weight: the largest gap of any, of its largest entry | 1e-3 |
| embedded | prompts whose greedy tokens from the embedded engine are those of `generate` | all |
| turn | a second turn with another picture on a live cache: its log-probs against the trainer's | 1e-4 |
| adapters | three steps of LoRA lower a loss, and prompts are answered alike from the merged folder | all |
| vLLM | *tested*: log-probs of the trainer, before and after new weights, by its build for CPUs | 1e-4 |
| videos, sounds | the whole proof with them agrees; *alone*: not beside an image in one row | {limit:g} |

"""


def row_of(kind, folder):
    """The cells of a type that works, after type and own family; (verdict, why) of one that does not."""
    import torch

    if "image" not in (FAMILIES[kind].media_tokens if kind in FAMILIES else "image"):
        return "not by the generic family", "its own family takes it; the generic one is for models that see pictures"
    family = load_family(folder, name=kind if kind not in FAMILIES else "generic")
    family = replace(family, spec=replace(family.spec, prove=lambda model, family: None))
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    found, senses = {}, {}
    for row in proof.comparisons(model, family):
        sense, _, beside = row.kind.partition(" ")
        if not row.agrees and not row.kind:
            return "refused by the proof", str(row)
        if row.kind and (not beside or sense in senses) and (row.agrees or beside):
            senses[sense] = "yes" if row.agrees else "alone"
        found[row.what] = row.gap
    worst = against.gradient_gap(family, model)
    stock = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    right, asked = against.greedy_prompts(family, model, stock)
    turn = against.second_turn_gap(family, model)
    with tempfile.TemporaryDirectory() as written:
        learned, alike, answered = against.adapted_and_exported(family, model, Path(written))
    figures = f"{found['logits of answers']:.1e}", f"{worst:.1e}", f"{right} of {asked}"
    figures += f"{turn:.1e}", f"{alike} of {answered}"
    if right < asked or worst >= 1e-3 or turn >= 1e-4 or learned < 0.01 or alike < answered:
        return "fails", f"{', '.join(figures)}; adapters lower a loss by {learned:.2f}"
    return *figures, SERVED.get(kind, ""), senses.get("video", ""), senses.get("audio", "")


def reason(error):
    said = str(error).partition(": ")[2].removeprefix("a model of type ").partition("; use one")[0]
    return said.splitlines()[0]


def looked_at(kind, scratch):
    """(verdict, why) of the gate for the default config of a type."""
    import transformers

    try:
        transformers.CONFIG_MAPPING[kind](**PUBLISHED.get(kind, {})).save_pretrained(scratch)
    except Exception as error:
        return "not known", f"the config of its type does not build ({type(error).__name__})"
    try:
        generic.gate(scratch)
    except SaccadeError as error:
        return "refused before weights", reason(error)
    return "passes the gate", "not run; the proof decides when it is loaded"


def main(names):
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SHIPPED

    quiet_libraries()
    seeing = {kind for kind, spec in FAMILIES.items() if spec.media_tokens}
    kinds = names or sorted({*SHIPPED, *tiny_kinds.KINDS, *seeing, *WHOLE})
    rows = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                if (run := WHOLE.get(kind, kind)) in tiny_kinds.ALL:
                    verdict = row_of(run, tiny_kinds.build(run, scratch))
                else:
                    verdict = looked_at(kind, scratch)
            except SaccadeError as error:
                verdict = "refused at load", reason(error)
            except Exception as error:
                lines = [line for line in str(error).splitlines() if line]
                verdict = (
                    "refused at load",
                    f"{type(error).__name__}: {lines[0] if lines else ''}".replace(scratch, "it"),
                )
        own = ", ".join(MEDIA[sense] for sense in FAMILIES[kind].media_tokens) if kind in FAMILIES else ""
        rows.append((kind, own, *(cell.replace("|", "\\|") for cell in verdict)))
        print(" | ".join(rows[-1]), flush=True)
    if not names:
        write(rows)


def write(rows):
    import torch
    import transformers

    page = INTRO.format(version=transformers.__version__, limit=proof.GAPS[torch.float32])
    for heads, title in ((WORKS, ""), (OTHERS, "\n## What is refused, or was not run\n\n")):
        chosen = [row for row in rows if len(row) == len(heads)]
        table = [heads, ["---"] * len(heads), *chosen]
        page += title + "".join(f"| {' | '.join(row)} |\n" for row in table)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
