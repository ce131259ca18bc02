"""Families of models beside Qwen-VL and text; tiny models of every family."""
