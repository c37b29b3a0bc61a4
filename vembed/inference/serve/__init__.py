"""A server of embeddings with the OpenAI protocol and that of TEI, on uvicorn and Starlette."""
