"""The calculator tool."""
