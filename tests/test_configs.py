"""Every shipped recipe loads, passes the checks and runs two steps at the smallest size."""

import json
import math
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

from saccade.checks import check
from saccade.checks.steps import algorithm_of
from saccade.cli_run import MODULES
from saccade.config import Config, load
from saccade.data import datasets
from saccade.plugins.families.tiny_kinds import ALL
from saccade.plugins.generate import generate
from saccade.plugins.smoke.smoke import NAMES, model_type, smoke, with_examples
from saccade.recipes import run_parts
from saccade.rewards.reward_sample import reward_sample
from saccade.rewards.scorer import Scorer
from saccade.rewards.verifiers import FORMATS, VERIFIERS
from saccade.trainer.optimizer import lr_factor
from saccade.types import Sample

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
FILES = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml")) if not path.stem.startswith("stages_")}
# Families that --smoke takes, guessed by the name of a model that is not here; else qwen2_5_vl.
FAMILIES = {
    "qwen2": "continue_pretrain easyr1_math ecg_grpo gsm8k_grpo lightrft_gsm8k",
    "qwen3": "easyr1_dapo17k easyr1_math_qwen3 easyr1_math_qwen3_lora",
    "llama": "ppo_70b text_grpo text_ppo text_rpp text_rpp_baseline",
    "qwen3_vl_moe": "easyr1_geo3k_30b_a3b_8gpu qwen3vl_30b_a3b_grpo",
    "gemma3": "gemma3_grpo easyr1_geo3k_gemma3_27b_8gpu", "gemma4": "gemma4_grpo", "smolvlm": "smolvlm_grpo",
    "qwen2_vl": "r1v_clevr r1v_clevr_vllm r1v_sft", "qwen2_audio": "lightrft_aqa lightrft_srm_al",
    "qwen3_vl": "qwen3vl_grpo qwen3vl_lora_grpo", "qwen3_5": "qwen35_grpo", "phi4_multimodal": "phi4mm_grpo",
    "mixtral": "mixtral_lora", "internvl": "internvl_grpo", "glm4v": "glm46v_grpo", "aria": "r1v_aria",
    "janus": "r1v_janus",
}  # fmt: skip
FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names.split()}
SHOWN = {"rl": "reward/mean", "sft": "sft/loss", "dpo": "dpo/loss", "reward-model": "rm/loss"}


def command_of(name):
    """The command in the first line of the recipe."""
    _, command, path = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    assert path == f"configs/{name}.yaml"
    return command


def with_rows(name):
    """The recipe, with the example rows beside it as its data."""
    config, replaced = with_examples(load(FILES[name]), FILES[name])
    assert replaced
    return config


def small(name, command, out):
    """The recipe as `--smoke` makes it."""
    config = smoke(load(with_rows(name), command=command), command)
    config = load(config, [f"run.out={out}", "track.tensorboard=false", "run.device=cpu"])
    check(config, command)
    return config


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_is_short_explained_and_passes_the_checks(name, tmp_path):
    text, config = FILES[name].read_text(encoding="utf-8"), load(FILES[name])
    assert text.startswith("# saccade ") and len(text.splitlines()) <= 50
    assert config.run.name == name
    assert command_of(name) == "eval" or re.search(r"^#.*(GPU|CPU|GiB)", text, re.MULTILINE)  # what it needs
    assert all(not Path(source.path).is_absolute() for source in config.data.train)
    assert model_type(config) == FAMILY_OF.get(name, "qwen2_5_vl")
    config, tiny = with_rows(name), f"tiny:{model_type(config)}"
    changes = [f"model.path={tiny}", f"run.out={tmp_path}"]
    changes += [f"sft.teacher={tiny}"] if config.sft.teacher else []
    if any(term.verifier == "model" for term in config.reward.terms):
        changes.append(f"reward.terms=[{{verifier: model, args: {{path: '{tiny}'}}}}]")
    config = load(config, changes, command_of(name))
    check(config, command_of(name))
    if command_of(name) == "rl":
        assert algorithm_of(config).samples_per_prompt == config.train.samples_per_prompt
    small(name, command_of(name), tmp_path)


def test_every_kind_that_a_name_suggests_has_a_tiny_model():
    assert set(NAMES.values()) <= set(ALL)
    paths = ("google/gemma-3n-E4B-it", "HuggingFaceTB/SmolVLM-Instruct", "zai-org/GLM-4.5V", "google/gemma-3-1b-it")
    found = [model_type(load({"model.path": path})) for path in paths]
    assert found == ["gemma3n", "idefics3", "glm4v_moe", "llama"]


def kind_of(name):
    """One recipe of each kind is run; algorithms run in tests/recipes/test_presets, rewards and rows below."""
    config, command = load(FILES[name]), command_of(name)
    learned = any(term.verifier == "model" for term in config.reward.terms)
    parts = (config.env.name, config.model.train, learned)  # the engine is the embedded one when it is small
    return command, model_type(config), *parts, config.dpo.loss, config.reward_model.kind, config.sft.mode


@pytest.mark.parametrize("name", {kind_of(name): name for name in FILES}.values())
def test_a_recipe_runs(name, tmp_path, request):
    command = command_of(name)
    if name != "r1v_geoqa":
        request.getfixturevalue("rewards_here")
    config = load(small(name, command, tmp_path), ["rollout.max_tokens=6", "val.max_tokens=6"])
    last = import_module(f"saccade.{MODULES[command]}").run(config)
    if command == "eval":
        assert all(0 <= found["accuracy"] <= 1 for found in last.values())
        return
    assert math.isfinite(last[SHOWN[command]])
    if command == "rl" and not name.startswith("minio3"):  # which masks responses that were cut
        assert math.isfinite(last["policy/loss"])
    assert (tmp_path / config.run.name / "checkpoints" / "step-2" / "config.json").is_file()


def test_the_docs_list_every_recipe_with_its_command():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| ([\w-]+) \|", page, re.M)
    assert sorted(listed) == [(path.stem, command_of(path.stem)) for path in sorted(CONFIGS.glob("*.yaml"))]


@pytest.mark.parametrize("name", ["rejection_sampling", "iter_dpo"])
def test_the_next_round_takes_the_next_prompts(name, tmp_path, rewards_here):
    said = [line.strip("# '") for line in FILES[name].read_text(encoding="utf-8").splitlines()]
    (added,) = (line for line in said if line.startswith("data.train=["))
    first, second = load(FILES[name]), load(FILES[name], [added])
    assert second.data.train[0].path == first.data.train[0].path
    assert second.data.train[0].offset == first.data.max_samples == 10240
    if name == "iter_dpo":
        return  # it generates in the same way
    path = with_rows(name).data.train[0].path
    prompts = []
    for offset in (0, 4):
        source = f"data.train=[{{path: {path}, offset: {offset}}}]"
        config = load(small(name, "generate", tmp_path), [source, "data.max_samples=4"])
        result = generate.run(load(config, [f"run.name=round-{offset}"]))
        assert result["rows"] == 4 and Path(result["selected"]).is_file()
        made = tmp_path / f"round-{offset}" / "generations.jsonl"
        lines = made.read_text(encoding="utf-8").splitlines()
        prompts.append({json.dumps(json.loads(line)["prompt"]) for line in lines})
    assert len(prompts[0]) == len(prompts[1]) == 4 and not prompts[0] & prompts[1]


def test_rl_as_in_lightrft_warms_up_and_falls_to_a_tenth():
    train = load(FILES["lightrft_geo3k"]).train
    rates = [train.lr * lr_factor(update, 1000, train) for update in (0, 30, 515, 1000)]
    assert rates == pytest.approx([1e-6 / 30, 1e-6, 5.5e-7, 1e-7])


# The reward of the right answer in the format that the prompt asks for, for recipes where it is unusual.
FULL = {
    **dict.fromkeys(("iter_dpo", "rejection_sampling"), 1.5),
    **dict.fromkeys(("lightrft_aqa", "lightrft_grm_rl", "lightrft_grm_sft"), 2.0),
    **dict.fromkeys(("r1v_aria", "r1v_clevr", "r1v_clevr_vllm", "r1v_geoqa", "r1v_janus"), 2.0),
    # findings and JSON without a box, 67 characters
    **dict.fromkeys(("medical_drpo", "medical_grpo"), 0.56 + 0.1 * 67 / 600),
    "lmmr1_sokoban": 11.404,
}


def golds(row: Sample, scorer: Scorer):
    recipe = scorer.recipe(row.data_source)
    right = VERIFIERS[recipe.terms[recipe.outcome].verifier].best_answer
    if right is not None:
        return right(reward_sample(row, ""))
    return str(row.answer).rpartition("####")[2].strip()


def test_a_right_answer_in_the_shape_that_is_asked_for_earns_everything(rewards_here):
    alike = defaultdict[tuple[str, str], list[tuple[str, Config]]](list)
    for name in FILES:
        config = load(with_rows(name), ["reward.workers=1"])
        if not config.reward.given or any(t.verifier == "model" for t in config.reward.terms):
            continue
        if config.data.train:
            key = (config.reward.model_dump_json(), config.prompt.format)
            alike[key].append((name, config))  # the worker of a scorer takes seconds to start
    least = {}
    for (_, form), recipes in alike.items():
        scorer = run_parts.make_scorer(recipes[0][1])
        assert scorer is not None
        with scorer:
            for name, config in recipes:
                rows = datasets.load(config.data.train, config.data).samples
                answers = [FORMATS[form].render(golds(row, scorer)) for row in rows]
                samples = [reward_sample(*pair) for pair in zip(rows, answers, strict=True)]
                least[name] = min(scored.reward for scored in scorer.score(samples))
    usual = {name: 1.5 if name.startswith("lmmr1") else 1.0 for name in least}
    assert len(least) == 55 and FULL.keys() <= least.keys()
    assert least == pytest.approx(usual | FULL)
