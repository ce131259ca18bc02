"""HTTP client of a model endpoint, for an engine or a judge."""
