"""`saccade quickstart`: a tiny model learns to count."""
