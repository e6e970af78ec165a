"""Trained models in, proven engines out."""
