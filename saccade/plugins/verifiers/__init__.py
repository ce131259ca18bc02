"""Rule-based verifiers, which score responses."""
