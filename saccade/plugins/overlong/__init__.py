"""What happens to prompts that are too long."""
