"""`saccade eval`: evaluate a model on sets, or score saved responses again."""
