"""An exponential moving average (EMA) of the trained weights."""
