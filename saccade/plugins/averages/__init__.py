"""An average of the weights that a run trains."""
