"""Engines at work: loading, accuracy and latency. Nothing here imports torch, stages or loaders."""
