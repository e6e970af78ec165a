"""What can be done to a model: one stage a file."""
