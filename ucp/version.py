"""The version of the program. The on-disk format of atoms has a version of its own."""

VERSION = "0.1.0"
