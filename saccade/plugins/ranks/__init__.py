"""Training on several GPUs: one process (rank) per GPU holds the model, or a shard of it, and a part of the optimizer
state; a controller process runs the recipe over all ranks.
"""
