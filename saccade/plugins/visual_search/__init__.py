"""Visual search: drawn scenes, a scripted expert, and cold-start data for sft."""
