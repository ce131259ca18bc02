"""TRL's own trainers; without TRL, which takes a second to import, all of this folder is skipped."""

import pytest


@pytest.fixture(scope="session")
def trl_trainer(tmp_path_factory, word_model):
    """TRL's own trainer, GRPO or DPO, around a tiny vision model."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    def make(kind, rows, options, **more):
        plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []}
        folder = str(tmp_path_factory.mktemp("trl"))
        made = getattr(trl, f"{kind}Trainer")(
            model=word_model,
            args=getattr(trl, f"{kind}Config")(output_dir=folder, **plain, **options),
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=AutoTokenizer.from_pretrained(word_model),
            **more,
        )
        made.model.train()
        made.current_gradient_accumulation_steps = 1  # as its loop sets it
        return made

    return make


@pytest.fixture(scope="session")
def trainer(trl_trainer):
    options = {"per_device_train_batch_size": 12, "num_generations": 4, "max_completion_length": 13}
    options |= {"beta": 0.0, "loss_type": "grpo", "temperature": 1.0}
    rewards = lambda completions, **columns: [0.0] * len(completions)  # noqa: E731
    return trl_trainer("GRPO", {"prompt": ["how many ?"]}, options, reward_funcs=rewards)
