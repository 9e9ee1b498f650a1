"""Names: what one framework's parameters are called, and how they lie, in another. All knowledge is in `presets/`."""
