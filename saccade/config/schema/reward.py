"""Options of rewards: terms, judges, services."""

from typing import Any, Literal

from saccade.config.schema.rollout import HttpConfig
from saccade.config.schema.section import Section, mapping, option


class RewardTerm(Section):
    verifier: str = option(..., "Verifier (math, choice, judge, model, format:boxed …) or file.py:name.", path=True)
    name: str | None = option(None, "Name in metrics; empty: the verifier's.")
    weight: float = option(1.0, "Factor in the sum.")
    args: dict[str, Any] = option({}, "Arguments of the verifier.")
    when: str | None = option(None, "Counts only where that term is above 0: TERM, or not TERM.")
    shaping: bool | None = option(None, "Added after the combination; empty: the verifier's default.")


class JudgeConfig(HttpConfig):
    concurrency: int = option(64, "Answers judged at once.", ge=1)
    retries: int = option(4, "Further attempts after an error that may pass, or a reply without a verdict.", ge=0)
    deadline: float = option(600.0, "Seconds that an answer waits while the judge gives no sign of life.", gt=0)
    max_tokens: int = option(1024, "Longest reply of the judge.", ge=1)
    scale: int = option(1, "Best score that the judge can give; rewards are score / scale.", ge=1)
    template: str | None = option(None, "Jinja file with question, references, prediction, scale.", path=True)
    send_images: bool = option(False, "Show the judge the images of the question, too.")
    on_failure: Literal["error", "abstain", "rule", "drop_group"] = option(
        "error", "No verdict: an error, an abstention, what a hybrid's rule said, or an error of the group."
    )
    fields: dict[str, Any] = option({}, "Further fields of a request, as they are; null removes one of ours.")


class RemoteConfig(Section):
    url: tuple[str, ...] = option((), "Addresses of a reward service, http://127.0.0.1:8400/get_reward; several share.")
    token: str = option("", "Environment variable that holds the token; empty: none is sent.")
    batch: int = option(64, "Most samples in one request.", ge=1)
    concurrency: int = option(8, "Requests under way at once.", ge=1)
    retries: int = option(4, "Further attempts after an error that may pass.", ge=0)
    timeout: float = option(180.0, "Seconds before an attempt is given up.", gt=0)
    deadline: float = option(600.0, "Seconds for a request in all, also while a busy service asks to wait.", gt=0)
    send_images: bool = option(False, "Send the images of the question, too.")
    template: Literal["chatml", "llama3", "deepseek", "gemma", "mistral", "base", "plain"] = option(
        "chatml", "How prompt and response are joined in `query`, which old services read."
    )
    on_failure: Literal["error", "abstain"] = option("error", "What a sample is that the service did not score.")


class ServeConfig(Section):
    queue: int = option(4096, "Samples that wait or are scored; others are asked to come back later.", ge=1)
    max_body_mb: int = option(256, "Largest request.", ge=1)
    response_after: str = option(
        "", "Text before the response in a `query` without `responses`; empty: the response follows the prompt."
    )
    unscored: float | None = option(None, "What an old client gets for a sample without a score; empty: null.")
    log: str | None = option(None, "JSONL file that gets a line for every sample.", path=True)


class RewardConfig(Section):
    terms: tuple[RewardTerm, ...] = option((), "What is scored; a plain verifier name also works.")
    preset: str | None = option(
        None,
        "Named list of terms: lmmr1_math | lmmr1_sokoban | r1v | easyr1_r1v | easyr1_math | lightrft | "
        "geo3k | gsm8k | medical_safe | hybrid_mc | minio3.",
    )
    combine: str = option("weighted_sum", "weighted_sum | product | min | gate(TERM): the sum where that is positive.")
    accuracy_term: str | None = option(None, "Term that counts as accuracy; empty: the first but format and shaping.")
    by_source: dict[str, Any] = option({}, "Terms or preset name per data_source, 'default' for the rest.")
    running_norm: Literal["off", "std", "mean_std"] = option(
        "off", "Divide by the running deviation of all rewards so far; mean_std: minus their mean."
    )
    clip: tuple[float, float] | None = option(None, "Limits of the reward before group statistics; empty: preset's.")
    reweight_abstained: bool = option(False, "An abstaining term is dropped and the other weights rescaled.")
    judge: JudgeConfig = mapping(JudgeConfig, "The endpoint of judge and hybrid terms; also keys of rollout.http.")
    remote: RemoteConfig = mapping(RemoteConfig, "The service of remote terms; a term's args override it.")
    serve: ServeConfig = mapping(ServeConfig, "What `saccade serve-reward` takes.")
    offload: bool = option(True, "Models of `model` terms wait in main memory while others use the GPU.")
    workers: int = option(2, "Killable processes for verifiers that may hang or are yours.", ge=1)
    deadline: float = option(10.0, "Seconds for one sample; then its worker is killed and it is an error.", gt=0)
    max_error_rate: float = option(0.05, "Stop with exit code 4 when more of a step fails to score.", ge=0, le=1)
    self_test: Literal["strict", "warn", "off"] = option(
        "strict", "Before step 1: gold must score the maximum, empty and foreign answers the minimum."
    )

    @property
    def given(self) -> bool:
        """Whether anything scores a response."""
        return bool(self.terms or self.preset or self.by_source)
