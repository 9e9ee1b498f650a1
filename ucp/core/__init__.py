"""Values and integer arithmetic: what a checkpoint consists of. No I/O, no numpy, no torch.

The vocabulary of the package. One word means one thing, in code, messages and documentation.

=============  ========================================================================================================
parameter      a named tensor of the model with all its states; trained, frozen or a buffer (`Parameter`)
atom           one state of one parameter, whole, free of any parallel layout: `(name, kind)`, shape, dtype (`Atom`);
               kinds are `weight`, `master`, `step` and the optimizer's own names (`exp_avg`, …)
box            an axis-aligned block: start and length per dimension (`Box`)
region         the part of an atom that one rank holds: a concatenation of boxes, and one flat interval of it
               (`Region`); TP, EP and fused parameters make the boxes, ZeRO makes the interval
fragment       a region and the location of its bytes: file, offset, dtype (`Fragment`)
replica        a set of fragments that must equal another one, bit for bit (`Atom.replicas`)
mesh, rank     degrees of parallelism; the coordinates of one process (`Mesh`, `Rank`)
shard          what the files of one rank hold of one parameter, before it becomes fragments
rule           how a parameter is split over tensor-parallel ranks (`Rule`)
target         the files to write, as values: known bytes, and write items for the rest (`Target`, `OutputFile`)
write item     a region of an atom that goes to an offset of an output file (`WriteItem`)
plan           source, target and copy tasks of one conversion (`Plan`)
copy task      the unit of work of one worker: one block of an atom and every place that it is written to (`CopyTask`)
work shard     process i of n that share one conversion, and the output files it writes (`WorkShard`, `--shard 1/4`)
slab           the block of an atom, about 1 MiB, that is in the CPU cache at a time (`slabs`)
destination    where output goes: a local folder or a prefix of an object store
staging        the unfinished output; the journal lists its finished tasks, the manifest is written last
extras         everything in a checkpoint that is not a parameter state; carried, never executed (`Extras`)
note, finding  a remark of a reader about a source (`Note`); a problem that a check reports (`Finding`)
base, step     a full checkpoint that a gradient log starts from; one optimizer step of the log
segment, frame one file of a gradient log; one checksummed record in it
=============  ========================================================================================================
"""
