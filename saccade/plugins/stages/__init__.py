"""Several trainings in one file, each from the checkpoint of the one before."""
