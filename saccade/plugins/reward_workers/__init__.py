"""Rewards in killable processes: verifiers that may hang, and functions of the user in the forms of other systems."""
