"""Data sets become samples: containers, record formats, images, prompts, order. No torch."""
