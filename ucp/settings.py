"""All tunable numbers. Tests reduce them so that small fixtures take the paths meant for large files."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- Moving bytes ---

# A slab should stay in the CPU cache between read, scatter, checksum and write.
SLAB_BYTES = 1 * MIB

# Largest single write. Linux backs larger writes with 2 MiB pages of page cache, which a virtual machine that has
# returned its free memory to the host gets several times more slowly; smaller writes cost more system calls.
WRITE_BYTES = 1 * MIB

# Files of at least this size are preallocated before they are written.
PREALLOCATE_FILE_BYTES = 1 * MIB

# A rank's slice of a tensor may be stored as many short runs. Below this length it is cheaper to read across the gaps
# than to make one system call per run.
SHORT_RUN_BYTES = 256

# Runs of a tensor-parallel slice of at least this length are copied one by one. Shorter runs are read as one block and
# rearranged by numpy, which takes a worker a tenth of a second to import.
LONG_RUN_BYTES = 512

# Memoryviews of a worker's buffer that are kept from slab to slab; each takes 200 bytes.
CACHED_VIEWS = 16 * KIB

# Transposed matrices are read ahead in strips of columns, up to about this many bytes per thread.
TRANSPOSE_BUFFER_BYTES = 16 * MIB

# Bounce buffer for live tensors that cannot be addressed directly (on an accelerator, or not row-major).
BOUNCE_BYTES = 4 * MIB

# Bytes that the ranks of a job all-gather at a time after a load, summed over ranks.
GATHER_BYTES = 16 * MIB

# Open file descriptors kept for reading; the least recently used are closed first.
MAX_OPEN_FILES = 256

# --- Running a conversion ---

# A copy task is what one thread writes, digests and journals at a time: large enough for negligible bookkeeping, small
# enough that threads balance and a killed run loses little.
COPY_TASK_BYTES = 64 * MIB

# Ranges of the plan per worker: enough that little is planned twice when an idle worker helps another at the end.
PLAN_RANGES_PER_WORKER = 8

# Interval between journal writes. A killed run repeats at most the work of this interval.
JOURNAL_SECONDS = 1.0

# Processes that write one target together check each other for liveness at this interval, and give up on a process
# that has not been seen for this long.
LIVENESS_SECONDS = 1.0
MISSING_PROCESS_SECONDS = 60.0

# Interval between progress reports of a worker process. Handling a report takes CPU time from a worker.
PROGRESS_SECONDS = 0.1

# Progress in a log file: a line after so many seconds, the first number if this share was done since the last line.
PROGRESS_LINE_SECONDS = (5.0, 30.0)
PROGRESS_LINE_SHARE = 0.05

# Computed atoms (replayed from a log) are handed to worker processes in batches of about this size, because computing
# them may take as long as copying a whole task.
COMPUTED_BATCH_BYTES = 16 * MIB

# Free space that must remain on the target's file system after a conversion: a share of the output, at most so much.
SPACE_RESERVE_SHARE = 0.05
SPACE_RESERVE_BYTES = 64 * MIB

# --- Object stores ---

# An index is read in small blocks and few requests: both ends of a file first, and those of the next files. A gap
# between two wanted ranges is read too if it is at most this long.
REMOTE_INDEX_BLOCK_BYTES = 8 * KIB
REMOTE_INDEX_CACHE_BYTES = 128 * MIB
REMOTE_PROBE_BYTES = 64 * KIB
REMOTE_FILES_AHEAD = 32
REMOTE_GAP_BYTES = 16 * KIB

# Slabs are cut from larger blocks, which are prefetched for sequential readers.
REMOTE_BLOCK_BYTES = 4 * MIB
REMOTE_BLOCKS_AHEAD = 2
REMOTE_CACHE_BYTES = 256 * MIB

# Requests: largest range, concurrency, attempts, first and longest delay between attempts, timeout.
REMOTE_REQUEST_BYTES = 8 * MIB
REMOTE_CONNECTIONS = 16
REMOTE_ATTEMPTS = 6
REMOTE_RETRY_SECONDS = 0.25
REMOTE_MAX_RETRY_SECONDS = 16.0
REMOTE_TIMEOUT_SECONDS = 60.0

# Interval of liveness checks between processes that write one target in an object store together.
REMOTE_LIVENESS_SECONDS = 5.0

# Uploads: files are written to local disk first, up to about this many bytes at once, and sent as multipart uploads.
REMOTE_SPOOL_BYTES = 16 * GIB
REMOTE_PART_BYTES = 16 * MIB

# --- File layout ---

# The payload of an atom file starts at a multiple of this, so that file systems with reflink can share extents.
DATA_ALIGNMENT = 4096

# Archives of at least this size in the data files of torch's distributed checkpoints are aligned in the same way.
ALIGNED_ARCHIVE_BYTES = 1 * MIB

# Longest file-name component that is written; longer parameter names are shortened reversibly (see formats/atoms).
MAX_NAME_BYTES = 200

# --- Limits for untrusted input; real files stay far below them ---

MAX_PICKLE_BYTES = 1 * GIB
MAX_ZIP_DIRECTORY_BYTES = 256 * MIB
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
MAX_STORE_SCHEMA_BYTES = 256 * MIB
MAX_DIMENSIONS = 32

# Nested lists that share their elements can expand to more values than fit in memory, so extras are limited.
MAX_EXTRAS_NODES = 5_000_000
MAX_EXTRAS_DEPTH = 200

# --- Checks ---

# Fragments that `ucp verify --quick` examines (about two seconds); it samples larger checkpoints.
QUICK_FRAGMENTS = 200_000

# --- Snapshots ---

# Chunk size of the background copier; smaller tensors than the second number are copied at once.
SNAPSHOT_CHUNK_BYTES = 1 * MIB
SNAPSHOT_SMALL_BYTES = 4 * KIB

# --- Gradient log and replay ---

LOG_BLOCK_ELEMENTS = 256 * KIB  # replay keeps a block and its optimizer states in the CPU cache
LOG_FRAME_BYTES = 16 * MIB  # approximate size of the blocks in one GRAD frame
LOG_SEGMENT_BYTES = 256 * MIB  # retention deletes whole segments
LOG_RING_BYTES = 64 * MIB  # least memory between trainer and writer; more if four steps need more
LOG_RESERVE_BYTES = 16 * MIB  # a segment file grows by this much at a time
LOG_BATCH_BYTES = 8 * MIB  # written before the writer syncs to disk …
LOG_BATCH_SECONDS = 2.0  # … and the longest that a step waits for that sync

# Replayed states kept in memory, summed over worker processes, so that all states of a chunk come from one replay.
REPLAY_CACHE_BYTES = 32 * MIB

# --- Shadow process of a job ---

SHADOW_POLL_SECONDS = 0.02  # interval between looks at the log
SHADOW_EPOCH_SECONDS = 0.5  # interval between checks for a restarted job
SHADOW_PENDING_BYTES = 256 * MIB  # received but not yet applied; more than this stops receiving
SHADOW_QUEUE_BYTES = 64 * MIB  # newest frames that the job keeps for a shadow that reconnects
SHADOW_RETAINED_BYTES = 64 * MIB  # complete steps retained per rank, because other shards may be behind, …
SHADOW_RETAINED_STEPS = 256  # … and at most this many steps
SHADOW_GAP_SECONDS = 30.0  # without progress in the log before a feed with a gap is closed; it may reconnect
SHADOW_ALIGN_SECONDS = 20.0  # for all shards to reach the same step
SHADOW_RING_BYTES = 16 * MIB  # shared memory per rank between a job and a shadow on the same machine
SHADOW_HEARTBEAT_SECONDS = 1.0  # between heartbeats of an idle rank over gloo …
SHADOW_TIMEOUT_SECONDS = 600.0  # … without which the shadow considers it gone
SHADOW_RETRY_SECONDS = 1.0  # between attempts of a job to reconnect to its shadow
SHADOW_SEND_SECONDS = 30.0  # without a byte sent before the job opens another connection
SHADOW_SNAPSHOTS = 4  # at once
SHADOW_CONNECTIONS = 4096
SHADOW_ACCEPT_SECONDS = 0.2  # after a failed accept
SHADOW_TOKEN_BYTES = 16  # least length of a token

# Limits on sizes that a peer announces, checked before any of it is allocated.
SHADOW_HANDSHAKE_SECONDS = 10.0
SHADOW_REQUEST_BYTES = 64 * KIB
SHADOW_MANIFEST_BYTES = 512 * MIB
SHADOW_STEP_BYTES = 1 * MIB
SHADOW_FRAME_BYTES = 64 * MIB
SHADOW_READ_BYTES = 64 * MIB
SHADOW_PADDING_ELEMENTS = 16 * MIB
