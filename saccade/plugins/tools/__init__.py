"""Tools of a policy: crop, calculator, functions of the user."""
