"""HTTP servers: an engine behind an OpenAI-compatible endpoint with a chat page, and rewards as a service."""
