"""Containers and bytes: torch zip archives read without executing anything, safetensors, local storage."""
