"""Atoms: one safetensors file a parameter, a manifest, extras without pickle. Specified in docs/atom-format.md."""
