"""What `saccade check-data` says of a data set."""
