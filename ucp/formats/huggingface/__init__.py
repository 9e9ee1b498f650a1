"""Weights as a Hugging Face folder: safetensors shards, index, config and tokenizer."""
