"""Configs that cannot run are refused with the field, the reason and a value that works."""

import pytest

from saccade.checks import check, idle_gpus, ignored_options
from saccade.config import given, load, on_one_gpu
from saccade.errors import ConfigError


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "4"}\n')
    return path


def config(rows, *overrides, reward=True):
    base = {"model.path": "tiny:qwen2_5_vl", "data.train": str(rows), "data.val": str(rows)}
    return load(base | ({"reward.terms": ["math"]} if reward else {}), overrides)


SERIES, LORA, PPO = "model.series.encoder=patches", "model.train=lora", "algorithm.preset=ppo"
HTTP = "rollout.engine=http; rollout.http.url=http://127.0.0.1:8000/v1"
JUDGE = "reward.terms=[judge]; reward.judge.model=m; reward.judge.url=http://127.0.0.1:9/v1"


@pytest.mark.parametrize(("command", "overrides", "says"), [
    ("rl", "model.train=freeze:vision; train.lr_scale.vision=0.1", "lr_scale: has no effect without towers"),
    ("rl", f"{LORA}; train.lr_scale.vision=2", "train.lr_scale.vision: model.train=lora adds no adapter"),
    ("rl", "val.before=true; val.every=0", "before: has no effect without val.every > 0; remove it, or .*every=50"),
    ("rl", "model.series.encoder=gone.py:make", r"gone\.py does not exist.*\(looked in /"),
    ("rl", f"{SERIES}; model.train=freeze:vision,series", "vision,series would leave the encoder .* as it was"),
    ("rl", "model.series.patch=5", r"model\.series\.patch: has no effect without an encoder"),
    ("rl", f"{SERIES}; rollout.engine=vllm", "vllm has no encoder for time"),
    ("rl", f"{SERIES}; {LORA}", "as it was drawn; train it first"),
    ("rl", f"{LORA}; model.lora.dropout=0.1", "not the one that answered"),
    ("rl", f"{PPO}; algorithm.critic.path=/nowhere", "algorithm.critic.path: "),
    ("rl", f"{PPO}; run.max_steps=3; algorithm.critic.warmup_steps=3", "algorithm.critic.warmup_steps: "),
    ("rl", "train.sft_coef=0.1", "data.demonstrations: train.sft_coef needs some"),
    ("rl", HTTP, r"rollout\.engine: http.*rollout\.engine=embedded"),
    ("sft", HTTP, r"rollout\.engine: http.*rollout\.engine=embedded"),
    ("eval", "rollout.engine=http", r"rollout\.http\.url=http://127\.0\.0\.1"),
    ("eval", f"{HTTP}; rollout.http.url=http://me:pw@host/v1", "would be logged"),
    ("eval", f"{HTTP}; rollout.http.key=sk-123-456", r"rollout\.http\.key=OPENAI_API_KEY"),
    ("eval", f"{HTTP}; prompt.chat_template={__file__}", "its own template"),
    ("eval", f"{HTTP}; rollout.replicas=2", r"rollout\.replicas=0"),
    ("rl", f"{JUDGE}; reward.judge.url=http://me:pw@host/v1", "would be logged"),
    ("rl", f"{JUDGE}; reward.judge.key=sk-123-456", r"reward\.judge\.key=OPENAI_API_KEY"),
    ("rl", f"{JUDGE}; reward.judge.template=nowhere.jinja", "does not exist"),
    ("rl", f"{JUDGE}; reward.judge.api=completions; reward.judge.send_images=true", r"reward\.judge\.api=chat"),
    ("generate", "generate.select=best; reward.terms=[]", "nothing scores"),
    ("generate", "generate.select=threshold", "generate.threshold=1"),
    ("generate", "generate.threshold=1.0", "no effect without generate.select"),
    ("reward-model", "reward_model.loss=hps; reward_model.margin=0.2", "margin: has no effect without"),
    ("reward-model", "reward_model.bounded=true; reward_model.center_coef=0.1", "where a sigmoid cannot go"),
    ("reward-model", "reward_model.heads={preference: 0}", "weights above 0"),
    ("reward-model", "reward_model.kind=generative", r"sft with data\.pair_view=verdict"),
    ("dpo", "dpo.args.gamma=0.5", "dpo.args.gamma: has no effect with dpo.loss=dpo; remove it"),
    ("sft", "sft.kd_coef=0.2", "sft.kd_coef: has no effect without sft.teacher"),
    ("sft", "sft.reward_tag='{score}'", "sft.reward_tag: .* shows no reward"),
    ("sft", f"train.ema=0.75; {LORA}", "train.ema: averages whole weights"),
])  # fmt: skip
def test_options_that_contradict_each_other(rows, command, overrides, says):
    with pytest.raises(ConfigError, match=says) as caught:
        check(config(rows, *overrides.split("; ")), command)
    assert "sk-123" not in str(caught.value) and "me:pw" not in str(caught.value)


@pytest.mark.parametrize("command", ["eval", "generate", "chat"])
def test_an_endpoint_needs_no_model(rows, command):
    check(config(rows, "model.path=", *HTTP.split("; ")), command)


def test_the_model_around_an_adapter_or_in_a_run_is_named(rows, tmp_path):
    adapter = tmp_path / "step-4" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"is an adapter; try model.path={adapter.parent}$"):
        check(config(rows, f"model.path={adapter}"), "rl")
    for step in (5, 20):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"has no config.json; try model.path={folder}"):
        check(config(rows, f"model.path={tmp_path / 'run'}"), "sft")


@pytest.mark.parametrize(("override", "field", "remedy"), [
    ("model.path=no/such/model", "model.path", "model folder"),
    ("model.train=vision", "model.train", "freeze:vision"),
    ("data.train=no.jsonl", "data.train", "give a file"),
    ("data.train=[]", "data.train", "data.train=train.jsonl"),
    ("data.val=missing.jsonl", "data.val", "data.allow_network=true"),
    ("data.min_pixels=2000000", "data.min_pixels", "data.min_pixels=3136"),
    ("prompt.template=missing.jinja", "prompt.template", "remove it"),
    ("rollout.top_p=0.9", "rollout.top_p", "rollout.truncated_sampling=replay"),
    ("rollout.top_k=50", "rollout.top_k", "use top_k=-1"),
    ("env.max_total_tokens=2048", "env.max_total_tokens", "try 6144"),
    ("env.max_turns=3", "env.max_turns", "env.name=tools"),
    ("train.updates_per_step=129", "train.updates_per_step", "train.updates_per_step=128"),
    ("train.sequence_parallel=3", "train.sequence_parallel", "use run.gpus=3"),
    ("run.gpus=2 train.optimizer=adamw_8bit", "train.optimizer", "not run.gpus=2; try adamw_bf16"),
    ("train.min_lr=0.1", "train.min_lr", "train.schedule=linear"),
    ("train.lr_scale.vision=0", "train.lr_scale", "vision: expects factors above 0"),
    ("reward.terms=[]", "reward.terms", "reward.terms=[math]"),
    ("save.best_metric=val/foo/accuracy", "save.best_metric", "=val/rows/accuracy"),
    ("run.resume=no/such/step", "run.resume", "run.resume=auto"),
    ("generate.n=4", "generate.n", "remove it"),
    ("rollout.parity_max=0.1", "rollout.parity_max", "remove it"),
])  # fmt: skip
def test_what_rl_refuses(rows, override, field, remedy):
    with pytest.raises(ConfigError) as caught:
        check(config(rows, *override.split()), "rl", given(override.split()))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{field}: ") and remedy in line


SCORED, ANSWERED, TRAINERS = (
    f"(only commands that {do} read it); remove it" for do in ("score answers", "answer data.val", "train")
)


@pytest.mark.parametrize(("commands", "override", "reason"), [
    *(("sft", name, "") for name in ("algorithm.kl.coef=0.1", "dpo.beta=0.2", "prompt.permute_choices=true")),
    ("sft dpo reward-model", "rollout.http.url=http://127.0.0.1/v1", ""),
    ("reward-model chat", "reward.terms=[math]", SCORED),
    ("reward-model generate chat", "val.n=4", ANSWERED),
    ("reward-model", "generate.n=4", "(only `saccade generate` reads it); remove it"),
    *(("eval generate chat", name, TRAINERS) for name in ("train.lr=0.1", "save.keep=1", "run.resume=auto")),
    ("eval chat", "data.train=rows.jsonl", ""),
    ("chat", "train.micro_tokens=512", TRAINERS),
])  # fmt: skip
def test_a_command_refuses_what_it_does_not_read(rows, commands, override, reason):
    for command in commands.split():
        with pytest.raises(ConfigError) as caught:
            check(config(rows, override, reward=False), command, given([override]))
        (line,) = str(caught.value).splitlines()
        assert line.startswith(override.partition("=")[0]) and reason in line
        assert f"has no effect in `saccade {command}`" in line
        check(config(rows, override, reward=False), command)  # in the file it is there for another command
    if reason in (SCORED, ANSWERED):
        check(config(rows, override, reward=False), "sft", given([override]))


def test_what_those_that_answer_read_of_training(rows):
    read = ["train.micro_tokens=512", "reward_model.max_tokens=64", "val.n=2"]
    check(config(rows, *read), "eval", given(read))
    check(config(rows, *read), "generate", given([*read[:1], "data.train=rows.jsonl"]))
    for command in ("eval", "generate"):  # a preset may limit rewards, but in training only
        with pytest.raises(ConfigError, match=rf"algorithm.preset: has no effect in `saccade {command}`"):
            check(config(rows), command, given(["algorithm.preset=dapo"]))


def test_what_a_command_does_not_read_is_told_in_a_line(rows):
    several = config(rows, "algorithm.kl.coef=0.1", "algorithm.preset=rloo", "train.lr=1", "eval={}")
    assert ignored_options(several, "sft") == "`saccade sft` does not read algorithm"
    assert ignored_options(several, "rl") is None
    line = "`saccade reward-model` does not read reward, algorithm"
    assert ignored_options(several, "reward-model") == line
    assert on_one_gpu(plain := load(None)) is plain  # nothing was set that a command does not read
    assert ignored_options(on_one_gpu(load(None, ["run.gpus=4"])), "eval") == "`saccade eval` does not read run.gpus"


@pytest.mark.parametrize(("command", "options", "there", "line"), [
    ("rl", "", 8, "1 of 8 GPUs is used; run.gpus=8 uses all of them"),
    ("eval", "", 2, "1 of 2 GPUs is used; rollout.replicas=2 uses all of them"),
    ("eval", "run.gpus=8", 2, "run.gpus=8 is for training, and one GPU answers; rollout.replicas=8 uses as many"),
    *((command, "", there, None) for command in ("sft", "eval") for there in (0, 1)),
    *(("rl", option, 8, None) for option in ("run.gpus=1", "run.gpus=4", "rollout.engine=vllm")),
    *(("generate", f"rollout.replicas=2 run.gpus={gpus}", 8, None) for gpus in (1, 8)),
])  # fmt: skip
def test_gpus_that_nobody_asked_for_are_told(command, options, there, line):
    assert idle_gpus(load(None, options.split(), command), command, there) == line


def test_eval_takes_the_file_of_a_training_run(rows):
    check(config(rows, "algorithm.preset=dapo", "train.updates_per_step=4"), "eval")
    check(config(rows, "rollout.memory_share=0.4", "rollout.parity_max=0.1"), "eval")
    with pytest.raises(ConfigError, match=r"data\.val: nothing to evaluate"):
        check(config(rows, "data.val=[]"), "eval")
    check(config(rows, "run.gpus=4"), "eval")
    with pytest.raises(ConfigError, match=r"run\.gpus: .* try rollout\.replicas=4"):
        check(config(rows, "run.gpus=4"), "eval", ["run.gpus"])


@pytest.mark.parametrize(("command", "overrides"), [
    *((command, []) for command in ("rl", "sft", "eval", "generate", "check-data")),
    ("rl", ["rollout.top_p=0.9", "rollout.truncated_sampling=replay"]),
    ("rl", ["rollout.tensor_parallel=2", "rollout.memory_share=0.4", "rollout.engine=vllm"]),
    ("rl", ["reward.terms=[]", "env.name=my.py:World", "env.max_turns=4"]),
])  # fmt: skip
def test_a_plain_config_and_the_remedies_pass(rows, command, overrides):
    check(config(rows, *overrides), command)


def test_all_problems_come_at_once(rows):
    with pytest.raises(ConfigError) as caught:
        check(config(rows, "rollout.top_p=0.5", "train.updates_per_step=999", "run.resume=x"), "rl")
    assert len(str(caught.value).splitlines()) == 3
