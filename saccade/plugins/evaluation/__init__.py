"""`saccade eval`: results of a model on sets, and scoring saved responses again."""
