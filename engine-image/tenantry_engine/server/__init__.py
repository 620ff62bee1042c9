"""HTTP: the serving port (OpenAI routes) and the admin port. Tokenising happens here, never on the engine's thread."""
