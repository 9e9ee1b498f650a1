"""The reader: from rank files to an index; `read_context` lists its stages."""
