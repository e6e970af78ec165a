"""Engines from models: one file a runtime."""
