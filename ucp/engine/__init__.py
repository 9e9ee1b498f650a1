"""The engine: plans, the slab stream, casts, digests, staging and journal. It knows no format."""
