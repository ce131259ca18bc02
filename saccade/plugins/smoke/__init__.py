"""`--smoke`: a short run with a tiny model."""
