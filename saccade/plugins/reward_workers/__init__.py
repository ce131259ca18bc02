"""Rewards in killable processes: verifiers that may hang, and the user's functions, also in other systems' formats."""
