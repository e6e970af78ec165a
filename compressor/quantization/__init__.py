"""Post-training quantization of ONNX graphs: ranges of activations, placement of pairs, integer weights."""
