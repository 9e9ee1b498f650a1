"""Reports for people: a checkpoint as one self-contained HTML page, and charts."""
