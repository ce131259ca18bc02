"""A run says from its first step on why little is learned, with what a user can change."""

from saccade.recipes import rl

MANY = {"train.prompts_per_step": 16, "train.samples_per_prompt": 8, "run.max_steps": 1}
TAGS = {
    "reward.terms": [{"verifier": "count", "args": {"order": ["answer_tag", "boxed"]}}],
    "prompt.format": "think_answer",
}


def log_of(tmp_path, config):
    rl.run(config)
    return (tmp_path / "run" / "log.txt").read_text()


def test_unread_answers_are_said_after_the_first_validation(tmp_path, rl_config, scenes):
    val = {"data.val": str(scenes / "val.jsonl")}
    log = log_of(tmp_path, rl_config(tmp_path) | MANY | TAGS | val)
    line = "all of the responses have no answer that can be read (count looks in answer_tag, boxed;"
    assert log.count(line) == 1 and log.index(line) < log.index("step 1/1")
    assert "; one of them ends with '" in log and "check prompt.format" in log
