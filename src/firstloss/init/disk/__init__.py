"""Initialize weights directly to safetensors files, piece by piece, with direct I/O."""
