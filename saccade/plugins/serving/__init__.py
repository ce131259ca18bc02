"""An engine behind an OpenAI-compatible endpoint: many clients, one engine, a page to chat."""
