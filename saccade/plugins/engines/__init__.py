"""Engines beside the embedded one: vLLM, SGLang, HTTP, replicas; the parity probe."""
