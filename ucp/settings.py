"""Every tunable number in one place. Tests turn them down so that tiny fixtures walk the large-file path."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# A slab should stay in the CPU's cache between read, scatter, checksum and write.
SLAB_BYTES = 1 * MIB

# Most bytes of one write. Linux gives larger ones larger pages of cache: those of two megabytes take a virtual machine
# that has returned its free memory to the host several times as long to get; smaller ones cost system calls.
WRITE_BYTES = 1 * MIB

# Files of at least this size get their blocks before they are written.
RESERVED_FILE_BYTES = 1 * MIB

# A rank's share of a tensor may lie in the source in many short runs; below this length it is cheaper to read across
# the gaps than to make a system call for each.
SHORT_RUN_BYTES = 256

# Runs of a tensor-parallel slice of at least this length go one by one from their file to their place; shorter ones are
# read side by side and put in their places together, by numpy, which takes a worker a tenth of a second to import.
LONG_RUN_BYTES = 512

# Views of a worker's block of memory that are kept from slab to slab; each takes 200 bytes.
KEPT_VIEWS = 16 * KIB

# Of transposed matrices, strips of columns are read ahead: at most about so many bytes a thread.
STRIPS_BYTES = 16 * MIB

# What goes to or from a live tensor that cannot be addressed directly (on an accelerator, or not row-major) goes
# through a buffer of this size.
BOUNCE_BYTES = 4 * MIB

# What the ranks of a job gather at a time after a load, over all of them.
GATHERED_BYTES = 16 * MIB

# A part is what one thread writes, digests and journals at a time: large enough that its bookkeeping costs
# nothing, small enough that threads balance and that a killed run loses little.
PART_BYTES = 64 * MIB

# Stretches of the plan for each worker: enough that little is gone through twice when one helps another at the end.
STRETCHES_OF_A_WORKER = 8

# What is finished is written down so often; a killed run does again what it did since then.
JOURNAL_SECONDS = 1.0

# Processes that write one target together look after each other this often, and give up on one that is gone so long.
LOOK_AT_OTHERS_SECONDS = 1.0
MISSING_PROCESS_SECONDS = 60.0

# Object stores. An index is read in small blocks, and in few requests: both ends of a file first, and those of the
# next files; what lies between two wanted ranges comes along where it is short.
REMOTE_INDEX_BLOCK_BYTES = 8 * KIB
REMOTE_INDEX_CACHE_BYTES = 128 * MIB
REMOTE_FIRST_LOOK_BYTES = 64 * KIB
REMOTE_FILES_AHEAD = 32
REMOTE_GAP_BYTES = 16 * KIB

# Slabs are taken from larger blocks, which are fetched ahead of whoever reads through a file.
REMOTE_BLOCK_BYTES = 4 * MIB
REMOTE_BLOCKS_AHEAD = 2
REMOTE_CACHE_BYTES = 256 * MIB

# Requests: the largest range of one, how many at once, how often again, and pauses between.
REMOTE_REQUEST_BYTES = 8 * MIB
REMOTE_CONNECTIONS = 16
REMOTE_ATTEMPTS = 6
REMOTE_PAUSE_SECONDS = 0.25
REMOTE_LONGEST_PAUSE_SECONDS = 16.0
REMOTE_TIMEOUT_SECONDS = 60.0

# Processes that write one target in a store together tell and look for signs of life this often.
REMOTE_LOOK_SECONDS = 5.0

# Uploads: files are made on this machine, at most about so many bytes of them at once, and sent in parts.
REMOTE_SPOOL_BYTES = 16 * GIB
REMOTE_PART_BYTES = 16 * MIB

# Payload of an atom file starts at a multiple of this, so that file systems with reflink can share extents.
DATA_ALIGNMENT = 4096

# So do the elements of an archive of at least this size in the data files of torch's distributed checkpoints.
ALIGNED_ARCHIVE_BYTES = 1 * MIB

# A worker process tells so often how far it is. Whoever hears it takes time from one that works.
TOLD_SECONDS = 0.1

# Open descriptors kept for reading; the rest are closed in least-recently-used order.
OPEN_FILES = 256

# Longest file-name component that we write; longer parameter names are shortened reversibly (see atoms/paths).
NAME_BYTES = 200

# Hard limits against hostile input. Real files stay far below them.
MAX_PICKLE_BYTES = 1 * GIB
MAX_ZIP_DIRECTORY_BYTES = 256 * MIB
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
MAX_STORE_SCHEMA_BYTES = 256 * MIB
MAX_DIMENSIONS = 32

# A few shared lists inside each other can stand for more values than anyone could write down: extras have a limit.
MAX_EXTRAS_NODES = 5_000_000
MAX_EXTRAS_DEPTH = 200

# Free space that must remain on the target file system after a conversion.
SPACE_RESERVE_BYTES = 64 * MIB

# Fragments that `ucp verify --quick` looks at, about two seconds' worth; of a checkpoint with more it takes a sample.
QUICK_FRAGMENTS = 200_000

# Snapshots. The background copier goes in chunks; what is smaller than a limit is copied at once.
SNAPSHOT_CHUNK_BYTES = 1 * MIB
SNAPSHOT_SMALL_BYTES = 4 * KIB

# The gradient log. A block is what replay keeps in the CPU's cache with its states; a segment is what retention drops.
LOG_BLOCK_ELEMENTS = 256 * KIB
LOG_FRAME_BYTES = 16 * MIB  # of blocks in one GRAD frame, about
LOG_SEGMENT_BYTES = 256 * MIB
LOG_RING_BYTES = 64 * MIB  # of memory between trainer and writer, where that is more than four steps
LOG_RESERVE_BYTES = 16 * MIB  # a segment file grows by this much at a time
LOG_BATCH_BYTES = 8 * MIB  # written before the writer waits for the disk, …
LOG_BATCH_SECONDS = 2.0  # … and how long a step may have to wait for that

# Replayed states that are kept, over all worker processes, so that all states of a stretch are taken from one replay.
REPLAY_CACHE_BYTES = 32 * MIB

# A worker process takes about so many bytes of what is computed at a time: they may take as long as those of a part.
COMPUTED_BATCH_BYTES = 16 * MIB

# The shadow of a job. A log is looked at this often; so much may wait to be applied before more is taken; so much of
# the newest frames is kept in the job for a shadow that comes back.
SHADOW_POLL_SECONDS = 0.02
SHADOW_EPOCH_SECONDS = 0.5  # how often it is looked at whether the job has begun again
SHADOW_PENDING_BYTES = 256 * MIB
SHADOW_QUEUE_BYTES = 64 * MIB
SHADOW_HELD_BYTES = 64 * MIB  # of complete steps that a share keeps back, a rank: others may have come less far, …
SHADOW_HELD_STEPS = 256  # … and at most so many
SHADOW_GAP_SECONDS = 30.0  # without the log coming nearer, before a feed with a gap is ended; it may ask again
SHADOW_ALIGN_SECONDS = 20.0  # for all shares to come to one step
SHADOW_RING_BYTES = 16 * MIB  # of memory that a job and a shadow of one machine share, a rank
SHADOW_BEAT_SECONDS = 1.0  # a rank with nothing to send says so to a shadow over gloo …
SHADOW_SILENCE_SECONDS = 600.0  # … which takes it for gone when it hears nothing for so long
SHADOW_RETRY_SECONDS = 1.0  # between attempts of a job to reach its shadow again
SHADOW_SEND_SECONDS = 30.0  # without a byte going out before the job begins with another connection
SHADOW_SNAPSHOTS = 4  # at once
SHADOW_CONNECTIONS = 4096
SHADOW_ACCEPT_SECONDS = 0.2  # before the next connection is taken where one could not be
SHADOW_TOKEN_BYTES = 16  # that a token must have at least

# What a peer may claim at most before any of it is believed.
SHADOW_HANDSHAKE_SECONDS = 10.0
SHADOW_QUESTION_BYTES = 64 * KIB
SHADOW_MANIFEST_BYTES = 512 * MIB
SHADOW_STEP_BYTES = 1 * MIB
SHADOW_NOTE_BYTES = 64 * MIB
SHADOW_READ_BYTES = 64 * MIB
SHADOW_PADDING_ELEMENTS = 16 * MIB
