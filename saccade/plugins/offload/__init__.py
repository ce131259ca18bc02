"""The state of an optimizer in main memory (`train.offload`)."""
