"""DPO and related algorithms: rows of pairs, public sets, losses, the recipe."""
