"""GPU code for models in half precision: fused layers, and decoding steps that are captured as CUDA
graphs and read a paged KV cache.
"""
