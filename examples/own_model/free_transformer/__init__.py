"""The Free Transformer (Fleuret 2025, arXiv:2510.17558) as an own model of vembed."""

from .model import DecoderBlock, FreeTransformer, ModelConfig

__all__ = ["DecoderBlock", "FreeTransformer", "ModelConfig"]
