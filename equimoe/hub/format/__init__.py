"""The interchange format on disk: names, config, safetensors, manifest. Read and written; nothing is executed."""
