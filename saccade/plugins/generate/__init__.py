"""`saccade generate`, and scoring saved responses again."""
