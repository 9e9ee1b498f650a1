"""The writer: from an index to output files; `writer.DeepSpeedWriter` lists its steps."""
