"""`saccade init`: a commented config for a model and a data file."""
