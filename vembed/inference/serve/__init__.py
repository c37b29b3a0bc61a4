"""A small server of embeddings: the OpenAI protocol and that of TEI, on Python's own HTTP server."""
