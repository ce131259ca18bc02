"""TensorBoard, W&B, and the live display of a terminal."""
