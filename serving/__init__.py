"""Engines at work: loading, accuracy and latency. Nothing here imports torch, stages or loaders."""

from serving.engine import load_engine

__all__ = ["load_engine"]
