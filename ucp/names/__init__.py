"""Parameter names: tables of names (`ucp/data/names`) and how they are applied to a checkpoint.

`select_table` chooses tables, `name_matching` looks names up in them, `renaming` applies them.
"""
