"""Several trainings as one file, each from the checkpoint of the one before."""
