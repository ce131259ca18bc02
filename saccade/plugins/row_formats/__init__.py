"""Rows as other systems write them."""
