"""What a GPU in half precision runs instead: fused layers, and many steps of decoding in one CUDA
graph over small pages.
"""
