"""Sampling: settings, the draw of one token, sequences that advance with caches, text in and out."""

from equimoe.sampling.generation import generate, generate_text, stream_text, stream_texts

__all__ = ["generate", "generate_text", "stream_text", "stream_texts"]
