"""`saccade export`: a checkpoint as a folder that others load."""
