"""Containers and bytes: torch zip archives (nothing in them is executed), safetensors, local files, object stores."""
