"""The report page, curves, stored images, and the diagnosis of a run."""
