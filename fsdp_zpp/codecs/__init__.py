"""Codecs make bytes of values for a hop, and values again. Each codec is one class and knows nothing about ranks."""
