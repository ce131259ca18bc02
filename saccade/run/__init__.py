"""What a run leaves behind: its folder, metrics, rollouts, checkpoints and display.

A logger that fails is reported once and left out; nothing here can stop a training step but a
checkpoint that cannot be written. Plugins add what is drawn and counted from these records.
"""

from typing import Any

from saccade.registry import Table

# Tables of an evaluation, its page, and advice when little is learned.
REPORTS: Table[Any] = Table("reports", {})
# FLOPs and bytes of a step by the kind of recipe, and rates of what it counted.
WORK: Table[Any] = Table("work", {})
