"""Reading atoms: the one place that turns fragments of files into the elements of a tensor.

`verbatim` copies bytes unchanged and needs no numpy; `atom_reader` returns arrays and casts, averages, transposes or
pads on the way; `arrays` is the interface for interactive use. This room is below `formats`, so readers of formats may
look at values with it.
"""
