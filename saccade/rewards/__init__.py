"""What a response is worth: the table of verifiers, and how their scores combine.

Rewards see plain data (`reward_sample.RewardSample`), never a tensor or a model. This file imports
nothing, so that a worker process starts in a blink; take names from their modules.

    >>> from saccade.plugins.verifiers.extract import extract
    >>> extract("<think>3 + 4</think><answer>7</answer>", ["answer_tag"])
    '7'
"""
