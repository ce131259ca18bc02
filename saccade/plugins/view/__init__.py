"""`saccade view`: all runs of a folder in a browser, while they train and afterwards."""
