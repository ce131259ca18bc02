"""DPO and its kin: rows of pairs, public sets, losses, the recipe."""
