"""Pure data and arithmetic: atoms, boxes, regions, fragments, rules, layouts. No I/O, no torch, no numpy."""
