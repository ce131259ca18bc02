"""Rewards of responses: the table of verifiers, and how their scores combine.

Rewards read plain data (`reward_sample.RewardSample`), never tensors or models. This file imports nothing, so that
worker processes start fast; import names from their modules.

    >>> from saccade.plugins.verifiers.extract import extract
    >>> extract("<think>3 + 4</think><answer>7</answer>", ["answer_tag"])
    '7'
"""
