"""Training on several GPUs: a process (rank) for each, which holds the whole model and a part of the
optimizer, and a controller that runs the recipe over all of them.
"""
