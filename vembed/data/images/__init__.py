"""Images: files, decoding, and the pixels that a model takes."""
