"""The report page, curves, stored pictures, and the diagnosis of a run."""
