"""Readers of data sets in folders, CSV, parquet, arrow and Python files."""
