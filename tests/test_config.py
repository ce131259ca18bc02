"""The schema, its loading and its reference page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from saccade.checks import given_options
from saccade.cli_run import read_config
from saccade.config import DEFAULTS, DataSource, RewardTerm, given, load, meant_by, options, to_yaml, unknown_key
from saccade.config.notation import other_names, parse
from saccade.config.schema.presets import unknown
from saccade.errors import ConfigError
from saccade.plugins.init.init_config import write_config

REPOSITORY = Path(__file__).resolve().parent.parent


def refusal(source: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)  # type: ignore[arg-type]
    return str(caught.value)


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "train: {lr: 1e-6, prompts_per_step: 16}\ndata: {train: rows.jsonl}\nrun: {name: 2024}\n"
        "model: {checkpointing: off}\nval.before: false\n"
    )
    config = load(path, ["train.lr=2e-6", "algorithm.preset=rloo"])
    assert config.train.lr == 2e-6
    assert config.train.prompts_per_step == 16
    assert config.algorithm.preset == ("rloo",)
    assert [source.path for source in config.data.train] == ["rows.jsonl"]
    assert (config.run.name, config.model.checkpointing, config.val.before) == ("2024", "off", False)


def test_an_override_replaces_what_it_contradicts_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("reward: {terms: [exact]}\nalgorithm: {args: {clip_low: 0.1, clip_high: 0.3}}\n")
    chosen = load(path, ["reward.preset=lmmr1_sokoban", "algorithm.args.clip=0.2"])
    assert (chosen.reward.preset, chosen.reward.terms) == ("lmmr1_sokoban", ())
    assert chosen.algorithm.args == {"clip_low": 0.2, "clip_high": 0.2}
    again = load(chosen, ["reward.terms=[math]"]).reward
    assert again.preset is None and [term.verifier for term in again.terms] == ["math"]
    assert [term.verifier for term in load(path, ["reward.preset="]).reward.terms] == ["exact"]
    both = load(path, ["reward.preset=r1v", "reward.terms=[math]"]).reward  # refused later on
    assert both.preset == "r1v" and both.terms
    sources = {"reward": {"by_source": {"a": "math", "default": "exact"}}}
    assert load(sources, ["reward.preset=r1v"]).reward.by_source == {"a": "math"}


@pytest.mark.parametrize(("override", "section", "name", "value"), [
    ("run.max_steps=", "run", "max_steps", None),
    ("val.before=false", "val", "before", False),
    ("rollout.stop=['</answer>']", "rollout", "stop", ("</answer>",)),
    ("train.lr_scale={vision: 0.1}", "train", "lr_scale", {"vision": 0.1}),
    ("resume=auto", "run", "resume", "auto"),
    ("exclude_status=overturn", "algorithm", "exclude_status", ("overturn",)),
    ("run.name=2024", "run", "name", "2024"),
    ("model.checkpointing=off", "model", "checkpointing", "off"),
    ("prompt.instruction=", "prompt", "instruction", ""),
    ("prompt.instruction=Answer: yes or no", "prompt", "instruction", "Answer: yes or no"),
    ("prompt.format={geo: boxed}", "prompt", "format", {"geo": "boxed"}),
    ("prompt.instruction='  #'", "prompt", "instruction", "  #"),
    ("data.keys.answer=", "data", "keys", {"answer": ""}),
    ("train.lr_scale.vision=1e-1", "train", "lr_scale", {"vision": 0.1}),
    ("reward.by_source.geo={verifier: math}", "reward", "by_source", {"geo": {"verifier": "math"}}),
    ("data.train=2024", "data", "train", (DataSource(path="2024"),)),
    ("reward.terms=my #1.py:f", "reward", "terms", (RewardTerm(verifier="my #1.py:f"),)),
])  # fmt: skip
def test_an_override_is_read_as_its_type(override: str, section: str, name: str, value: object) -> None:
    assert getattr(getattr(load(None, [override]), section), name) == value


@pytest.mark.parametrize(
    "name", ["my set #1/rows.jsonl", "a: b.jsonl", "a,b.jsonl", "[1] a.jsonl", "{x}.jsonl", "it's.jsonl"]
)
def test_all_behind_the_sign_is_the_name_of_a_file(name: str, tmp_path: Path) -> None:
    config = load(None, [f"data.train={name}", f"data.val='{name.replace(chr(39), chr(39) * 2)}'"])
    assert [source.path for source in (*config.data.train, *config.data.val)] == [name, name]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"question": "2 + 2?", "answer": "4"}\n')
    write_config(Path("tiny:qwen2_5_vl"), tmp_path / name, tmp_path / "run.yaml")
    assert load(tmp_path / "run.yaml").data.train[0].path == str(tmp_path / name)


def test_the_home_folder_is_found_as_a_shell_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    config = load(None, ["data.train=~/a b.jsonl", "model.path=~/m"])
    assert (config.data.train[0].path, config.model.path) == ("/home/ada/a b.jsonl", "/home/ada/m")
    tree = {"model": {"path": "~/m"}, "env": {"tools": ["~/t.py:f"]}, "data": {"val": ["~/v"]}}
    written = load(tree, ["reward.terms=~/r.py:f", "prompt.instruction=~/x", "run.out=~/runs"])
    assert (written.model.path, written.env.tools) == ("/home/ada/m", ("/home/ada/t.py:f",))
    assert (written.data.val[0].path, written.run.out) == ("/home/ada/v", "/home/ada/runs")
    assert written.reward.terms[0].verifier == "/home/ada/r.py:f"
    assert written.prompt.instruction == "~/x"  # no path


@pytest.mark.parametrize("nothing", ["", "null", "~"])
def test_an_option_of_the_file_is_taken_back(nothing: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {preset: dapo}\ntrain: {samples_per_prompt: 4, betas: }\nsft:\n")
    names = ("algorithm.preset", "train.samples_per_prompt")
    config = load(path, [f"{name}={nothing}" for name in names])
    assert config == load(None) and list(given_options(config)) == []
    assert given([f"{name}={nothing}" for name in names]) == []
    assert given(["sft={mode: plain}", "lr=1", "prompt.instruction="]) == [*("sft", "train.lr", "prompt.instruction")]
    assert "did you mean 'train.lr'" in refusal(path, f"train.lrr={nothing}")


def test_how_plain_words_are_read() -> None:
    assert parse("[true, 1e-6, .5, 1_000, ~]") == [True, 1e-6, 0.5, 1000, None]
    words = ["off", "010", "1:30", "2024-01-01", "e5"]
    assert parse(f"[{', '.join(words)}]") == words


@pytest.mark.parametrize("override", ["reward.terms.0.weight=0.5", "data.train.0.weight=2", "train.lr.peak=1"])
def test_a_part_of_a_value_is_refused_in_one_line(override: str) -> None:
    message = refusal({"reward": {"terms": ["math"]}, "data": {"train": ["a.jsonl"]}}, override)
    assert len(message.splitlines()) == 1 and "is set as a whole; write" in message


def test_limits_that_depend_on_others_are_resolved() -> None:
    single, tools, val = load(None).env, load({"env.name": "tools"}).env, load({"rollout.max_tokens": 99}).val
    assert (single.max_turns, single.max_images, single.min_turn_tokens) == (1, 64, 2000)
    assert (tools.max_turns, tools.max_images) == (6, 12)
    assert load({"env.max_total_tokens": 1600}).env.min_turn_tokens == 100
    assert (val.max_tokens, val.temperature, load({"val.n": 4}).val.temperature) == (99, 0, 1)
    assert load({"val.n": 4, "val.temperature": 0}).val.temperature == 0
    seen = {"env.name": "tools", "env.eval": {"max_total_tokens": 160}}
    limits = load(seen).env.limits(evaluation=True)
    assert (limits["max_turns"], limits["min_turn_tokens"]) == (12, 10)
    assert load(seen | {"env.max_turns": 3}).env.limits(evaluation=True)["max_turns"] == 3
    assert not load(load(None)).model_fields_set


def test_mappings_and_configs_load_alike() -> None:
    mine = {"train": {"lr": 3e-6}, "reward": {"terms": [{"verifier": "math"}]}}
    nested = load(mine)
    assert nested == load({"train.lr": 3e-6, "reward.terms": "math"}) == load(nested)
    assert load(nested, ["train.lr=4e-6"]).train.lr == load(mine, ["train.lr=4e-6"]).train.lr == 4e-6
    assert nested.train.lr == 3e-6 and mine["train"] == {"lr": 3e-6}  # both stay as they are
    for tree in ({"train.lr": 1e-6, "train": {"lr": 3e-6}}, {"train": {"lr": 3e-6}, "train.lr": 1e-6}):
        assert load(tree).train.lr == 1e-6  # a dotted name wins over its section
    again = load(load({"train.lr": 3e-6}))
    assert again.model_fields_set == {"train"} and again.train.model_fields_set == {"lr"}


@pytest.mark.parametrize(("override", "nearest"), [
    ("train.lrr=1e-6", "train.lr"),
    ("rollout.temprature=1", "rollout.temperature"),
    ("algoritm.preset=grpo", "algorithm"),
    ("train.temperature=1", "rollout.temperature"),
    ("learning_rate=1e-6", "train.lr"),
    ("algorithm.gpg_alpha=1", "algorithm.args.gpg_alpha"),
    ("reward.remote={retrys: 1}", "reward.remote.retries"),
])  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest(override: str, nearest: str) -> None:
    assert f"did you mean '{nearest}'?" in refusal(None, override)
    assert refusal(None, "data.quokka=1").startswith("unknown key 'data.quokka'; expected one of data.train, data.val,")


@pytest.mark.parametrize(("override", "words"), [
    ("algorithm.weight_bound=2", ["algorithm.args.weight_floor"]),
    ("data.train=[{path: a.jsonl, wieght: 2}]", ["unknown key 'data.train.0.wieght'; did you mean 'weight'?"]),
    ("reward.terms=[{verifier: math, zzz: 2}]", ["unknown key 'reward.terms.0.zzz'; expected one of ", "verifier"]),
    ("rollout.top_p=1.5", ["rollout.top_p", "at most 1"]),
    ("train.prompts_per_step=many", ["train.prompts_per_step", "whole number", "'many'"]),
    ("rollout.ahead=true", ["rollout.ahead: expects a whole number, got 'true'"]),
    ("train.schedule=cosinus", ["train.schedule", "'cosine'", "'cosinus'"]),
    ("train.layout=fsdp2", ["train.layout: write 'sharded', got 'fsdp2' (On several GPUs"]),
    ("train.layout=ZeRO1", ["train.layout: write 'whole', got 'ZeRO1'"]),
    ("run.launcher=slurm", ["run.launcher: write 'join', got 'slurm' (", "`saccade rank`, under Slurm"]),
    *((f"{key}=2", [f"'{key}'; run.gpus counts the GPUs of all machines"]) for key in ("run.nodes", "trainer.nnodes")),
    ("train.lr", ["write section.key=value"]),
    ("beta=0.1", ["several sections", "dpo.beta", "algorithm.kl.coef"]),
    ("data.train=[7]", ["data.train", "DataSource", "7"]),
    ("rollout.stop=[a", ["rollout.stop=[a", "not valid YAML"]),
    ("algorithm.kl=0.01", ["a section, got 0.01; set one of its options: algorithm.kl.coef"]),
    ("model.series=patches", ["a section, got 'patches'; set one of its options: model.series.encoder, model."]),
    ("reward.serve.colour=1", ["expected one of reward.serve.queue, reward.serve.max_body_mb"]),
])  # fmt: skip
def test_a_bad_value_is_refused_with_field_and_reason(override: str, words: list[str]) -> None:
    message = refusal(None, override)
    assert all(word in message for word in words), message
    assert len(refusal(None, "train.lr=-1", "rollout.max_tokens=0", "val.evry=1").splitlines()) == 3  # all at once


def test_all_gpus_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, device, gpus in ((8, "auto", 8), (8, "cpu", 1), (0, "auto", 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        config = load({"run.gpus": "all", "run.device": device})
        assert (config.run.gpus, load(None, ["gpus=all", f"run.device={device}"]).run.gpus) == (gpus, gpus)
        assert f"gpus: {gpus}" in to_yaml(config, full=False)
    assert "run.gpus: expects a whole number, got 'all' (" in refusal(None, "run.gpus=all", "run.launcher=ray")


@pytest.mark.parametrize("name", ["../escape", "", "..", "a\\b"])
def test_a_run_stays_inside_of_its_folder(name: str) -> None:
    """A name outside it would be dangerous: a smoke test deletes the folder of the last one."""
    assert "run.name: expects one folder name such as geo-1; run.out" in refusal({"run.name": name})
    assert "generate.output: expects a file inside the run fold" in refusal({"generate.output": name})
    assert load({"run.name": "..läufe"}).run.name == "..läufe"


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "missing.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- a\n- b\n")
    assert "must hold sections" in refusal(path)
    path.write_text("train: {lr: [\n")
    assert "not valid YAML" in refusal(path)
    path.write_text("train: {lr: 1e-6}\nrun: {name: a}\ntrain: {prompts_per_step: 2}\n")
    assert "train is there twice" in refusal(path)


def test_names_from_elsewhere_lead_to_options_of_ours() -> None:
    known = {name for name, _ in options()}
    elsewhere = other_names()[0]
    assert {n for n in elsewhere.values() if ".args." not in n} <= known | {"algorithm.hot_first_token"}
    for theirs, ours in other_names()[2].items():
        key, _, value = theirs.partition("=")
        assert load(None, [f"{key}={ours}"])
        if key.startswith("algorithm."):  # names in tables
            assert f"did you mean {ours!r}?" in str(unknown(key, value, [ours, f"{value}x"])), theirs
        else:
            assert "write " in refusal(None, theirs), theirs
    for key, ours in {
        "env.eval.reserve": "env.eval.min_turn_tokens",
        "algorithm.fire": "algorithm.hot_first_token",
        "algorithm.fire.temperature": "algorithm.hot_first_token.temperature",
        "algorithm.fire.first_tokn": "algorithm.hot_first_token.first_token",
    }.items():
        assert refusal(None, f"{key}=3") == f"unknown key {key!r}; did you mean {ours!r}?"
    shared = "unknown key 'data.train.0.keys.prompt'; write data.keys.prompt, which holds for all of data.train"
    assert refusal({"data.train": [{"path": "a", "keys": {"prompt": "q"}}]}) == shared
    assert "write algorithm.preset, such as algorithm.preset=dr_grpo" in refusal(None, "loss_type=dr_grpo")
    assert "write algorithm.advantage=no_std for" in refusal(None, "scale_rewards=false")
    assert "'algorithm.fire.x'; expected one of algorithm.hot_first_token.temp" in refusal(None, "algorithm.fire.x=3")
    leaves = [name.rsplit(".", 1)[-1] for name in known if name.count(".") == 1]
    # The only one of these names that is also an option of ours, with another meaning.
    assert {name for name in elsewhere if leaves.count(name) == 1} == {"beta"}


def test_keys_of_the_docs_lead_to_the_options_beside_them() -> None:
    page = (REPOSITORY / "docs" / "migration.md").read_text(encoding="utf-8")
    known, seen = dict(options()), 0
    for theirs, ours in re.findall(r"^\| (.+) \| (.+) \|$", page.partition("\n## ")[2], re.M):
        keys = [key.lstrip("-.") for key in re.findall(r"`(--\w+|[\w.]*\.\w+)[^`]*`", theirs)]
        wanted = [name for name in re.findall(r"`([\w.]+)`", ours) if name in known or ".args." in name]
        found = [meant_by(key) for key in keys]
        # One to one in the same order if there are as many of each.
        right = found == wanted if len(keys) == len(wanted) else set(found) <= set(wanted)
        assert right or not wanted, (keys, found, wanted)
        seen += len(keys) * bool(wanted)
    assert seen > 120
    assert unknown_key("trainer.val_only").endswith("; use `saccade eval`")
    for key in ("rollout.max_staleness", "algorithm.max_staleness", "async_training.partial_rollout"):
        assert "; write rollout.ahead, and algorithm.correct='[tis.token, {name: recent, " in unknown_key(key)


def test_every_key_of_a_foreign_file_is_answered() -> None:
    """The names are those in the docs; nested sections are searched, and keys that are ours give no message."""
    actor = {"optim": {"lr": 1e-6}, "fsdp": {"enable_full_shard": True}}
    worker = {"actor": actor, "critic": {"optim": {"lr": 1e-5}}, "rollout": {"n": 5}}
    trainer = {"max_steps": 7, "val_only": False}
    said = refusal({"data": {"train_files": "a", "max_pixels": 9999}, "worker": worker, "trainer": trainer})
    found = re.findall(r"^unknown key '(.+)'; .*?(?:mean '(.+)'\?|(remove it)|(`saccade eval`))$", said, re.M)
    assert {key: "".join(answer) for key, *answer in found} == {
        "data.train_files": "data.train",
        "worker.actor.optim.lr": "train.lr",
        "worker.actor.fsdp.enable_full_shard": "remove it",
        "worker.critic.optim.lr": "algorithm.critic.lr",
        "worker.rollout.n": "train.samples_per_prompt",
        "trainer.max_steps": "run.max_steps",
        "trainer.val_only": "`saccade eval`",
    }


def test_sft_and_rl_fill_in_their_own_defaults() -> None:
    rl, sft = (load(None, command=command).train for command in ("rl", "sft"))
    assert (rl.lr, rl.epochs, rl.schedule, rl.warmup) == (1e-6, 1.0, "constant", 0.0)
    assert (sft.lr, sft.epochs, sft.schedule, sft.warmup) == (5e-6, 2.0, "cosine_with_min_lr", 0.03)
    assert load(None, command="eval") == load(None)
    chosen = load({"train": {"lr": 1e-4, "epochs": 1.0, "schedule": "constant", "warmup": 0}})
    assert load(chosen, command="sft") == chosen


@pytest.mark.parametrize("command", ["rl", *(name for name in DEFAULTS if " " not in name)])
def test_defaults_are_filled_in_once_and_are_valid(command: str) -> None:
    once = load({"train.weight_decay": 0}, command=command)
    assert load(once, command=command) == once == load(load(once), command=command)
    assert once.model_fields_set == {"train"}
    assert once.train.model_fields_set == {"weight_decay"}


def test_a_preset_fills_in_what_was_not_given() -> None:
    config = load({"algorithm": {"preset": "easyr1", "kl": {"coef": 0.1}}, "train.lr": 1})
    assert (config.train.samples_per_prompt, config.train.updates_per_step) == (5, 4)
    assert (config.algorithm.args["clip_high"], config.algorithm.kl.coef) == (0.3, 0.1)
    assert config.train.model_fields_set == {"lr"}
    assert config.algorithm.model_fields_set == {"preset", "kl"}
    assert load(config, ["algorithm.preset=dapo"]).train.samples_per_prompt == 16


def test_arguments_of_a_preset_stay_with_it() -> None:
    chosen = load({"algorithm.preset": "easyr1", "algorithm.args": {"clip_low": 0.1, "gamma": None}})
    assert chosen.algorithm.args == {"clip_high": 0.3, "dual_clip": 3.0, "clip_low": 0.1}
    assert yaml.safe_load(to_yaml(chosen, full=False))["algorithm"]["args"] == {"clip_low": 0.1}
    assert load(chosen, ["algorithm.preset=dapo"]).algorithm.args == {"clip_high": 0.28, "clip_low": 0.1}
    assert load(chosen, ["algorithm.args.clip_low="]).algorithm.args == {"clip_high": 0.3, "dual_clip": 3.0}
    assert (load(None).algorithm.kl.kind, load({"algorithm.kl.place": "reward"}).algorithm.kl.kind) == ("k3", "k1")
    (tis,) = load({"algorithm.correct": [{"name": "tis.token", "high": 3}]}).algorithm.correct
    assert tis.model_dump() == {"name": "tis.token", "high": 3}  # nothing that its function has as a default
    assert [load({"dpo.loss": loss}).dpo.beta for loss in ("ipo", "simpo", "kto")] == [0.1, 2.0, 0.01]


MOVED = {
    **{f"algorithm.{name}": f"algorithm.args.{name}" for name in ("std_eps", "gamma", "whiten", "whiten_std")},
    **{f"algorithm.{name}": f"algorithm.args.{name}" for name in ("clip", "clip_low", "clip_high", "dual_clip")},
    **{f"algorithm.{name}": f"algorithm.args.{name}" for name in ("delta", "reward_range")},
    "algorithm.kl.clamp": "algorithm.args.kl_clamp",
}


@pytest.mark.parametrize("name", MOVED)
def test_an_option_that_moved_is_answered_with_its_place(name: str) -> None:
    assert refusal({name: 1}) == f"unknown key '{name}'; did you mean '{MOVED[name]}'?"


def test_yaml_round_trip() -> None:
    config = load({"data.train": ["a.jsonl"], "reward.terms": ["math"], "train.lr": 1e-6})
    assert load(yaml.safe_load(to_yaml(config))).model_dump() == config.model_dump()
    assert load(yaml.safe_load(to_yaml(config, full=False))) == config
    words = load({"run.name": "1e-6", "prompt.instruction": "off", "model.checkpointing": "off"})
    for read in (parse, yaml.safe_load):
        assert load(read(to_yaml(words, full=False))) == words


def test_every_option_says_what_it_does_and_their_list_is_frozen() -> None:
    for name, field in options():
        assert field.description and field.description.endswith("."), name
    assert load(None).model_fields_set == set()
    listed = (Path(__file__).parent / "options.txt").read_text(encoding="utf-8").split()
    assert [name for name, _ in options(keys=False)] == listed
    assert len(listed) <= 240 and len(list(options())) <= 284


@pytest.mark.parametrize("name", ["config_reference.py", "algorithm_reference.py"])
def test_the_reference_pages_are_current(name: str) -> None:
    script = REPOSITORY / "scripts" / name
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_of_a_site_is_laid_over_a_recipe(tmp_path: Path) -> None:
    recipe, site = tmp_path / "recipe.yaml", tmp_path / "site.yaml"
    recipe.write_text("train: {lr: 1e-6, epochs: 2}\ndata: {train: [a.jsonl, b.jsonl]}\nmodel: {path: models/a}\n")
    site.write_text("run.gpus: 8\ntrain: {layout: sharded, lr: 2e-6}\ndata: {train: /data/c.jsonl}\n")
    config = read_config([str(recipe), str(site), "train.epochs=3"])
    assert (config.train.lr, config.train.epochs, config.train.layout, config.run.gpus) == (2e-6, 3, "sharded", 8)
    assert [source.path for source in config.data.train] == ["/data/c.jsonl"] and config.model.path == "models/a"


def test_a_mapping_is_written_as_a_whole_or_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {series: {encoder: patches, channels: 12}}\n")
    written = load(path)
    assert written == load(None, ["model.series={encoder: patches, channels: 12}"])
    assert written == load(None, ["model.series.encoder=patches", "model.series.channels=12"])
    assert load(path, ["series={channels: 3}"]) == load({"model.series.channels": 3})
    assert load(path, ["model.series="]) == load(None)
    for override in ("model.series.channels=0", "model.series={channels: 0}"):
        assert "model.series.channels: " in refusal(path, override)
