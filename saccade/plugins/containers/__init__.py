"""Data sets in folders, parquet and other tables."""
